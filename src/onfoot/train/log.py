"""log.jsonl: one JSON line per step or evaluation, and the loss curve drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onfoot.formats.write import append, atomic_write, write_text
from onfoot.plots import new_figure, png


class Log:
    """Appends records to a file. `resume` drops records after the checkpoint that a run resumes from."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path = path
        self.writes = writes  # True on rank 0 only

    def append(self, record: dict[str, Any]) -> None:
        if self.writes:
            append(self.path, json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All records. Invalid lines, such as a last line cut short by a crash, are skipped."""
        return [record for record in self._lines() if record is not None]

    def _lines(self) -> list[dict[str, Any] | None]:
        if not self.path.is_file():
            return []
        return [_record(line) for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines()]

    def last_step(self) -> int:
        """The highest step that has a record; 0 without any."""
        return max((record["step"] for record in self.read()), default=0)

    def resume(self, step: int) -> list[str]:
        """Drops the records after `step`; returns warnings about invalid lines and missing steps."""
        if not self.writes:
            return []
        lines = self._lines()
        kept = [record for record in lines if record is not None and record["step"] <= step]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        invalid = [number for number, record in enumerate(lines[:-1], start=1) if record is None]
        warnings = [f"{self.path}, line {number}: not a log record; skipped" for number in invalid]
        steps = {record["step"] for record in kept if "loss" in record}
        if len(steps) < step:
            warnings.append(f"{self.path} lacks {step - len(steps):,} of the {step:,} steps before this checkpoint")
        return warnings


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def draw_losses(records: list[dict[str, Any]], path: Path, bigram: float | None = None) -> None:
    """Plots the training and validation loss over the steps as a PNG file."""
    with atomic_write(path) as file:
        file.write(picture(records, bigram))


def picture(records: list[dict[str, Any]], bigram: float | None = None) -> bytes:
    """The plot of `draw_losses` as PNG bytes."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4c8", linewidth=0.8, label="training, per step")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="#c2410c", marker="o", markersize=4, label="validation")
    if bigram is not None:
        axes.axhline(bigram, color="#4b5563", linestyle="--", linewidth=1, label=f"bigram model, {bigram:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {'pair' if any('margin' in r for r in records) else 'token'})")
    axes.grid(alpha=0.25)
    if axes.get_lines():
        axes.legend(frameon=False)
    return png(figure)
