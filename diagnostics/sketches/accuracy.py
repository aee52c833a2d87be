"""Exact norms and cosines of gradients, summed in float64, and how far sketched cosines are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diagnostics.sketches import chunks as pieces
from sdo.errors import InputError


def device_norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm as a float64 scalar on the gradient's device, without waiting for the device.

    At most 2²⁰ entries are held in float64 at a time (8 MiB); one pass.

    Parameters
    ----------
    grad
        Dense floating tensor of any shape and strides.

    Returns
    -------
    torch.Tensor
        Shape ``()``: the norm, squares summed in float64, in the gradient's unit; 0 for a zero or empty tensor; inf or
        nan exactly if an entry is not finite (float32, bfloat16 and float16 entries cannot overflow a float64 square).
    """
    matrix = pieces.matrix_of(grad, pieces.matrix_shape(grad.shape))
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for _, _, piece in pieces.pieces_of(matrix)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def exact_norm(grad: torch.Tensor) -> float:
    """Return :func:`device_norm` as a number, which waits for the device."""
    return float(device_norm(grad))


def _cosines(tensors: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """Return the cosines of M equally shaped tensors, (M, M), summed in float64; nan where undefined."""
    shape = pieces.matrix_shape(tensors[0].shape)
    matrices = [pieces.matrix_of(tensor, shape) for tensor in tensors]
    gram = torch.zeros(len(tensors), len(tensors), dtype=torch.float64, device=tensors[0].device)
    for alike in zip(*(pieces.pieces_of(matrix) for matrix in matrices), strict=True):
        stacked = torch.stack([piece.double().reshape(-1) for _, _, piece in alike])
        gram += stacked @ stacked.T
    products = gram.cpu().numpy()
    norms = np.sqrt(np.diag(products))
    norms[~np.isfinite(norms) | (norms == 0.0)] = np.nan
    with np.errstate(invalid="ignore"):  # inf - inf in a product of non-finite tensors
        return np.asarray(np.clip(products / norms[:, None] / norms[None, :], -1.0, 1.0))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the cosine of two gradients or of two sketches, computed in float64.

    Parameters
    ----------
    a, b
        Floating tensors of one shape on one device.

    Returns
    -------
    float or None
        In [−1, 1]; None where it is undefined: one of them is zero or has an entry that is not finite.

    Raises
    ------
    InputError
        If the shapes differ.
    """
    if a.shape != b.shape:
        raise InputError(f"cosine of tensors of shapes {tuple(a.shape)} and {tuple(b.shape)}: expected one")
    value = float(_cosines([a, b])[0, 1])
    return value if math.isfinite(value) else None


class SketchCheck:
    """Compares the sketches of a run's first step gradients with the gradients themselves.

    Parameters
    ----------
    max_copies
        How many gradients are copied at most, at least 2.
    max_bytes
        Fewer are copied, but at least 2, where together they would take more than this.

    Examples
    --------
    >>> import torch
    >>> from diagnostics.sketches.count_sketch import GradientSketch
    >>> check, sketcher = SketchCheck(max_copies=2), GradientSketch((4,))
    >>> for step in range(2):
    ...     grad = torch.ones(4) * (step + 1)
    ...     check.add(step, grad, sketcher.sketch(grad))
    >>> check.result()["pairs"]
    1
    """

    def __init__(self, max_copies: int = 8, max_bytes: int = 512 << 20) -> None:
        self._max_copies = max(2, max_copies)
        self._max_bytes = max_bytes
        self._limit: int | None = None
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._skipped = {"zero_gradients": 0, "non_finite_gradients": 0}
        self._result: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        """Whether enough was seen: `add` takes no further step, `result` can be taken."""
        return self._result is not None or len(self._kept) == self._limit

    def copies(self, size: int) -> int:
        """Return how many gradients of ``size`` bytes are copied."""
        return min(self._max_copies, max(2, self._max_bytes // max(size, 1)))

    def add(self, step: int, grad: torch.Tensor, sketch: torch.Tensor) -> None:
        """Copy one step's gradient and sketch, unless done.

        Zero gradients and those with entries that are not finite have no cosine; they are only counted. A second call
        for the latest step replaces the first: a gradient that comes in parts is complete with the last.
        """
        if self._result is not None:
            return
        if self._kept and self._kept[-1][0] == step:
            self._kept.pop()
        if self.done:
            return
        if self._limit is None:
            self._limit = self.copies(grad.numel() * grad.element_size())
        norm = exact_norm(grad)
        if norm == 0.0 or not math.isfinite(norm):
            self._skipped["zero_gradients" if norm == 0.0 else "non_finite_gradients"] += 1
            return
        self._kept.append((int(step), grad.detach().clone(), sketch.detach().clone()))

    def result(self) -> dict[str, Any]:
        """Compare all pairs and release the copies; later calls return the same numbers.

        Returns
        -------
        dict
            ``pairs``, ``rmse`` and ``max_abs_error`` of the sketched cosines against the exact ones,
            ``steps``, ``zero_gradients``, ``non_finite_gradients``. With fewer than two usable gradients
            ``pairs`` is 0 and ``reason`` stands in the place of the errors.
        """
        if self._result is None:
            steps = [step for step, _, _ in self._kept]
            if len(steps) < 2:
                reason = f"{len(steps)} usable gradients were seen; two are needed"
                self._result = {"pairs": 0, "reason": reason, "steps": steps, **self._skipped}
            else:
                self._result = {**self._compare(), "steps": steps, **self._skipped}
            self._kept.clear()
        return dict(self._result)

    def _compare(self) -> dict[str, Any]:
        pairs = np.triu_indices(len(self._kept), 1)
        exact = _cosines([grad for _, grad, _ in self._kept])[pairs]
        # A sketch can be zero or overflow where its gradient does not: it then knows nothing, which is 0.
        sketched = np.nan_to_num(_cosines([sketch for _, _, sketch in self._kept])[pairs], nan=0.0)
        errors = sketched - exact
        return {
            "pairs": len(errors),
            "rmse": float(np.sqrt(np.mean(errors**2))),
            "max_abs_error": float(np.abs(errors).max()),
        }
