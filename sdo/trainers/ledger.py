"""The trained ledger: what really happened, step by step, held against what was planned."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from sdo.embeddings.matrix import within_batch_cosine
from sdo.organizers.plan import Plan
from sdo.trainers.ids import BatchIds
from sdo.trainers.requirements import no_ids_came
from sdo.trainers.session import TrainingSession


class TrainedLedger:
    """Counts the samples of updates that really happened.

    Parameters
    ----------
    plan
        What each step is to train.
    session
        The model's, which tells the ids of each micro-batch and takes the figures of each step.
    steps_per_batch
        Optimizer steps that train on one batch of the plan.

    Attributes
    ----------
    trained
        Shape ``(n,)``, int64, aligned with ``plan.ids``.
    skipped
        Steps whose update did not happen.
    ids
        The samples of this process in the step under way, in the order of their micro-batches.
    """

    def __init__(self, plan: Plan, session: TrainingSession, steps_per_batch: int = 1) -> None:
        self.trained = np.zeros(len(plan.ids), dtype=np.int64)
        self.skipped: list[int] = []
        self.ids: list[int] = []
        self.steps_per_batch = steps_per_batch
        self._plan, self._session = plan, session
        self._counted = -1  # the latest batch of the plan that is in the ledger
        session.subscribe(self.note_ids)

    def note_ids(self, ids: BatchIds) -> None:
        """Collect the ids of a micro-batch, as they came with the batch itself."""
        self.ids.extend(ids.sample_ids)

    def detach(self) -> None:
        """Hear of no more micro-batches."""
        self._session.unsubscribe(self.note_ids)

    def begin_step(self) -> None:
        """Forget the ids of the step before."""
        self.ids = []

    def planned(self, step: int) -> NDArray[np.int64]:
        """Return the samples that the plan holds for an optimizer step."""
        return self._plan.step(step // self.steps_per_batch).sample_ids

    def require_ids(self, step: int) -> None:
        """Refuse, with a RuntimeError, a step that nobody told the samples of."""
        if not self.ids:
            raise RuntimeError(f"step {step}: {no_ids_came()}")

    def require_share(self, step: int, expected: NDArray[np.int64]) -> None:
        """Refuse, with a RuntimeError, a step of which this process trained other samples than these."""
        if sorted(self.ids) != sorted(expected.tolist()):
            raise RuntimeError(
                f"step {step} trained samples {sorted(self.ids)}, but the plan holds {sorted(expected.tolist())}; "
                "something else changed the data loader of this trainer"
            )

    def count(self, step: int, samples: NDArray[np.int64], *, skipped: bool) -> None:
        """Count the samples of a step that was trained, or note that its update was skipped, and tell the figures."""
        batch = step // self.steps_per_batch
        if skipped:
            self.skipped.append(step)
        elif batch != self._counted:  # once, at its first update
            self.trained[self._plan.positions(samples)] += 1
            self._counted = batch
        self._note_figures(samples)

    def resume(self, steps: int, skipped: list[int]) -> None:
        """Set the ledger to what the steps before ``steps`` trained: the batches that had at least one update."""
        self.skipped, each = skipped, self.steps_per_batch
        batches = -(-steps // each)
        self.trained[:] = self._plan.counts(batches)
        self._counted = batches - 1
        for batch, count in Counter(step // each for step in skipped).items():
            if count == min(each, steps - batch * each):
                self.trained[self._plan.positions(self._plan.batch(batch))] -= 1
                if batch == self._counted:
                    self._counted = -1

    def _note_figures(self, batch: NDArray[np.int64]) -> None:
        figures, embeddings = self._session.figures, self._plan.organizer.embeddings
        figures.put("coverage", float((self.trained > 0).mean()))
        if embeddings is not None:
            cosine = float(within_batch_cosine(embeddings.unit, embeddings.valid, batch, np.array([0, len(batch)]))[0])
            if not math.isnan(cosine):
                figures.add("within_batch_cosine", cosine)
