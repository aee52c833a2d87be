"""How sample ids travel with a batch: from the dataset's positions through the collator to the model's call.

The loader's dataset is wrapped so that each item carries its id, and the collator puts the ids beside the tensors. Once
the batch is on its device they ride on its ``input_ids``, where a hook finds them before the model's forward; a
reference model that is given the same tensor sees nothing. Nothing relies on the order in which a loader draws, so
look-ahead, workers and skipped batches cannot shift an id.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

BATCH_KEY = "sdo_batch_ids"
IGNORED = -100  # the label of a token that carries no loss


@dataclass(frozen=True)
class BatchIds:
    """Who is in a micro-batch. No tensor, so that it stays on the CPU and no synchronisation is needed to read it.

    Attributes
    ----------
    sample_ids
        The b samples.
    tokens
        How many tokens of each a causal language model is trained to predict: all with a label but the first of each
        sequence; None where the batch has neither labels nor a mask of completions.
    labels
        How many labels each has, the first ones too; None where the batch has none.
    tied
        For completions: whether all rewards of its group are the same, so that its advantage is zero; else None.
    """

    sample_ids: tuple[int, ...]
    tokens: tuple[int, ...] | None
    tied: tuple[bool, ...] | None = None
    labels: tuple[int, ...] | None = None


Listener = Callable[[BatchIds], None]


class IdChannel:
    """Tells listeners which samples a model is being trained on.

    Attributes
    ----------
    source
        Where ids come from, in words.
    """

    def __init__(self) -> None:
        self.source = "position in the prepared dataset"
        self._ids: NDArray[np.int64] | None = None
        self._last: BatchIds | None = None
        self._listeners: list[Listener] = []

    def name_positions(self, ids: NDArray[np.int64], source: str) -> None:
        """Give the id of each dataset position.

        Parameters
        ----------
        ids
            Shape ``(n,)``, the sample id of each position.
        source
            Where they come from, in words.
        """
        self._ids = ids
        self.source = source

    def ids_of(self, count: int) -> NDArray[np.int64]:
        """Return the sample id of each of so many dataset positions, shape ``(count,)``."""
        return np.arange(count) if self._ids is None else self._ids

    def positions(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where samples stand in the training dataset; same shape.

        Parameters
        ----------
        sample_ids
            Ids that the dataset has; positions themselves where nobody named them.

        Raises
        ------
        KeyError
            If the dataset has no such sample.
        """
        if self._ids is None:
            return sample_ids
        order = np.argsort(self._ids, kind="stable")
        place = np.minimum(np.searchsorted(self._ids, sample_ids, sorter=order), len(order) - 1)
        found = order[place]
        if (self._ids[found] != sample_ids).any():
            raise KeyError(int(sample_ids[self._ids[found] != sample_ids].flat[0]))
        return np.asarray(found, dtype=np.int64)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each micro-batch that is about to be trained on, however many forwards it takes."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling a listener."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def unheard(self) -> bool:
        """Whether nobody listens."""
        return not self._listeners

    def announce(self, ids: BatchIds) -> None:
        """Tell the listeners who is about to be trained on."""
        for listener in self._listeners:
            listener(ids)

    def install(self, loader: Any, *, items: bool = False) -> None:
        """Make a training loader's batches carry their ids; a second call changes nothing.

        Parameters
        ----------
        loader
            A DataLoader, or accelerate's wrapper of one, over a map-style dataset.
        items
            Whether a batch is a list of items, each of which is to carry its own id.
        """
        inner: DataLoader[Any] = getattr(loader, "base_dataloader", loader)
        if isinstance(inner.dataset, _TaggedDataset):
            return
        # DataLoader forbids exchanging its dataset because samplers are built from its length, which stays the same.
        object.__setattr__(inner, "dataset", _TaggedDataset(inner.dataset, self._ids))
        collator = _TaggedItems if items else _TaggedCollator
        inner.collate_fn = collator(inner.collate_fn)

    def take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Find the ids in a model's call, as a forward pre-hook; they are taken out where they are an argument."""
        ids = kwargs.pop(BATCH_KEY, None)
        if ids is None:
            ids = getattr(kwargs.get("input_ids", args[0] if args else None), BATCH_KEY, None)
        if ids is None:
            return None
        if module.training and torch.is_grad_enabled() and ids is not self._last:
            self._last = ids
            self.announce(ids)
        return args, kwargs


class _Tagged(NamedTuple):
    sample_id: int
    item: Any


class _TaggedDataset:
    """A map-style dataset whose items carry their ids."""

    def __init__(self, dataset: Any, ids: NDArray[np.int64] | None) -> None:
        self.inner = dataset
        self.ids = ids

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, position: int) -> _Tagged:
        return _Tagged(self._id(position), self.inner[position])

    def __getitems__(self, positions: Sequence[int]) -> list[_Tagged]:
        fetch = getattr(self.inner, "__getitems__", None)
        items = fetch(positions) if fetch else [self.inner[p] for p in positions]
        return [_Tagged(self._id(p), item) for p, item in zip(positions, items, strict=True)]

    def _id(self, position: int) -> int:
        return int(position) if self.ids is None else int(self.ids[position])


class _TaggedCollator:
    """Collates the items as before and puts their ids beside the tensors."""

    def __init__(self, inner: Callable[[list[Any]], Any]) -> None:
        self.inner = inner

    def __call__(self, tagged: list[_Tagged]) -> Any:
        batch = self.inner([entry.item for entry in tagged])
        if not isinstance(batch, MutableMapping):
            raise TypeError(
                f"the data collator returned {type(batch).__name__}; expected a dict of tensors, beside which sample "
                "ids can travel; fix: return a dict from the collator"
            )
        ids = tuple(entry.sample_id for entry in tagged)
        if type(batch) is dict:
            batch = _Batch(batch)
        tokens, labels = _loss_tokens(batch, len(ids))
        batch[BATCH_KEY] = BatchIds(ids, tokens, labels=labels)
        return batch


class _TaggedItems:
    """Leaves a batch the list of items that it is and puts each one's id into it, for the follower to take out."""

    def __init__(self, inner: Callable[[list[Any]], Any]) -> None:
        self.inner = inner

    def __call__(self, tagged: list[_Tagged]) -> Any:
        items = self.inner([entry.item for entry in tagged])
        return [{**item, BATCH_KEY: entry.sample_id} for item, entry in zip(items, tagged, strict=True)]


class _Batch(dict[str, Any]):
    """A batch whose ids move on to its ``input_ids`` when it goes to its device, which is the last copy of a tensor.

    Beside the tensors they would reach every model that a trainer hands its inputs to, a reference model too. Where
    nobody moves the batch, or it is another mapping than a dict, they arrive as one more argument, and the hook takes
    them out.
    """

    def to(self, device: Any, **options: Any) -> dict[str, Any]:
        """Return the batch on a device; accelerate calls it as it would a tensor's."""
        from accelerate.utils import send_to_device  # only accelerate calls this, and a loop may do without it

        moved = {key: send_to_device(value, device, **options) for key, value in self.items()}
        if isinstance(moved.get("input_ids"), torch.Tensor):
            _tag(moved["input_ids"], moved.pop(BATCH_KEY))
        return moved


def ids_of_batch(batch: Any) -> BatchIds | None:
    """Return the ids that a batch carries, beside its tensors or on its ``input_ids``; None where it has none."""
    found = batch.get(BATCH_KEY) if isinstance(batch, Mapping) else None
    if found is None and isinstance(batch, Mapping):
        found = getattr(batch.get("input_ids"), BATCH_KEY, None)
    return found if isinstance(found, BatchIds) else None


def with_ids(batch: dict[str, Any], ids: BatchIds) -> dict[str, Any]:
    """Let ids ride on a batch that is on its device already."""
    _tag(batch["input_ids"], ids)
    return batch


def _tag(tensor: Any, ids: BatchIds) -> torch.Tensor:
    """Let ids ride on a tensor, and on its copies where it may be moved again."""
    setattr(tensor, BATCH_KEY, ids)
    if tensor.device.type == "cpu":
        # One of several processes on the CPU calls its device "cpu:0", and every move to that is one more copy.
        tensor.to = _Move(weakref.ref(tensor), ids)
    moved: torch.Tensor = tensor
    return moved


@dataclass(frozen=True)
class _Move:
    """A tensor's method ``to`` whose result carries the ids on."""

    tensor: weakref.ref[torch.Tensor]
    ids: BatchIds

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: Any = self.tensor()
        return _tag(torch.Tensor.to(tensor, *args, **kwargs), self.ids)


def _loss_tokens(batch: Mapping[str, Any], samples: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Count each sample's labels, without the first of each sequence and with it.

    A causal language model never predicts the first. A sample of several sequences has them in blocks (see
    :class:`sdo.trainers.trainer_types.TrainerKind`).
    """
    labels, mask, before = batch.get("labels"), batch.get("completion_mask"), batch.get("shift_labels")
    shifted = isinstance(before, torch.Tensor)
    aims = before if shifted else labels
    trained = (aims != IGNORED) if isinstance(aims, torch.Tensor) else mask
    if not isinstance(trained, torch.Tensor) or trained.ndim not in (1, 2) or len(trained) % samples:
        return None, None
    trained = trained != 0

    def count(flags: torch.Tensor) -> tuple[int, ...]:
        return tuple(flags.reshape(len(trained), -1).sum(dim=1).view(-1, samples).sum(dim=0).tolist())

    every = count(trained)
    return every if shifted or trained.ndim == 1 else count(trained[:, 1:]), every
