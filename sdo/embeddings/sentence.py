"""Texts to embeddings by a transformer, through sentence-transformers (extra ``encode``), loaded when it is first used.

Which model is meant is settled first, with huggingface_hub alone: a missing model is reported before torch is loaded,
and the revision that is found becomes a part of what the rows depend on.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sdo.checks import whole_number
from sdo.embeddings.sources import HUB_ID
from sdo.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

POOLINGS = ("own", "mean", "cls", "last")
_POOLING_MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
_MARKS = ("config.json", "modules.json")
_WAIT = 10.0  # seconds for the hub's answer


@dataclass(frozen=True)
class ModelPlace:
    """Where a model was found.

    Attributes
    ----------
    name
        As the user wrote it.
    kind
        "local folder", or "hub id".
    revision
        The commit of a hub model; of a folder the SHA-256 of its files, so that a model trained anew counts as another.
    cached
        Whether a hub model is taken from the local cache without asking the hub.
    """

    name: str
    kind: Literal["local folder", "hub id"]
    revision: str
    cached: bool

    @property
    def identity(self) -> str:
        """What rows depend on: a hub id with its commit; of a folder the contents, wherever it stands."""
        return f"{self.name}@{self.revision}" if self.kind == "hub id" else f"sha256:{self.revision}"

    def __str__(self) -> str:
        origin = ", from the local cache" if self.cached and self.kind == "hub id" else ""
        return f"{self.kind} {self.name}, revision {self.revision[:12]}{origin}"


def find_model(name: str, revision: str | None = None) -> ModelPlace:
    """Settle which model a name means.

    Parameters
    ----------
    name
        A folder that exists and holds ``config.json`` or ``modules.json`` comes first, else it is a hub id.
    revision
        Branch, tag or commit of a hub model; "main" by default.

    Raises
    ------
    InputError
        If sentence-transformers is not installed, or there is no such model, or it is not in the cache and the hub
        cannot be asked.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise InputError(
            "--encoder sentence-transformers needs the package of that name, which is not installed; "
            "fix: pip install 'sdo-toolkit[encode]', or --encoder lsa"
        )
    folder = Path(name).expanduser()
    if folder.is_dir() and any((folder / mark).is_file() for mark in _MARKS):
        if revision is not None:
            raise InputError(f"--revision {revision}: {name} is a local folder and has none; fix: leave it out")
        return ModelPlace(name, "local folder", _folder_sha256(folder), cached=True)
    if not HUB_ID.fullmatch(name):
        there = "holds no config.json" if folder.is_dir() else "is no folder, and cannot be a hub id"
        raise InputError(f"--model {name} {there}; expected a folder with config.json, or a hub id such as org/model")
    return _find_on_hub(name, revision)


def _find_on_hub(name: str, revision: str | None) -> ModelPlace:
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    why = "the hub is switched off (HF_HUB_OFFLINE)"
    if not constants.HF_HUB_OFFLINE:
        try:
            found = hub.HfApi().model_info(name, revision=revision, timeout=_WAIT)
            return ModelPlace(name, "hub id", str(found.sha), cached=False)
        except errors.HfHubHTTPError as error:  # the hub answered: no such model or revision, or no permission
            first_line = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise InputError(f"--model {name} (hub id), revision {revision or 'main'}: {first_line:.200}") from error
        except Exception as error:  # each transport has its own exceptions
            why = f"the hub cannot be reached ({type(error).__name__})"
    try:
        snapshot = hub.snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:
        raise InputError(
            f"--model {name} (hub id), revision {revision or 'main'}, is not in the local cache, and {why}; expected a "
            "model that is there; fix: fetch it once with a network, or give the folder of a copy"
        ) from error
    return ModelPlace(name, "hub id", Path(snapshot).name, cached=True)


class SentenceEncoder:
    """A sentence-transformers model with its options.

    Parameters
    ----------
    place
        From :func:`find_model`.
    pooling
        How token vectors become one: "mean", "cls", "last", or "own", as the model has it.
    prompt
        Put before each text; None takes the model's own default prompt, "" none.
    batch_size
        Texts per forward pass.
    device
        "auto" (CUDA, then MPS, then CPU), or a torch device.
    max_length
        Tokens a text is cut to; None takes the model's own.
    trust_remote_code
        Whether code from the model's repository may run.
    """

    def __init__(
        self,
        place: ModelPlace,
        *,
        pooling: str = "own",
        prompt: str | None = None,
        batch_size: int = 64,
        device: str = "auto",
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if pooling not in POOLINGS:
            raise InputError(f"pooling is {pooling!r}; expected one of {', '.join(POOLINGS)}")
        for name, value in (("batch size", batch_size), ("max length", max_length)):
            if value is not None:
                whole_number(name, value, 1)
        self.place = place
        self.batch_size = batch_size
        self._device = device
        self._options = {"pooling": pooling, "prompt": prompt, "batch_size": batch_size, "max_length": max_length}
        self._trust = trust_remote_code
        self._model: Any = None

    @property
    def device(self) -> str:
        """The torch device, "auto" resolved."""
        if self._device == "auto":
            import torch

            if torch.cuda.is_available():
                self._device = "cuda"
            else:
                self._device = "mps" if torch.backends.mps.is_available() else "cpu"
        return self._device

    def describe(self) -> dict[str, Any]:
        """What the rows depend on beside the texts; known before the model is loaded."""
        return {
            "encoder": "sentence-transformers",
            "model": self.place.identity,
            "options": {**self._options, "device": self.device, "trust_remote_code": self._trust},
        }

    def load(self) -> dict[str, Any]:
        """Load the model, once; return what was left to its own defaults.

        Raises
        ------
        InputError
            If it cannot be loaded, or has no pooling to replace.
        """
        if self._model is None:
            self._model = self._load()
        pooling = _pooling_of(self._model)
        prompts = self._model.prompts or {}
        own = prompts.get(self._model.default_prompt_name, "") if self._model.default_prompt_name else ""
        prompt = self._options["prompt"]
        return {
            "pooling": None if pooling is None else _mode_of(pooling),
            "prompt": own if prompt is None else prompt,
            "max_length": self._model.max_seq_length,
            "dtype": str(next(self._model.parameters()).dtype).removeprefix("torch."),
        }

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts in the model's own scale.

        Parameters
        ----------
        texts
            n of them. Lone surrogates, which no tokenizer takes, count as U+FFFD.

        Returns
        -------
        NDArray[np.float32], shape (n, d)
            The same texts in one call give the same bits on one machine and number of threads.
        """
        self.load()
        clean = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        rows = self._model.encode(
            clean,
            batch_size=self.batch_size,
            prompt=self._options["prompt"],
            show_progress_bar=False,
            convert_to_numpy=True,
        )
        return np.asarray(rows, dtype=np.float32)

    def _load(self) -> Any:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        is_hub = self.place.kind == "hub id"
        try:
            model = SentenceTransformer(
                self.place.name if is_hub else str(Path(self.place.name).expanduser()),
                revision=self.place.revision if is_hub else None,
                device=self.device,
                trust_remote_code=self._trust,
                local_files_only=self.place.cached,
            )
        except Exception as error:  # each layer raises its own kinds
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise InputError(f"--model {self.place}: cannot be loaded: {lines[0]:.200}") from error
        pooling, mode = _pooling_of(model), _POOLING_MODES.get(str(self._options["pooling"]))
        if mode is not None:
            if pooling is None:
                raise InputError(
                    f"--pooling: {self.place.name} has no pooling to replace; expected own; fix: leave it out"
                )
            dim = getattr(pooling, "embedding_dimension", None) or pooling.word_embedding_dimension
            index = next(i for i, module in enumerate(model) if module is pooling)
            model[index] = type(pooling)(dim, pooling_mode=mode, include_prompt=pooling.include_prompt)
        if self._options["max_length"] is not None:
            model.max_seq_length = self._options["max_length"]
        return model.eval()


def _pooling_of(model: Any) -> Any:
    return next((module for module in model if type(module).__name__ == "Pooling"), None)


def _mode_of(pooling: Any) -> str:
    mode = getattr(pooling, "pooling_mode", None) or pooling.get_pooling_mode_str()
    return mode if isinstance(mode, str) else "+".join(mode)


def _folder_sha256(folder: Path) -> str:
    """The SHA-256 of the names and contents of a folder's files."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()
