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
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from sdo.organizers.plan import Plan
    from sdo.trainers.completions import CompletionFollower

BATCH_KEY = "sdo_batch_ids"
IGNORED = -100  # the label of a token that carries no loss

# A channel lives in its hook on the model. Were it held here, its subscribers' trainers would keep the model for ever.
_channels: WeakKeyDictionary[nn.Module, weakref.ref[IdChannel]] = WeakKeyDictionary()


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


class StepScalars:
    """Figures of the steps since the trainer last logged, from whoever knows them.

    Examples
    --------
    >>> scalars = StepScalars()
    >>> for value in (0.2, 0.4):
    ...     scalars.add("within_batch_cosine", value)
    ...     scalars.put("coverage", value)
    >>> scalars.take()
    {'within_batch_cosine': 0.30000000000000004, 'coverage': 0.4}
    >>> scalars.take()
    {}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._states: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        """Note a step's value of which the mean is wanted."""
        total_and_count = self._values.setdefault(name, [0.0, 0.0])
        total_and_count[0] += value
        total_and_count[1] += 1

    def put(self, name: str, value: float) -> None:
        """Note a state of which the latest value is wanted."""
        self._states[name] = value

    def take(self) -> dict[str, float]:
        """Return the figures and begin anew."""
        figures = {name: total / count for name, (total, count) in self._values.items()} | self._states
        self.clear()
        return figures

    def clear(self) -> None:
        """Begin anew."""
        self._values, self._states = {}, {}


class IdChannel:
    """Tells subscribers which samples a model is being trained on.

    There is one channel a model, made by :meth:`of`; the organizer's handle and the recorder share it.

    Attributes
    ----------
    source
        Where ids come from, in words.
    plan
        The plan that the trainer follows, or None.
    trained
        Its trained ledger, shape ``(n,)``, aligned with ``plan.ids``; kept by the organizer's callback, or None.
    scalars
        Figures of the latest steps, for :func:`diagnostics.log_scalars`.
    steps_per_batch
        Optimizer steps that train on one batch of the plan; more than 1 only where completions are used again.
    follower
        Who follows the trainer's completions; None where it generates none.
    trainer
        The trainer whose organizer this is, or None.
    release
        Makes that organizer leave the model to another trainer.
    check
        Refuses arguments, state and loader of a training that do not fit the plan any more, or does nothing.
    recordings
        Those that are under way: the state of each one's trainer, and what ends it early.
    """

    def __init__(self, model: nn.Module) -> None:
        self.source = "position in the prepared dataset"
        self.plan: Plan | None = None
        self.trained: NDArray[np.int64] | None = None
        self.scalars = StepScalars()
        self.steps_per_batch = 1
        self.follower: CompletionFollower | None = None
        self.trainer: Any = None
        self.release: Callable[[], None] | None = None
        self.check: Callable[[Any, Any, Any], None] | None = None
        self.recordings: list[tuple[Any, Callable[[], None]]] = []
        self._ids: NDArray[np.int64] | None = None
        self._last: BatchIds | None = None
        self._subscribers: list[Listener] = []
        self._hook = model.register_forward_pre_hook(self._make_hook(), prepend=True, with_kwargs=True)

    @classmethod
    def of(cls, model: nn.Module) -> IdChannel:
        """Return the model's channel; the first call opens it."""
        channel = cls.peek(model)
        if channel is None:
            channel = cls(model)
            _channels[model] = weakref.ref(channel)
        return channel

    @classmethod
    def peek(cls, model: nn.Module) -> IdChannel | None:
        """Return the model's channel where one is open."""
        found = _channels.get(model)
        return None if found is None else found()

    @classmethod
    def taken_by(cls, model: nn.Module, state: Any) -> IdChannel:
        """Return the model's channel for the trainer that has this state.

        First another one's organizer leaves, and recordings end that an interrupted training has left behind.
        """
        cls.end_recordings(model, state)
        earlier = cls.peek(model)
        if earlier is not None and earlier.is_of_another(state) and earlier.release is not None:
            earlier.release()
        return cls.of(model)

    @classmethod
    def end_recordings(cls, model: nn.Module, state: Any) -> None:
        """End the recordings of other trainings of a model: they were interrupted, since this one begins."""
        channel = cls.peek(model)
        for other, end in [] if channel is None else list(channel.recordings):
            if other is not state:
                end()

    def is_of_another(self, state: Any) -> bool:
        """Whether an organizer has the model, and not that of the trainer with this state (arguments may be shared)."""
        return self.trainer is not None and self.trainer.state is not state

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
        if listener not in self._subscribers:
            self._subscribers.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling a listener; the last one to leave closes the channel, unless completions are followed."""
        if listener in self._subscribers:
            self._subscribers.remove(listener)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """Close the channel where nobody listens any more."""
        if not self._subscribers and self.follower is None:
            self._close()

    def announce(self, ids: BatchIds) -> None:
        """Tell the subscribers who is about to be trained on."""
        for listener in self._subscribers:
            listener(ids)

    def _close(self) -> None:
        self._hook.remove()
        for model in [model for model, channel in _channels.items() if channel() is self]:
            del _channels[model]

    def install(self, loader: Any) -> None:
        """Make a training loader's batches carry their ids; a second call changes nothing.

        Parameters
        ----------
        loader
            A DataLoader, or accelerate's wrapper of one, over a map-style dataset.
        """
        inner: DataLoader[Any] = getattr(loader, "base_dataloader", loader)
        if isinstance(inner.dataset, _TaggedDataset):
            return
        # DataLoader forbids exchanging its dataset because samplers are built from its length, which stays the same.
        object.__setattr__(inner, "dataset", _TaggedDataset(inner.dataset, self._ids))
        collator = _TaggedCollator if self.follower is None else _TaggedItems
        inner.collate_fn = collator(inner.collate_fn)

    def _make_hook(self) -> Callable[..., tuple[Any, Any] | None]:
        def take_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            ids = kwargs.pop(BATCH_KEY, None)
            if ids is None:
                ids = getattr(kwargs.get("input_ids", args[0] if args else None), BATCH_KEY, None)
            if ids is None:
                return None
            if module.training and torch.is_grad_enabled() and ids is not self._last:
                self._last = ids
                self.announce(ids)
            return args, kwargs

        return take_ids


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
        moved = {key: send_to_device(value, device, **options) for key, value in self.items()}
        if isinstance(moved.get("input_ids"), torch.Tensor):
            _tag(moved["input_ids"], moved.pop(BATCH_KEY))
        return moved


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
