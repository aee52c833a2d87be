"""The trainer of a training command with its organizer and its recorder, ready to train or to be looked at."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdo.cli.common.outputs import check_place, missing_folders, remove_empty, try_folder
from sdo.cli.common.terminal import free_streams
from sdo.cli.training.cells import check_cells, text_columns
from sdo.cli.training.config import OrganizerSection
from sdo.cli.training.data import Rows, load_rows
from sdo.cli.training.run_file import (
    Options,
    build_organizer,
    check_before_loading,
    is_ours,
    plain_errors,
    read_options,
    resume_from,
)
from sdo.embeddings.sources import split_names
from sdo.errors import InputError, counted, error_line
from sdo.organizers.plan import Organizer
from sdo.trainers.checkpoints import global_step
from sdo.trainers.dropped import dropped_rows, empty_dataset

Shape = Callable[..., Any]  # as sdo.cli.training.data.as_completions


@dataclass(frozen=True)
class Method:
    """What one training command adds to what all of them share.

    Attributes
    ----------
    trainer, config
        Names of TRL's trainer and of its arguments.
    columns
        Dataclass of the top-level keys that are ours: which columns of the data are what.
    shape
        Turns rows into what the trainer takes, as :func:`sdo.cli.training.data.as_completions` does.
    more
        Given the columns' options, what else the trainer takes.
    """

    trainer: str
    config: str
    columns: type
    shape: Shape
    more: Callable[[Any], dict[str, Any]] | None = None


@dataclass
class Setup:
    """A training command's trainer with all that belongs to it, ready to train or to be looked at.

    Attributes
    ----------
    options
        The sections.
    resume
        A checkpoint's path, or None.
    trainer
        Set once it is built.
    organizer
        Set by :meth:`build_organizer`; None where no section asks for one, or it was refused.
    refused
        None where a refusal is raised at once; else the list that collects refusals of the organizer.
    places
        What is wrong with the folders of the outputs, where nothing is to be written.
    missing
        Folders of the outputs that were not there, innermost first; they go again if nothing comes of the training.
    """

    options: Options
    resume: str | None
    trainer: Any = None
    organizer: Organizer | None = None
    refused: list[str] | None = None
    places: list[str] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)

    def build_organizer(self, rows: Rows, training_seed: int) -> None:
        """Build the organizer where the run file asks for one.

        Parameters
        ----------
        rows
            The training rows, with their ids.
        training_seed
            Serves where the section has no seed.
        """
        if self.options.organizer is None:
            return
        try:
            self.organizer = build_organizer(self.options.organizer, rows, training_seed)
        except InputError as error:
            if self.refused is None:
                raise
            self.refused.append(str(error))

    def say(self, text: str) -> None:
        """Tell the user something: on stdout, which a report of what is only looked at has for itself."""
        print(text, file=sys.stdout if self.refused is None else sys.stderr)

    def equip(self) -> None:
        """Attach the organizer and add the recorder, as the sections say."""
        from diagnostics import GradientRecorder, log_scalars
        from sdo.trainers.attach import attach
        from sdo.trainers.row_ids import refusals

        if self.organizer is not None and self.options.organizer is not None:
            id_column = self.options.organizer.id_column
            found = [] if self.refused is None else refusals(self.trainer, self.organizer, id_column=id_column)
            if found and self.refused is not None:
                self.refused += found
            else:
                attach(self.trainer, self.organizer, id_column=id_column)
        recorder = self.options.recorder
        if recorder is not None and recorder.out is not None:
            self.trainer.add_callback(
                GradientRecorder(
                    recorder.out,
                    signals=recorder.signals,
                    weight=recorder.weight,
                    sample_every=recorder.sample_every,
                    sketch_size=recorder.sketch_size,
                    evaluations=recorder.evaluations,
                    trainer=self.trainer,
                )
            )
            log_scalars(self.trainer)


def prepare(method: Method, args: argparse.Namespace, *, scratch: str | None = None) -> Setup:
    """Build what the run file describes, up to but not including training.

    Parameters
    ----------
    method
        Which trainer.
    args
        With ``config`` and ``overrides``.
    scratch
        A folder in the place of ``output_dir``, for a trainer that is only looked at: nothing is reported or pushed,
        and what an organizer or a recorder would refuse is written into :attr:`Setup.refused` instead of raised.

    Raises
    ------
    InputError
        For wrong input, in one line.
    """
    try:
        import transformers
        import trl
    except ImportError as error:
        raise InputError(f"training needs {error.name}; fix: pip install 'sdo-toolkit[train]'") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    config = getattr(trl, method.config)
    classes = (trl.ScriptArguments, config, trl.ModelConfig, method.columns)
    options = read_options(args.config, args.overrides, classes)
    script, training, model, columns = (options.trl[c] for c in classes)
    if not model.model_name_or_path:
        raise InputError("model_name_or_path is missing; expected a folder or a hub id")
    extra = {} if method.more is None else method.more(columns)
    setup = Setup(options=options, resume=resume_from(training.resume_from_checkpoint, training.output_dir))
    if scratch is None:
        check_before_loading(options, bool(setup.resume))
        _check_outputs(setup, script, training, model)
    else:
        setup.refused = []
        try:
            _check_outputs(setup, script, training, model)
        except InputError as error:
            setup.places.append(str(error))
        training.output_dir, training.report_to, training.push_to_hub = scratch, [], False
    with _leaving_nothing(setup):
        _build_trainer(setup, method, script, training, model, columns, extra)
    return setup


def _check_outputs(setup: Setup, script: Any, training: Any, model: Any) -> None:
    """Refuse folders for checkpoints and run that cannot be written, or where they would replace what is read."""
    recorder = setup.options.recorder
    folders = {"output_dir": Path(training.output_dir)}
    if recorder is not None and recorder.out is not None:
        folders["recorder.out"] = Path(recorder.out)
    for option, folder in folders.items():
        check_place(folder, (script.dataset_name,), option=option, is_run=option == "recorder.out")
    place = Path(os.path.realpath(training.output_dir))
    run = folders.get("recorder.out")
    if run is not None and Path(os.path.realpath(run)) in (place, *place.parents):
        raise InputError(
            f"output_dir {training.output_dir} is in recorder.out {run}; expected a place outside the run folder; "
            "fix: choose another output_dir"
        )
    name = model.model_name_or_path
    if os.path.isdir(name) and str(place) == os.path.realpath(name):
        raise InputError(
            f"output_dir {training.output_dir} is the folder of the model that is trained; expected another, since the "
            "trained model would replace it; fix: choose another output_dir"
        )
    if os.environ.get("RANK", "0") == "0":  # one process tries and tidies for all of a launch
        setup.missing = [missing for folder in folders.values() for missing in missing_folders(folder)]
        for option, folder in folders.items():
            try_folder(folder, option)


@contextlib.contextmanager
def _leaving_nothing(setup: Setup) -> Iterator[None]:
    """Remove the empty folders that a refused or failed command made."""
    try:
        yield
    except BaseException:
        remove_empty(setup.missing)
        raise


def _build_trainer(
    setup: Setup, method: Method, script: Any, training: Any, model: Any, columns: Any, extra: dict[str, Any]
) -> None:
    """Load data, tokenizer and model, and build organizer and trainer."""
    import trl
    from transformers import AutoConfig, AutoTokenizer

    options = setup.options
    id_column = OrganizerSection().id_column if options.organizer is None else options.organizer.id_column
    source = (script.dataset_name, script.dataset_config)
    rows = load_rows(*source, script.dataset_train_split, id_column=id_column, what="dataset_name")
    setup.say(f"data: {rows.source}")
    _check_texts(rows, script.dataset_train_split, script, training, columns, id_column)
    setup.build_organizer(rows, training.seed)
    # TRL moved the option from ModelConfig to the trainer's own arguments.
    trusted = any(bool(getattr(part, "trust_remote_code", False)) for part in (training, model))
    with plain_errors(model.model_name_or_path):
        options_of_model = {"revision": model.model_revision, "trust_remote_code": trusted}
        config = AutoConfig.from_pretrained(model.model_name_or_path, **options_of_model)
        tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, **options_of_model)
    train_rows = method.shape(rows.dataset, columns, tokenizer, id_column=id_column, what="the training dataset")
    eval_rows = None
    if str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no":
        test = load_rows(*source, script.dataset_test_split, id_column=id_column, what="dataset_name")
        setup.say(f"evaluation data: {test.source}")
        _check_texts(test, script.dataset_test_split, script, training, columns, id_column)
        eval_rows = method.shape(test.dataset, columns, tokenizer, id_column=id_column, what="the evaluation dataset")
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": trusted,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    adapter = _adapter(trl.get_peft_config, model)
    with _refusals_of(method.trainer, model.model_name_or_path, config):
        setup.trainer = getattr(trl, method.trainer)(
            model=model.model_name_or_path,
            args=training,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter,
            **extra,
        )
    if not len(setup.trainer.train_dataset):
        raise InputError(empty_dataset(setup.trainer, len(train_rows)))
    lost = [dropped_rows(setup.trainer, len(train_rows))]
    if eval_rows is not None:
        lost.append(dropped_rows(setup.trainer, len(eval_rows), evaluation=True))
    for said in lost:
        if said is not None:
            setup.say(f"note: {said}")


def _check_texts(rows: Rows, split: str, script: Any, training: Any, columns: Any, id_column: str) -> None:
    """Refuse a cell of text that holds something else, by its row."""
    where = "" if split_names(split) == ["train"] else f", split {split}"
    check_cells(
        rows.dataset,
        text_columns(columns, training, rows.dataset.column_names),
        what=f"dataset_name {script.dataset_name}{where}",
        id_column=id_column,
        numbered=rows.whole is not None,
    )


def _adapter(make: Callable[[Any], Any], model: Any) -> Any:
    """Return the adapter's configuration, or None without ``use_peft``."""
    try:
        return make(model)
    except (ImportError, ValueError) as error:
        raise InputError(f"use_peft: {error}; fix: pip install 'sdo-toolkit[lora]'") from error


@contextlib.contextmanager
def _refusals_of(trainer: str, model: str, config: Any) -> Iterator[None]:
    """Say in one line which options, rows or model TRL's trainer refuses; it loads the model too."""
    try:
        yield
    except Exception as error:  # of a model that is broken or of another kind it may be any
        if is_ours(error):
            raise
        if isinstance(error, NotImplementedError) or type(error) is ValueError:
            raise InputError(f"{trainer} refuses: {error}") from error
        kind = ", ".join(getattr(config, "architectures", None) or ["its config.json names no architecture"])
        raise InputError(
            f"{trainer} with the model {model} ({kind}): {error_line(error, named=True)}; expected the folder of a "
            "whole language model or a hub id, and rows that the trainer takes"
        ) from error


def train(setup: Setup) -> int:
    """Attach, record, train, save and say in one line what happened.

    Parameters
    ----------
    setup
        With a trainer that is ready to train.

    Returns
    -------
    int
        0.
    """
    from diagnostics.signals.base import SignalContext
    from diagnostics.signals.registry import signals_of
    from sdo.trainers.ended import EndsInTime, why_ended
    from sdo.trainers.requirements import require_trained_tokens

    trainer, recorder = setup.trainer, setup.options.recorder
    begins = None if setup.resume is None else global_step(Path(setup.resume))
    with _leaving_nothing(setup):
        require_trained_tokens(trainer.train_dataset, shifts=True)
        setup.equip()
        if recorder is not None:
            context = SignalContext(
                trainer.model,
                current=lambda: (0, []),
                clock=contextlib.nullcontext,
                k=recorder.sketch_size,
                sample_every=recorder.sample_every,
            )
            for signal in signals_of(recorder.signals, recorder.weight):
                signal.of(context)  # refuses what the model lacks
        if setup.organizer is None and recorder is None:
            trainer.add_callback(EndsInTime())
        with free_streams(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* had ended .*: nothing was trained")  # said below
            result = trainer.train(resume_from_checkpoint=setup.resume)
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
        trainer.save_model(trainer.args.output_dir)
    where = f"; run folder {recorder.out}" if recorder is not None else ""
    if not trainer.is_world_process_zero():
        return 0
    if result.global_step == begins:
        reason = why_ended(trainer.state) or f"no step was left after {result.global_step}"
        print(f"nothing was trained: {reason}; fix: a larger max_steps or num_train_epochs, or start a new run")
    else:
        print(f"{counted(result.global_step, 'step')}, mean training loss {result.training_loss:.4f}{where}")
    return 0
