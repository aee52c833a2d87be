"""What the processes of one training run tell each other: numbers and short texts, on the trainer's own group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sdo.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them. With one process every call is local.

    Every process must make the same calls in the same order, as with all collectives. Plain tensors travel, nothing is
    pickled.

    Attributes
    ----------
    rank
        This process, from 0.
    count
        Number of processes.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of(cls, args: Any) -> Processes:
        """Return the processes of a trainer, given its arguments.

        Raises
        ------
        InputError
            If there are several and torch.distributed does not join them.
        """
        count = int(getattr(args, "world_size", 1))
        if count == 1:
            return cls()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise InputError(
                f"training runs in {count} processes that torch.distributed does not join; expected torchrun or "
                "accelerate launch"
            )
        return cls(rank=int(args.process_index), count=count)

    @classmethod
    def joined(cls) -> Processes:
        """Return those that torch.distributed joins; one where it joins none."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(rank=torch.distributed.get_rank(), count=torch.distributed.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    def lists(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every process, in the order of ranks; their numbers may differ."""
        return [part.tolist() for part in self._gather(np.asarray(values, dtype=np.int64))]

    def texts(self, text: str) -> list[str]:
        """Return the text of every process, in the order of ranks."""
        if self.count == 1:
            return [text]
        parts = self._gather(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64))
        return [part.astype(np.uint8).tobytes().decode() for part in parts]

    def numbers(self, values: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Return the float64 numbers of every process, bit for bit, in the order of ranks."""
        return [part.view(np.float64) for part in self._gather(values.astype(np.float64).view(np.int64))]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over processes, float64 on the CPU.

        Parameters
        ----------
        values
            Of one shape everywhere.
        """
        if self.count == 1:
            return values.detach().double().cpu()
        total = values.detach().double().to(_device())
        torch.distributed.all_reduce(total)
        return total.cpu()

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.lists([])

    def together(self, action: Callable[[], T]) -> T:
        """Act in every process; where one of them fails all do, none waits for it.

        Parameters
        ----------
        action
            What to do; no collective calls in it.

        Raises
        ------
        InputError
            In a process that did not fail itself, naming the first one that did and why.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        reports = self.texts("" if failure is None else f"process {self.rank}: {failure}")
        if failure is not None:
            raise failure
        for report in reports:
            if report:
                raise InputError(report)
        return result  # type: ignore[return-value]  # an action that did not fail has returned

    def leader_first(self, action: Callable[[], T]) -> T:
        """Act in process 0, then in the others; where one of them fails all do."""
        first = self.together(action if self.leads else lambda: None)
        rest = self.together((lambda: None) if self.leads else action)
        return first if self.leads else rest  # type: ignore[return-value]

    def same(self, value: str, what: str) -> None:
        """Refuse to go on where a text differs between processes.

        Parameters
        ----------
        value
            Compared.
        what
            Named in the error: what it stands for.

        Raises
        ------
        InputError
            In every process.
        """
        values = self.texts(value)
        other = next((rank for rank, text in enumerate(values) if text != values[0]), None)
        if other is not None:
            raise InputError(
                f"{what} of process {other} is not that of process 0 ({values[other][:16]} and {values[0][:16]}); "
                "expected the same in every process; fix: the same embeddings, options, seed and dataset in each"
            )

    def _gather(self, mine: NDArray[Any]) -> list[NDArray[Any]]:
        """All processes' vectors of int64, of any length."""
        if self.count == 1:
            return [mine]
        device = _device()
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.count)]
        torch.distributed.all_gather(lengths, torch.tensor([len(mine)], device=device))
        sizes = [int(length) for length in lengths]
        if not max(sizes):
            return [mine[:0] for _ in sizes]
        padded = torch.zeros(max(sizes), dtype=torch.int64, device=device)
        padded[: len(mine)] = torch.from_numpy(mine.copy())
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded)
        return [part[:size].cpu().numpy() for part, size in zip(parts, sizes, strict=True)]


def _device() -> torch.device:
    """Where the group's tensors must lie: only gloo and MPI take them on the CPU."""
    backend = str(torch.distributed.get_backend())
    if "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
