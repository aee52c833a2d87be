"""The demo's own section of its report: what was trained, and whether a batch holds problems of one family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from analysis.report import ReportMaterial, Section, SectionSpec


def same_family_share(sample_ids: Sequence[int], families: Sequence[str]) -> float:
    """Return the share of the pairs of samples that are of one family.

    Parameters
    ----------
    sample_ids
        At least two distinct samples.
    families
        The family of each sample.
    """
    counts = np.unique([families[i] for i in sample_ids], return_counts=True)[1]
    n = len(sample_ids)
    return float((counts * (counts - 1)).sum() / (n * (n - 1)))


def families_section(families: Sequence[str], setting: str) -> SectionSpec:
    """Return the section.

    Parameters
    ----------
    families
        The family of each sample to train on, by sample id.
    setting
        What was trained, in words.
    """
    from analysis.report import Cell, Finding, Section, SectionSpec, Table

    def compute(material: ReportMaterial) -> Section:
        chance = same_family_share(range(len(families)), families)
        shares = {
            name: float(np.mean([same_family_share(ids, families) for ids in run.steps()["sample_ids"].to_pylist()]))
            for name, run in material.runs.items()
        }
        found = " and ".join(f"{share:.1%} in {name}" for name, share in shares.items())
        words = f"Of the pairs of problems in a batch {found} are of one family; chance gives {chance:.1%}."
        rows = tuple((Cell(name), Cell(f"{share:.1%}")) for name, share in {**shares, "chance": chance}.items())
        return Section(
            words=(setting, words),
            tables=(Table(("batches of", "pairs of one family"), rows, "Families of problems within a batch"),),
            findings=(Finding("plain", words),),
            data={"pairs_of_one_family": shares, "chance": chance},
        )

    return SectionSpec("families", "What was trained", compute)
