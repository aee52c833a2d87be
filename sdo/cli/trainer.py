"""The trainer of a training command with its organizer and its recorder, ready to train or to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdo.cli.train import Options, Rows, build_organizer
from sdo.errors import InputError
from sdo.organizer import Organizer


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

    def equip(self) -> None:
        """Attach the organizer and add the recorder, as the sections say."""
        from diagnostics import GradientRecorder, log_scalars
        from sdo.trl import attach, refusals

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
                )
            )
            log_scalars(self.trainer)


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
    from diagnostics.signals import find_weight

    trainer, recorder = setup.trainer, setup.options.recorder
    setup.equip()
    if recorder is not None and "weight" in recorder.signals:
        find_weight(trainer.model, recorder.weight)
    result = trainer.train(resume_from_checkpoint=setup.resume)
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
        trainer.save_model(trainer.args.output_dir)
    where = f"; run folder {recorder.out}" if recorder is not None else ""
    print(f"{result.global_step} steps, mean training loss {result.training_loss:.4f}{where}")
    return 0
