"""Figures of a plan's epochs: what an organizer would do, before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdo.embeddings.matrix import Embeddings, within_batch_cosine
from sdo.organizers.plan import Plan
from sdo.organizers.uniform import Uniform


def epoch_figures(plan: Plan, *, uniform_seed: int, epochs: int) -> list[dict[str, Any]]:
    """Return the figures of a plan's first epochs.

    Parameters
    ----------
    plan
        The plan.
    uniform_seed
        Seed of the uniform batches that stand beside it.
    epochs
        How many.

    Returns
    -------
    list of dict
        Per epoch: ``organizer_epoch``, ``steps``, ``pool``, the organizer's own figures (:attr:`EpochPlan.figures`),
        ``exposure_min``, ``exposure_mean``, ``exposure_max`` (planned, after the epoch), ``within_batch_cosine`` (mean
        over batches of the mean pairwise cosine) and ``uniform_within_batch_cosine`` of as many uniform batches.
        Cosines are None at batch size 1 and without embeddings.
    """
    embeddings = plan.organizer.embeddings
    uniform = None
    if embeddings is not None:
        uniform = Uniform(embeddings, seed=uniform_seed).plan(plan.batch_size, rows=plan.ids)
    figures: list[dict[str, Any]] = []
    for e in range(epochs):
        epoch = plan.epoch(e)
        figures.append(
            {
                "organizer_epoch": e,
                "steps": len(epoch.steps),
                "pool": len(epoch.pool),
                **epoch.figures,
                "exposure_min": int(epoch.exposure.min()),
                "exposure_mean": float(epoch.exposure.mean()),
                "exposure_max": int(epoch.exposure.max()),
                "within_batch_cosine": _mean_cosine(embeddings, *epoch.steps.trained()),
                "uniform_within_batch_cosine": None
                if uniform is None
                else _mean_cosine(embeddings, *uniform.flat(epoch.first_step, epoch.stop)),
            }
        )
    return figures


def _mean_cosine(embeddings: Embeddings | None, ids: NDArray[np.int64], offsets: NDArray[np.int64]) -> float | None:
    if embeddings is None:
        return None
    cosine = within_batch_cosine(embeddings.unit, embeddings.valid, ids, offsets)
    defined = cosine[~np.isnan(cosine)]
    return float(defined.mean()) if len(defined) else None
