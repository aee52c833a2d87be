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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.runs import Run
from sdo.checks import whole_number
from sdo.embeddings import Embeddings
from sdo.errors import InputError
from sdo.rowfiles import READERS, Row, require_columns, whole_numbers

_NAMED = 5  # choices and ids named in a message
_TRUTH = {"true": 1.0, "false": 0.0}
# What lm-evaluation-harness writes into each row beside the metrics.
_HARNESS = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics")
_HARNESS_HASHES = ("doc_hash", "prompt_hash", "target_hash", "schema_version")
_PREFERRED = ("exact_match", "acc", "acc_norm")


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
                "each means; expected row numbers; mend: give --embeddings that were made with --id-column"
            )
        outside = np.flatnonzero((self.ids < 0) | (self.ids >= count))
        if len(outside):
            first = int(self.ids[outside[0]])
            raise InputError(
                f"sample id {first} of {self.name} (and {len(outside) - 1} others) is unknown: embeddings or labels "
                f"have {count} rows; expected 0 to {count - 1}; mend: give those of the whole evaluation set"
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
        Of a sample log: which metric, answered by which filter. By default exact_match, acc, acc_norm or else the first
        metric, and the first filter in the file; what was taken is noted.
    evaluation, step
        Of a run folder: which evaluation, at which step. By default ``correct`` or else the only one in [0, 1], and the
        last step.

    Raises
    ------
    InputError
        If there is no such file, a column is missing, an id is missing or comes twice, a value is no score, or there
        are no rows. The row is named.
    """
    if step is not None:
        step = whole_number("step", step, 0)
    file = Path(path)
    title = name if name is not None else (file.resolve().name if file.is_dir() else file.stem)
    found = _from_run(file, title, evaluation, step) if file.is_dir() else _from_file(file, title, metric, filter)
    return replace(found, source={"path": os.fspath(path), **found.source})


def _from_file(file: Path, name: str, metric: str | None, wanted: str | None) -> Predictions:
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
        return _from_harness(file, name, rows, metric, wanted)
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
            f"{where}: sample_id is {value!r:.40}; expected an integer of 64 bits or a string; mend: put it in quotes"
        )
    return value


def _score(value: Any, column: str, where: str) -> float:
    """Return a score in [0, 1], or say at `where` what is wrong."""
    number = value
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            number = _TRUTH[text] if text in _TRUTH else float(text)
        except ValueError:
            number = None if not text else value
    if number is None:
        raise InputError(f"{where}: {column} is missing; expected 0, 1, true, false or a score in [0, 1]")
    if not isinstance(number, bool | int | float) or not 0 <= number <= 1:  # NaN fails the comparison
        raise InputError(f"{where}: {column} is {value!r:.40}; expected 0, 1, true, false or a score in [0, 1]")
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
            f"{where}: {len(twice)} sample ids come more than once: {named:.200}; expected each question once; "
            "mend: write the mean over a question's answers as its score"
        )
    return Predictions(name, array, np.array(scores, dtype=np.float64), by_position, notes)


def _from_harness(
    file: Path, name: str, rows: Iterator[tuple[str, Row]], metric: str | None, wanted: str | None
) -> Predictions:
    """Read a sample log: a row is a question under a filter, its ``doc_id`` the position in the task's documents."""
    ids: list[int] = []
    scores: list[float] = []
    filters: dict[str, int] = {}
    metrics: list[str] = []
    chosen = metric
    for where, row in rows:
        require_columns(("doc_id",), list(row), where)
        if not metrics:
            metrics = _metrics_of(row)
            chosen = metric or next((one for one in _PREFERRED if one in metrics), metrics[0] if metrics else None)
        under = str(row.get("filter", "none"))
        filters[under] = filters.get(under, 0) + 1
        if wanted is None:
            wanted = under
        if under != wanted:
            continue
        if chosen is None or chosen not in row:
            known = ", ".join(metrics) or "none"
            raise InputError(f"{where}: no metric {chosen!r}; metrics in [0, 1] there: {known}; mend: --metric")
        key = _id(row["doc_id"], where)
        if isinstance(key, str):
            raise InputError(f"{where}: doc_id is {key!r:.40}; expected the number of the document")
        ids.append(key)
        scores.append(_score(row[chosen], chosen, where))
    if not ids:
        raise InputError(f"{file} has no filter {wanted!r}; filters there: {', '.join(filters)}; mend: --filter")
    others = [one for one in metrics if one != chosen] + [f"filter {one}" for one in filters if one != wanted]
    also = f"; also there: {', '.join(others)}" if others else ""
    note = f"{file.name}: lm-evaluation-harness log, metric {chosen}, filter {wanted}{also}"
    found = _checked(name, ids, scores, str(file), by_position=True, notes=(note,))
    return replace(found, source={"format": "sample log of lm-evaluation-harness", "metric": chosen, "filter": wanted})


def _metrics_of(row: Row) -> list[str]:
    """Return the metrics of a row that can be scores, in the order of the file."""
    listed = row.get("metrics")
    names = listed if isinstance(listed, list) else [key for key in row if key not in (*_HARNESS, *_HARNESS_HASHES)]
    values = [(str(one), row.get(one)) for one in names]
    return [one for one, value in values if isinstance(value, bool | int | float) and 0 <= value <= 1]


def _from_run(folder: Path, name: str, evaluation: str | None, step: int | None) -> Predictions:
    """Read one evaluation of a run folder at one step; its sample ids are positions in the evaluation set."""
    table = Run.open(folder).evaluations()
    if not table.num_rows:
        raise InputError(f"{folder}: the run logged no evaluations; mend: recorder.log_evaluation('correct', …)")
    names = np.array(table.column("name").to_pylist())
    steps = table.column("step").to_numpy()
    score = table.column("score").to_numpy(zero_copy_only=False)
    there = list(dict.fromkeys(names.tolist()))
    usable = [one for one in there if (lambda v: ((v >= 0) & (v <= 1)).all())(score[names == one])]
    if evaluation is None:
        evaluation = "correct" if "correct" in there else usable[0] if len(usable) == 1 else None
    if evaluation not in there:
        which = "which evaluation is meant is open" if evaluation is None else f"no evaluation {evaluation!r}"
        fit = ", ".join(usable) or "none"
        raise InputError(
            f"{folder}: {which}; there: {', '.join(there)} (with all scores in [0, 1]: {fit}); mend: --evaluation NAME"
        )
    own = np.flatnonzero(names == evaluation)
    known = np.unique(steps[own])
    at = int(known[-1]) if step is None else step
    if at not in known:
        near = ", ".join(map(str, known[-_NAMED:]))
        raise InputError(
            f"{folder}: {evaluation} was not evaluated at step {at}; the last steps are {near}; mend: --step"
        )
    own = own[steps[own] == at]
    where = f"{folder}, evaluation {evaluation}, step {at}"
    scores = [_score(one, "score", where) for one in score[own].tolist()]
    note = f"{name}: run folder, evaluation {evaluation}, step {at} of {len(known)} evaluated"
    ids = table.column("sample_id").to_numpy()[own].tolist()
    found = _checked(name, ids, scores, where, by_position=True, notes=(note,))
    return replace(found, source={"format": "run folder", "evaluation": evaluation, "step": at})
