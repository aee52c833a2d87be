"""What all cells of a setting begin with, kept with its digest where another machine would make it a little different.

The last bits of a float32 product depend on the processor, and a first training and an encoder carry them on: the same
recipe gives other weights and other embeddings on the next machine. ``start/NAME`` keeps such a start: the weights in
bfloat16 (read as float32), their tokenizer, and the embeddings in float16.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdo.errors import InputError

FOLDER = Path(__file__).parent / "start"
WEIGHTS, EMBEDDINGS = "model.safetensors", "embeddings.npy"


def digests(folder: Path, model: str) -> dict[str, str]:
    """Return the SHA-256 of a material's files, and of the weights that training starts from where they lie here.

    Parameters
    ----------
    folder
        Of the material.
    model
        Folder, or hub id.
    """
    files = [folder / name for name in ("train.jsonl", "test.jsonl", EMBEDDINGS)]
    weights: dict[str, str] = {}
    if Path(model).is_dir():
        weights["start"] = weights_digest(Path(model))
        files += [Path(model) / "tokenizer.json"] if (Path(model) / "tokenizer.json").is_file() else []
    return weights | {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def weights_digest(model: Path) -> str:
    """Return the SHA-256 of a model's weights as float32, whatever kind of number the files hold and in which order.

    Over the tensors by name: the name, a space, the shape as Python writes a list, a newline, little-endian float32.

    Parameters
    ----------
    model
        Folder with one or several ``.safetensors`` files.

    Raises
    ------
    InputError
        The folder holds no such file.
    """
    from safetensors import safe_open

    place = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            place |= dict.fromkeys(tensors.keys(), file)
    if not place:
        raise InputError(
            f"{model} holds no .safetensors file; expected a model's weights; fix: remove it, to make it anew"
        )
    found = hashlib.sha256()
    for name in sorted(place):
        with safe_open(place[name], "pt") as tensors:
            rows = tensors.get_tensor(name).float().numpy()
        found.update(f"{name} {list(rows.shape)}\n".encode())
        found.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return found.hexdigest()


def unpack_model(name: str, out: Path) -> int:
    """Write a kept start as a model folder in float32; return its number of parameters.

    Parameters
    ----------
    name
        Of the folder in :data:`FOLDER`.
    out
        The model's folder.
    """
    from safetensors.torch import load_file, save_file

    source = kept(name, WEIGHTS).parent
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(WEIGHTS, EMBEDDINGS), dirs_exist_ok=True)
    whole = {key: tensor.float() for key, tensor in load_file(source / WEIGHTS).items()}
    save_file(whole, out / WEIGHTS, {"format": "pt"})
    return sum(tensor.numel() for tensor in whole.values())


def keep(model: Path, embeddings: Path, out: Path) -> None:
    """Keep a start that was made here, see the module; the rest of the model's folder is taken as it is.

    Parameters
    ----------
    model
        Folder with one ``model.safetensors``.
    embeddings
        ``.npy`` file.
    out
        The kept folder.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out, ignore=shutil.ignore_patterns(WEIGHTS, "training_args.bin"))
    save_file({k: t.to(torch.bfloat16) for k, t in load_file(model / WEIGHTS).items()}, out / WEIGHTS, {"format": "pt"})
    np.save(out / EMBEDDINGS, np.load(embeddings, allow_pickle=False).astype(np.float16))


def kept(name: str, file: str) -> Path:
    """Return a file of a kept start."""
    path = FOLDER / name / file
    if not path.is_file():
        raise InputError(f"there is no kept start {path}; expected a folder of {FOLDER} that holds {file}")
    return path


def check(found: Mapping[str, Any], wanted: Mapping[str, str], folder: Path, model: str) -> None:
    """Refuse material whose digests are not the ones that are expected.

    Parameters
    ----------
    found, wanted
        What is there, and what is expected: ``start`` or a file's name -> SHA-256.
    folder, model
        Folder of the material, and of the model.
    """
    places = {"start": f"the weights of {model} have", "tokenizer.json": f"{model}/tokenizer.json has"}
    for name, digest in wanted.items():
        if found.get(name) != digest:
            raise InputError(
                f"{places.get(name, f'{folder / name} has')} the SHA-256 {found.get(name)}; expected {digest}; fix: "
                "remove that folder, take the versions of constraints.txt and the kept start as it is in git, and make "
                "it anew"
            )


if __name__ == "__main__":  # MATERIAL NAME: keep what a setting without `start` made in its work folder
    keep(Path(sys.argv[1]) / "model", Path(sys.argv[1]) / EMBEDDINGS, FOLDER / sys.argv[2])
