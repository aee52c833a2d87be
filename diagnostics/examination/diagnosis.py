"""What :func:`diagnostics.doctor` found, as plain values and as a report."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from diagnostics.examination.disk_usage import Stream
from diagnostics.examination.micro_step import MicroStep


@dataclass(frozen=True)
class SignalFinding:
    """One signal.

    Attributes
    ----------
    name
        Its name in the run folder.
    fires
        Whether the micro-step brought its gradient; None where the micro-step could not be run.
    parameter
        Full name of the parameter of ``weight``; None for the others.
    shape
        Shape of one gradient.
    tied_with
        Other names of the same tensor.
    kind, stored
        How a row is stored, and how many numbers it takes.
    norm
        2-norm in the micro-step, that of the sketch for a very large ``head_only``; None where it is not known or not
        finite.
    table_bytes
        Memory of the sketch's tables, kept throughout.
    copies, copy_bytes
        Gradients of the first steps that are copied to measure the sketch's error, and their memory until then.
    """

    name: str
    fires: bool | None
    parameter: str | None
    shape: tuple[int, ...]
    tied_with: tuple[str, ...]
    kind: str
    stored: int
    norm: float | None
    table_bytes: int
    copies: int
    copy_bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """What a run would record, what that takes, and what would be refused. ``print(diagnosis)`` is the report.

    Attributes
    ----------
    model
        Class, parameters and dtype.
    samples
        Rows of the training dataset; None where it has no length.
    ids
        How samples will be known, in words.
    schedule
        ``step_samples``, ``micro_batches``, ``steps_per_epoch`` (of the trainer) and ``steps``; None where the loader
        could not be built.
    organizer
        Name and figures of the first organizer epoch, and ``notes`` on it; None without an organizer.
    recorder
        Folder (None without a recorder) and options.
    signals
        One finding a signal.
    disk
        Rows and bytes of each stream of the run folder.
    micro_step
        What was run; None if it could not be.
    refused
        Why the run would be refused or fail, with the remedy, one line each.
    """

    model: dict[str, Any]
    samples: int | None
    ids: str
    schedule: dict[str, int] | None
    organizer: dict[str, Any] | None
    recorder: dict[str, Any]
    signals: tuple[SignalFinding, ...]
    disk: tuple[Stream, ...]
    micro_step: MicroStep | None
    refused: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing would be refused and every signal fired."""
        return not self.refused

    @property
    def disk_bytes(self) -> int:
        """Bytes of the run folder at the end."""
        return sum(stream.bytes for stream in self.disk)

    def refuse(self, reasons: list[str]) -> Diagnosis:
        """Return this diagnosis with more reasons in front of its own."""
        return dataclasses.replace(self, refused=(*reasons, *self.refused))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        plain = {"ok": self.ok, **dataclasses.asdict(self), "disk_bytes": self.disk_bytes}
        if self.micro_step is not None and not math.isfinite(self.micro_step.loss):
            plain["micro_step"] |= {"loss": None, "loss_reason": f"the loss is {self.micro_step.loss}"}
        return plain

    def __str__(self) -> str:
        lines = ["all is well" if self.ok else f"{len(self.refused)} thing(s) would stop this run"]
        lines += [f"refused     {reason}" for reason in self.refused]
        m = self.model
        lines.append(
            f"model       {m['class']}, {m['trainable_parameters']:,} of {m['parameters']:,} parameters trained"
        )
        lines.append(f"samples     {'unknown' if self.samples is None else f'{self.samples:,}'}; ids: {self.ids}")
        if self.schedule is not None:
            s = self.schedule
            lines.append(
                f"schedule    {s['step_samples']} samples a step in {s['micro_batches']} micro-batch(es); "
                f"{s['steps_per_epoch']:,} steps a trainer epoch, {s['steps']:,} in all"
            )
        lines.append(f"organizer   {self._organizer_line()}")
        lines += [f"note        {note}" for note in (self.organizer or {}).get("notes", ())]
        out = self.recorder["out"]
        lines.append(f"recorder    {'none; with the default options there would be:' if out is None else out}")
        lines += [f"  {finding.name:<10}{_signal_line(finding)}" for finding in self.signals]
        if self.disk:
            lines.append(f"disk        {_size(self.disk_bytes)} at the end:")
            lines += [f"  {stream.name:<30}{stream.rows:>12,} rows  {_size(stream.bytes)}" for stream in self.disk]
        tables, copies = (sum(getattr(f, name) for f in self.signals) for name in ("table_bytes", "copy_bytes"))
        lines.append(
            f"memory      sketch tables {_size(tables)}, throughout; copies of the first gradients {_size(copies)}, "
            "until the sketch is checked"
        )
        lines.append(f"micro-step  {self._micro_step_line()}")
        if self.micro_step is not None and self.micro_step.loss_reason is not None:
            lines.append(f"losses      of steps and samples will be null: {self.micro_step.loss_reason}")
        return "\n".join(lines)

    def _organizer_line(self) -> str:
        o = self.organizer
        if o is None:
            return "none; batches are the trainer's own"
        cosine = "unknown"
        if o["within_batch_cosine"] is not None:
            cosine = f"{o['within_batch_cosine']:.3f} (uniform: {o['uniform_within_batch_cosine']:.3f})"
        exposure = f"{o['exposure_min']} / {o['exposure_mean']:.2f} / {o['exposure_max']}"
        return (
            f"{o['name']}; its first epoch: {o['steps']:,} steps, exposure min / mean / max {exposure}, "
            f"within-batch cosine {cosine}"
        )

    def _micro_step_line(self) -> str:
        step = self.micro_step
        if step is None:
            return "not run"
        peak = "unknown" if step.peak_bytes is None else _size(step.peak_bytes)
        what = "allocated" if step.device.startswith("cuda") else "resident"
        return (
            f"{len(step.sample_ids)} row(s), {step.tokens} tokens with a loss of {step.loss:.4f}; forward and backward "
            f"in {step.seconds:.3f} s on {step.device}, peak memory {peak} ({what}); nothing was changed"
        ) + self._generated()

    def _generated(self) -> str:
        if self.micro_step is None or self.micro_step.generated is None:
            return ""
        return (
            f"; the rows are completions of one prompt, cut at {self.micro_step.generated} tokens: longer ones take "
            "more memory and time, and generating is not counted"
        )


_WORDS = {"hidden": "the gradient at the final norm's output", "head_only": "the gradient of the head alone"}


def _signal_line(finding: SignalFinding) -> str:
    shape = " x ".join(f"{size:,}" for size in finding.shape)
    what = _WORDS.get(finding.name, "") if finding.parameter is None else finding.parameter
    tied = ""
    if finding.parameter is not None:
        tied = f", tied with {', '.join(finding.tied_with)}" if finding.tied_with else ", not tied"
    fires = {True: "fires", False: "does not fire", None: "not tried"}[finding.fires]
    if finding.norm == 0.0:
        fires = "fires, with a zero gradient at the first step (a row without direction)"
    stored = "as it is" if finding.kind == "identity" else f"as a sketch of {finding.stored:,} numbers"
    return f"{fires}: {what} ({shape}{tied}), stored {stored}"


def _size(count: float) -> str:
    """Return bytes in words, in decimal units.

    Examples
    --------
    >>> _size(0), _size(1536), _size(12_300_000)
    ('0 B', '1.5 kB', '12.3 MB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {units[power]}"
