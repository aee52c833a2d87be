"""What a report is made from; sections share what is costly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from analysis.balance.summary import BalanceSummary
from analysis.run_folder.curves import Evaluation, Training, evaluations, rewards, training
from analysis.run_folder.overview import run_overview
from analysis.run_folder.recorded import score_meaning
from analysis.run_folder.run import Run

T = TypeVar("T")


@dataclass
class ReportMaterial:
    """What a report is made from.

    Parameters
    ----------
    runs
        Name to run folder, in the order in which they are shown.
    command
        The words of the command that made the report, if any.
    balance
        Balance of predictions; None where there are none.
    embeddings
        Where the runs' embeddings are, if no longer where run.json says.
    redraws
        How often each run's plan is drawn anew for the tests of locality.
    """

    runs: Mapping[str, Run]
    command: Sequence[str] = ()
    balance: BalanceSummary | None = None
    embeddings: Path | None = None
    redraws: int = 199
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` gives, computed at the first call with this key.

        Parameters
        ----------
        key
            Names the value among all sections; begin it with your section's key.
        compute
            Takes nothing. What it raises is not kept.
        """
        if key not in self._known:
            self._known[key] = compute()
        return cast("T", self._known[key])

    def overview(self, name: str) -> dict[str, Any]:
        """Return a run's figures as `run_overview` has them."""
        return self.once(("overview", name), lambda: run_overview(self.runs[name]))

    def training(self, name: str) -> Training:
        """Return how a run's training went."""
        return self.once(("training", name), lambda: training(self.runs[name]))

    def evaluations(self, name: str) -> dict[str, Evaluation]:
        """Return a run's evaluations by measure."""
        return self.once(("evaluations", name), lambda: evaluations(self.runs[name]))

    def rewards(self, name: str) -> dict[str, Evaluation]:
        """Return a run's rewards in training by name."""
        return self.once(("rewards", name), lambda: rewards(self.runs[name]))

    def score_meaning(self, measure: str) -> str | None:
        """Return what a measure is in the words of run.json; None where the runs that have it do not say the same."""
        having = [name for name in self.runs if measure in self.evaluations(name)]
        said = {score_meaning(self.runs[name], measure) for name in having}
        return said.pop() if len(said) == 1 else None

    @property
    def signals(self) -> list[str]:
        """Signals of which all runs hold gradients, in the first run's order."""
        runs = list(self.runs.values())
        return [signal for signal in runs[0].signals if all(one.holds(signal) for one in runs)] if runs else []
