"""Where a process's part of a sharded parameter lies, as FSDP2 places it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from sdo.errors import InputError


@dataclass(frozen=True)
class Place:
    """A process's part of a parameter that is cut along its first dimension.

    Attributes
    ----------
    offset
        Index of its first row in the whole parameter (of its first entry, where that is a vector).
    counts
        Whether it enters sums over all processes: of several copies of one part only the first does.
    """

    offset: int
    counts: bool


def place_of(parameter: torch.Tensor) -> Place | None:
    """Return where this process's part of a parameter lies, None for one that is whole.

    Parameters
    ----------
    parameter
        As the model holds it once it is prepared for training.

    Raises
    ------
    InputError
        If it is cut in another way than along its first dimension.

    Notes
    -----
    FSDP2 cuts R rows over n processes as ``torch.chunk`` does: process i holds the rows from ``i * ceil(R / n)`` on.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    offset, counts, cuts = 0, coordinate is not None, 0
    for dimension, placement in enumerate(parameter.placements):
        at = 0 if coordinate is None else coordinate[dimension]
        if type(placement) is Replicate:
            counts = counts and at == 0
        elif type(placement) is Shard and placement.dim == 0 and not cuts:
            cuts += 1
            offset = min(at * -(-parameter.shape[0] // mesh.size(dimension)), parameter.shape[0])
        else:
            raise InputError(
                f"the parameter is placed as {parameter.placements}; expected one that is whole or cut once along its "
                "first dimension, as FSDP2 does; fix: another weight, or signals=['hidden']"
            )
    return Place(offset=offset, counts=counts)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies in this process, outside autograd; no process waits for another."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: torch.Tensor = tensor.to_local().detach()
    return part
