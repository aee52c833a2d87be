"""A gradient as a matrix, and that matrix in pieces that stay in the CPU's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

PIECE_ENTRIES = 1 << 20  # what is converted to float32 or float64 at a time


def matrix_of(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the values as a matrix outside autograd: a view, except for non-contiguous 3-D tensors."""
    return tensor.detach().reshape(shape)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (first dimension, all the rest); vectors and scalars are one row."""
    total = math.prod(shape)
    return (shape[0], total // shape[0]) if len(shape) > 1 and shape[0] else (1, total)


def pieces_of(matrix: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first row, first column, view) in row-major order, each view of at most PIECE_ENTRIES (GPU: 64 times)."""
    rows, cols = matrix.shape
    most = PIECE_ENTRIES if matrix.device.type == "cpu" else 64 * PIECE_ENTRIES
    width = min(cols, most)
    height = max(1, most // max(width, 1))
    for row in range(0, rows, height):
        for col in range(0, cols, max(width, 1)):
            yield row, col, matrix[row : row + height, col : col + width]
