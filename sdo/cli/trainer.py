"""The trainer of a training command with its organizer and its recorder, ready to train or to be looked at."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sdo.cli.config import OrganizerOptions
from sdo.cli.data import Rows, load_rows
from sdo.cli.train import Options, build_organizer, check_before_loading, plain_errors, read_options, resume_from
from sdo.errors import InputError
from sdo.organizer import Organizer

Shape = Callable[..., Any]  # as sdo.cli.data.as_completions


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
        Turns rows into what the trainer takes, as :func:`sdo.cli.data.as_completions` does.
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
    """

    options: Options
    resume: str | None
    trainer: Any = None
    organizer: Organizer | None = None
    refused: list[str] | None = None

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
        from sdo.refusals import refusals
        from sdo.trl import attach

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
        raise InputError(f"training needs {error.name}; mend: pip install 'sdo-toolkit[train]'") from error
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
    else:
        setup.refused = []
        training.output_dir, training.report_to, training.push_to_hub = scratch, [], False
    _build_trainer(setup, method, script, training, model, columns, extra)
    return setup


def _build_trainer(
    setup: Setup, method: Method, script: Any, training: Any, model: Any, columns: Any, extra: dict[str, Any]
) -> None:
    """Load data, tokenizer and model, and build organizer and trainer."""
    import trl
    from transformers import AutoConfig, AutoTokenizer

    options = setup.options
    id_column = OrganizerOptions().id_column if options.organizer is None else options.organizer.id_column
    source = (script.dataset_name, script.dataset_config)
    rows = load_rows(*source, script.dataset_train_split, id_column=id_column, what="dataset_name")
    setup.say(f"data: {rows.source}")
    setup.build_organizer(rows, training.seed)
    # TRL moved the option from ModelConfig to the trainer's own arguments.
    trusted = any(bool(getattr(part, "trust_remote_code", False)) for part in (training, model))
    with plain_errors(model.model_name_or_path):
        options_of_model = {"revision": model.model_revision, "trust_remote_code": trusted}
        AutoConfig.from_pretrained(model.model_name_or_path, **options_of_model)
        tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, **options_of_model)
    train_rows = method.shape(rows.dataset, columns, tokenizer, id_column=id_column, what="the training dataset")
    eval_rows = None
    if str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no":
        test = load_rows(*source, script.dataset_test_split, id_column=id_column, what="dataset_name")
        setup.say(f"evaluation data: {test.source}")
        eval_rows = method.shape(test.dataset, columns, tokenizer, id_column=id_column, what="the evaluation dataset")
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": trusted,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    adapter = _adapter(trl.get_peft_config, model)
    with _refusals_of(method.trainer):
        setup.trainer = getattr(trl, method.trainer)(
            model=model.model_name_or_path,
            args=training,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            peft_config=adapter,
            **extra,
        )


def _adapter(make: Callable[[Any], Any], model: Any) -> Any:
    """Return the adapter's configuration, or None without ``use_peft``."""
    try:
        return make(model)
    except (ImportError, ValueError) as error:
        raise InputError(f"use_peft: {error}; mend: pip install 'sdo-toolkit[lora]'") from error


@contextlib.contextmanager
def _refusals_of(trainer: str) -> Iterator[None]:
    """Say in one line which options or rows TRL's trainer refuses."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"{trainer} refuses: {error}") from error


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
    from diagnostics.launch import require_trained_tokens
    from diagnostics.signals import find_weight

    trainer, recorder = setup.trainer, setup.options.recorder
    require_trained_tokens(trainer.train_dataset, shifts=True)
    setup.equip()
    if recorder is not None and "weight" in recorder.signals:
        find_weight(trainer.model, recorder.weight)
    result = trainer.train(resume_from_checkpoint=setup.resume)
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
        trainer.save_model(trainer.args.output_dir)
    where = f"; run folder {recorder.out}" if recorder is not None else ""
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps, mean training loss {result.training_loss:.4f}{where}")
    return 0
