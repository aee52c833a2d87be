"""The report's sections on where its numbers come from and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from analysis.balance.summary import BalanceSummary
from analysis.report.content import DASH, Absent, Cell, Section, Table
from analysis.report.material import ReportMaterial
from analysis.report.settings import recorded_digest
from analysis.run_folder.run import Run

_VERSIONS = ("sdo-toolkit", "torch", "transformers", "trl", "numpy", "python")
_SHOWN = 16  # digits of a fingerprint


def provenance_section(material: ReportMaterial) -> Section | Absent:
    """Where the numbers come from: options, seeds, versions, fingerprints of runs; files, rows, clusters of answers."""
    tables = []
    data: dict[str, Any] = {}
    if material.runs:
        data["runs"] = {name: _facts(run) for name, run in material.runs.items()}
        tables.append(_side_by_side(data["runs"], "Runs"))
    if material.balance is not None:
        data |= material.balance.content["sources"]
        tables.append(_side_by_side({name: _read(one) for name, one in data["predictions"].items()}, "Predictions"))
        tables.append(_side_by_side({"": _clusters(material.balance)}, "Clusters of questions"))
    if not tables:
        return Absent("Neither run folders nor predictions were given.")
    return Section(tables=tuple(tables), data=data)


def _side_by_side(facts: Mapping[str, Mapping[str, str]], caption: str) -> Table:
    """Return a column of words for each name."""
    keys = list(dict.fromkeys(key for entry in facts.values() for key in entry))
    rows = [(Cell(key), *(Cell(entry.get(key, "") or DASH) for entry in facts.values())) for key in keys]
    return Table(("", *facts), tuple(rows), caption, texts=1 + len(facts))


def _facts(run: Run) -> dict[str, str]:
    info = run.info
    organizer, embeddings, model = (info.get(key) or {} for key in ("organizer", "embeddings", "model"))
    trainer, seeds = (info.get(key) or {} for key in ("trainer", "seeds"))
    options = ", ".join(f"{key}={value}" for key, value in (organizer.get("options") or {}).items())
    weights = (info.get("signals") or {}).get("weight") or {}
    return {
        "folder": str(run.path),
        "run id": str(info.get("run_id") or ""),
        "created": str(info.get("created") or ""),
        "status": str(info.get("status") or ""),
        "organizer": f"{organizer.get('name', 'none')} ({options})" if organizer else "none",
        "batch size": str(organizer.get("batch_size") or ""),
        "plan fingerprint": str(organizer.get("fingerprint") or "")[:_SHOWN],
        "embeddings": f"{embeddings.get('rows', '?')} × {embeddings.get('dim', '?')}" if embeddings else "none",
        "embeddings fingerprint": str(embeddings.get("fingerprint") or "")[:_SHOWN],
        "model": " ".join(str(model[k]) for k in ("class", "name") if model.get(k)),
        "parameters": f"{model.get('trainable_parameters', 0):,} trained of {model['parameters']:,}"
        if model.get("parameters")
        else "",
        "parameter of weight": str(weights.get("parameter") or ""),
        "dataset": _dataset(run),
        "trainer": ", ".join(f"{key}={value}" for key, value in trainer.items()),
        "seeds": ", ".join(f"{key}={value}" for key, value in seeds.items()),
        "versions": ", ".join(f"{k} {v}" for k in _VERSIONS if (v := (info.get("versions") or {}).get(k))),
    }


def _dataset(run: Run) -> str:
    dataset = run.info.get("dataset") or {}
    if not dataset:
        return ""
    digest, noted = recorded_digest(run), dataset.get("fingerprint")
    content = f"fingerprint {noted}, of one process" if noted else "content unknown"
    return f"{dataset.get('rows', '?')} rows, {f'SHA-256 {digest[:_SHOWN]}' if digest else content}"


def _read(source: Mapping[str, Any]) -> dict[str, str]:
    """Return what was read of one run's answers, in words."""
    entry = {
        "file or folder": str(source.get("path") or source.get("reason") or ""),
        "read as": str(source.get("format") or ""),
        "rows": str(source["rows"]),
        "questions in clusters": str(source["questions"]),
    }
    return entry | {key: str(source[key]) for key in ("metric", "filter", "evaluation", "step") if key in source}


def _clusters(summary: BalanceSummary) -> dict[str, str]:
    """Return what clusters, duplicates and resampling rest on, in words."""
    content = summary.content
    source, duplicates = content["sources"]["clusters"], content["sources"]["near_duplicates"]
    entry = {"clusters": f"{content['clusters']} with questions, {source['method']}"}
    if source["method"] == "k-means":
        entry |= {"asked for": str(source["k"]), "seed of k-means": str(source["seed"])}
        entry |= _embeddings(source["embeddings"], "embeddings")
    else:
        entry["labels"] = str(source.get("labels") or "from Python")
    entry["near duplicates"] = duplicates.get("reason") or f"from a cosine of {duplicates['cosine']}"
    if duplicates["embeddings"] not in (None, source.get("embeddings")):
        entry |= _embeddings(duplicates["embeddings"], "embeddings for duplicates")
    return entry | {"resamples": str(content["resamples"]), "seed of resampling": str(content["seed"])}


def _embeddings(described: Mapping[str, Any], name: str) -> dict[str, str]:
    return {
        name: f"{described['path'] or 'from Python'}, {described['rows']} × {described['dim']}",
        f"fingerprint of {name}": described["fingerprint"][:_SHOWN],
    }


def reproduce_section(material: ReportMaterial) -> Section:
    """How to make the report again."""
    words = []
    if material.command:
        words.append(f"This page: {shlex.join(material.command)}")
    if material.runs:
        words.append(
            "A run's batches are a pure function of its embeddings, options, seed and batch size: the same embeddings "
            "(by fingerprint) and options give the same plan on every machine. Weights are reproduced as far as torch "
            "is deterministic on the device."
        )
    words.append("The numbers of this page are in the JSON file beside it; null stands with its reason.")
    return Section(tuple(words), data={"command": list(material.command)})
