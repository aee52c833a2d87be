"""Which questions a model answered correctly, as the usual files say it.

Read are JSON Lines, CSV and Parquet with the columns ``sample_id`` and ``correct``, the sample logs of
lm-evaluation-harness (``samples_TASK_TIME.jsonl``, written with ``--log_samples``) and run folders with evaluations.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.balance.measures import common_evaluation, common_metric, common_step
from analysis.run_folder.run import Run
from sdo.checks import whole_number
from sdo.embeddings.matrix import Embeddings
from sdo.embeddings.row_files import READERS, Row, require_columns, whole_numbers
from sdo.errors import InputError, counted

_NAMED = 5  # choices and ids named in a message
_TRUTH = {"true": 1.0, "false": 0.0}
# What lm-evaluation-harness writes into each row beside the metrics.
_HARNESS = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics")
_HARNESS_HASHES = ("doc_hash", "prompt_hash", "target_hash", "schema_version")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Scored answers of one run, one for each question.

    Attributes
    ----------
    name
        What tables and plots call the run.
    ids
        Shape ``(n,)``, sample ids, int64 or strings, each once.
    score
        Shape ``(n,)``, float64 in [0, 1]: correctness, or the mean over several answers.
    by_position
        Whether ids are positions in the evaluation set, even where embeddings bring ids of their own.
    notes
        What was chosen in reading the file, in words.
    source
        What was read, for provenance: ``path`` as it was given, ``format``, and which ``metric`` and ``filter`` of a
        sample log, ``evaluation`` and ``step`` of a run folder; empty for answers that came from Python.
    """

    name: str
    ids: NDArray[Any]
    score: NDArray[np.float64]
    by_position: bool = False
    notes: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, count: int, embeddings: Embeddings | None = None) -> NDArray[np.int64]:
        """Return the row number of each question in embeddings, labels and prompts.

        Parameters
        ----------
        count
            Rows there are.
        embeddings
            If they bring ids, the sample ids are keys into these.

        Raises
        ------
        InputError
            If an id is unknown or of the wrong kind; the first is named.
        """
        if embeddings is not None and embeddings.ids is not None and not self.by_position:
            return embeddings.rows_of(self.ids, f"sample ids of {self.name}")
        if self.ids.dtype.kind == "U":
            raise InputError(
                f"sample ids of {self.name} are strings such as {str(self.ids[0])!r:.40}, but nothing says which row "
                "each means; expected row numbers; fix: give --embeddings that were made with --id-column"
            )
        outside = np.flatnonzero((self.ids < 0) | (self.ids >= count))
        if len(outside):
            first = int(self.ids[outside[0]])
            others = counted(len(outside) - 1, "other")
            raise InputError(
                f"sample id {first} of {self.name} (and {others}) is unknown: embeddings or labels have "
                f"{counted(count, 'row')}; expected 0 to {count - 1}; fix: give those of the whole evaluation set"
            )
        return self.ids


def read_predictions(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    metric: str | None = None,
    filter: str | None = None,  # noqa: A002 - the harness' own word
    evaluation: str | None = None,
    step: int | None = None,
) -> Predictions:
    """Read the predictions of one run.

    Parameters
    ----------
    path
        A ``.jsonl``, ``.csv`` or ``.parquet`` file with the columns ``sample_id`` (integer or string, each once) and
        ``correct`` (0, 1, true, false or a score in [0, 1]); a sample log of lm-evaluation-harness; or a run folder.
    name
        Of the run; by default the name of the file without its ending, or of the folder.
    metric, filter
        Of a sample log: which metric, answered by which filter. By default the first filter in the file under which a
        metric lies in [0, 1] in all rows; of these metrics exact_match, acc, acc_norm or else the first. What was taken
        is noted.
    evaluation, step
        Of a run folder: which evaluation, at which step. By default ``correct`` or else the only one in [0, 1], and the
        last step.

    Raises
    ------
    InputError
        If there is no such file, a column is missing, an id is missing or comes twice, a value is no score, there are
        no rows, or an option is for another kind of file. The row is named.

    See Also
    --------
    read_all_predictions : for runs that are to be compared.
    """
    names = None if name is None else [name]
    return read_all_predictions([path], names=names, metric=metric, filter=filter, evaluation=evaluation, step=step)[0]


def read_all_predictions(
    paths: Sequence[str | os.PathLike[str]],
    *,
    names: Sequence[str] | None = None,
    metric: str | None = None,
    filter: str | None = None,  # noqa: A002 - the harness' own word
    evaluation: str | None = None,
    step: int | None = None,
) -> list[Predictions]:
    """Read the predictions of several runs by one measure, so that they can be compared.

    Parameters
    ----------
    paths
        At least one, each as for `read_predictions`.
    names
        One for each path.
    metric, filter
        Of all sample logs. By default what `read_predictions` takes, of what all have, in the order of the first.
    evaluation, step
        Of all run folders. By default ``correct`` or else the only one in [0, 1] that all have, and the latest step
        that all have.

    Returns
    -------
    list of Predictions
        In the order of `paths`. Those of several logs, or run folders, hold one note that names their measure.

    Raises
    ------
    InputError
        As `read_predictions`; if there is no measure that all have: what each has is named; and if paths and names are
        not one for each run.
    """
    if isinstance(paths, str | os.PathLike) or not len(paths) or (names is not None and len(names) != len(paths)):
        raise InputError("paths and names must be sequences with one for each run, and at least one path")
    if step is not None:
        step = whole_number("step", step, 0)
    files = [Path(path) for path in paths]
    titles = names or [file.resolve().name if file.is_dir() else file.stem for file in files]
    opened = [
        _Evaluations.open(file, title) if file.is_dir() else _from_file(file, title)
        for file, title in zip(files, titles, strict=True)
    ]
    logs = [one for one in opened if isinstance(one, _SampleLog)]
    folders = [one for one in opened if isinstance(one, _Evaluations)]
    for there, kinds, asked in (
        (logs, "sample logs of lm-evaluation-harness", {"metric": metric, "filter": filter}),
        (folders, "run folders", {"evaluation": evaluation, "step": step}),
    ):
        for option, value in asked.items():
            if value is not None and not there:
                raise InputError(f"--{option} {value}: it is for {kinds}, and none came; fix: leave it out")
    of_logs, of_folders = iter(_by_metric(logs, metric, filter)), iter(_by_evaluation(folders, evaluation, step))
    found = []
    for one, path in zip(opened, paths, strict=True):
        read = one if isinstance(one, Predictions) else next(of_logs if isinstance(one, _SampleLog) else of_folders)
        found.append(replace(read, source={"path": os.fspath(path), **read.source}))
    return found


def _from_file(file: Path, name: str) -> Predictions | _SampleLog:
    reader = READERS.get(file.suffix.lower())
    if reader is None or not file.is_file():
        what = "no such file or folder" if not file.exists() else f"ends in {file.suffix or 'nothing'}"
        raise InputError(f"predictions {file}: {what}; expected a .jsonl, .csv or .parquet file, or a run folder")
    rows = reader(file, ("sample_id", "correct"))
    first = next(rows, None)
    if first is None:
        raise InputError(f"{file} holds no rows; expected at least one prediction")
    rows = itertools.chain([first], rows)
    if _is_harness(first[1]):
        return _SampleLog.read(file, name, rows)
    ids: list[Any] = []
    scores: list[float] = []
    for where, row in rows:
        require_columns(("sample_id", "correct"), list(row), where)
        ids.append(_id(row["sample_id"], where))
        scores.append(_score(row["correct"], "correct", where))
    if file.suffix.lower() == ".csv":
        ids = whole_numbers(ids)
    return replace(_checked(name, ids, scores, str(file)), source={"format": "sample_id and correct"})


def _is_harness(row: Row) -> bool:
    return "doc_id" in row and "sample_id" not in row and ("resps" in row or "filtered_resps" in row)


def _id(value: Any, where: str) -> int | str:
    if isinstance(value, float) and value.is_integer():  # as pandas writes integers beside missing ones
        value = int(value)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
        came = "is missing" if missing else f"is {value!r:.40}"
        raise InputError(f"{where}: sample_id {came}; expected an integer or a string")
    if not -(2**63) <= value < 2**63:
        raise InputError(
            f"{where}: sample_id is {value!r:.40}; expected an integer of 64 bits or a string; fix: put it in quotes"
        )
    return value


def _score(value: Any, column: str, where: str, remedy: str = "") -> float:
    """Return a score in [0, 1], or say at `where` what is wrong."""
    expected = f"expected 0, 1, true, false or a score in [0, 1]{remedy and '; '}{remedy}"
    number = value
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            number = _TRUTH[text] if text in _TRUTH else float(text)
        except ValueError:
            number = None if not text else value
    if number is None:
        raise InputError(f"{where}: {column} is missing; {expected}")
    if not isinstance(number, bool | int | float) or not 0 <= number <= 1:  # NaN fails the comparison
        raise InputError(f"{where}: {column} is {value!r:.40}; {expected}")
    return float(number)


def _checked(
    name: str,
    ids: Sequence[Any],
    scores: Sequence[float],
    where: str,
    *,
    by_position: bool = False,
    notes: tuple[str, ...] = (),
) -> Predictions:
    kinds = {isinstance(one, str) for one in ids}
    if len(kinds) > 1:
        raise InputError(f"{where}: sample ids mix integers and strings; expected one kind")
    array = np.array(ids) if True in kinds else np.array(ids, dtype=np.int64)
    values, counts = np.unique(array, return_counts=True)
    twice = values[counts > 1]
    if len(twice):
        named = ", ".join(repr(one) for one in twice[:_NAMED].tolist())
        raise InputError(
            f"{where}: sample ids come more than once: {named:.200} ({len(twice)} of them); expected each once; "
            "fix: write the mean over a question's answers as its score"
        )
    return Predictions(name, array, np.array(scores, dtype=np.float64), by_position, notes)


@dataclass(frozen=True, eq=False)
class _SampleLog:
    """A sample log: a row is a question under a filter, its ``doc_id`` the position in the task's documents.

    `rows` holds, by filter, each row's place in the file, doc_id and values beside what the harness always writes;
    `named` what the first row of the filter calls its metrics.
    """

    file: Path
    name: str
    rows: dict[str, list[tuple[str, Any, Row]]]
    named: dict[str, list[str]]

    @classmethod
    def read(cls, file: Path, name: str, rows: Iterator[tuple[str, Row]]) -> _SampleLog:
        found = cls(file, name, {}, {})
        for where, row in rows:
            require_columns(("doc_id",), list(row), where)
            under, listed = str(row.get("filter", "none")), row.get("metrics")
            values = {key: value for key, value in row.items() if key not in (*_HARNESS, *_HARNESS_HASHES)}
            if under not in found.rows:
                found.named[under] = [str(one) for one in listed] if isinstance(listed, list) else list(values)
            found.rows.setdefault(under, []).append((where, row["doc_id"], values))
        return found

    @cached_property
    def usable(self) -> dict[str, list[str]]:
        """By filter, the metrics that are scores in all its rows, in the order of the file."""
        return {
            under: [one for one in names if all(_is_score(values.get(one)) for _, _, values in self.rows[under])]
            for under, names in self.named.items()
        }

    def take(self, metric: str, under: str, common: tuple[str, ...]) -> Predictions:
        ids: list[int] = []
        scores: list[float] = []
        fit = ", ".join(self.usable[under]) or "none"
        remedy = f"metrics in [0, 1] there: {fit}; fix: --metric"
        for where, doc_id, values in self.rows[under]:
            if metric not in values:
                raise InputError(f"{where}: no metric {metric!r}; {remedy}")
            key = _id(doc_id, where)
            if isinstance(key, str):
                raise InputError(f"{where}: doc_id is {key!r:.40}; expected the number of the document")
            ids.append(key)
            scores.append(_score(values[metric], metric, where, remedy))
        others = [one for one in self.usable[under] if one != metric]
        others += [f"filter {one}" for one in self.rows if one != under]
        also = f"; also there: {', '.join(others)}" if others else ""
        note = f"{self.file.name}: lm-evaluation-harness log, metric {metric}, filter {under}{also}"
        found = _checked(self.name, ids, scores, str(self.file), by_position=True, notes=(*common, note))
        return replace(
            found, source={"format": "sample log of lm-evaluation-harness", "metric": metric, "filter": under}
        )


def _is_score(value: Any) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def _by_metric(logs: Sequence[_SampleLog], metric: str | None, under: str | None) -> list[Predictions]:
    if not logs:
        return []
    metric, under = common_metric({str(log.file): log.usable for log in logs}, metric, under)
    note = f"one measure for the {len(logs)} sample logs: metric {metric}, filter {under}"
    return [log.take(metric, under, (note,) if len(logs) > 1 else ()) for log in logs]


@dataclass(frozen=True, eq=False)
class _Evaluations:
    """The evaluations of a run folder, row by row; their sample ids are positions in the evaluation set."""

    folder: Path
    name: str
    evaluation: NDArray[Any]
    step: NDArray[np.int64]
    score: NDArray[np.float64]
    sample: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, name: str) -> _Evaluations:
        run = Run.open(folder)
        run.check()
        table = run.evaluations()
        if not table.num_rows:
            raise InputError(f"{folder}: the run logged no evaluations; fix: recorder.log_evaluation('correct', …)")
        return cls(
            folder,
            name,
            evaluation=np.array(table.column("name").to_pylist()),
            step=table.column("step").to_numpy(),
            score=table.column("score").to_numpy(zero_copy_only=False),
            sample=table.column("sample_id").to_numpy(),
        )

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.evaluation.tolist()))

    @cached_property
    def usable(self) -> list[str]:
        """Evaluations with all scores in [0, 1]."""
        outside = set(self.evaluation[~((self.score >= 0) & (self.score <= 1))].tolist())
        return [one for one in self.names if one not in outside]

    def steps(self, evaluation: str) -> list[int]:
        known: list[int] = np.unique(self.step[self.evaluation == evaluation]).tolist()
        return known

    def take(self, evaluation: str, step: int, common: tuple[str, ...]) -> Predictions:
        own = np.flatnonzero((self.evaluation == evaluation) & (self.step == step))
        where = f"{self.folder}, evaluation {evaluation}, step {step}"
        remedy = f"with all scores in [0, 1]: {', '.join(self.usable) or 'none'}; fix: --evaluation NAME"
        scores = [_score(one, "score", where, remedy) for one in self.score[own].tolist()]
        known = counted(len(self.steps(evaluation)), "evaluated step")
        note = f"{self.name}: run folder, evaluation {evaluation}, step {step}, of {known}"
        ids = self.sample[own].tolist()
        found = _checked(self.name, ids, scores, where, by_position=True, notes=(*common, note))
        return replace(found, source={"format": "run folder", "evaluation": evaluation, "step": step})


def _by_evaluation(folders: Sequence[_Evaluations], evaluation: str | None, step: int | None) -> list[Predictions]:
    if not folders:
        return []
    evaluation = common_evaluation(
        {str(one.folder): one.names for one in folders}, {str(one.folder): one.usable for one in folders}, evaluation
    )
    steps = {str(one.folder): one.steps(evaluation) for one in folders}
    at = common_step(steps, evaluation, step)
    note = f"one measure for the {len(folders)} run folders: evaluation {evaluation}, step {at}"
    last = max(known[-1] for known in steps.values())
    if step is None and at < last:
        note += f", the latest that all have (the last of any is {last})"
    return [one.take(evaluation, at, (note,) if len(folders) > 1 else ()) for one in folders]
