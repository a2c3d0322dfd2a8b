"""log.jsonl: one line an event, written as it comes; and the curve drawn from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Log:
    """Appends records to a file. `resume` drops what lies behind the checkpoint that a run resumes from."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path = path
        self.writes = writes  # of several ranks, only one does

    def append(self, **record: Any) -> None:
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All records; a last line that a crash cut short is left out."""
        if not self.path.is_file():
            return []
        records = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def resume(self, step: int) -> None:
        """Drops what was logged after `step`."""
        if not self.writes:
            return
        kept = [record for record in self.read() if record["step"] <= step]
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)


def draw_losses(records: list[dict[str, Any]], path: Path, bigram: float | None = None) -> None:
    """The training and validation loss over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4c8", linewidth=0.8, label="training, a step")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="#c2410c", marker="o", markersize=4, label="validation")
    if bigram is not None:
        axes.axhline(bigram, color="#4b5563", linestyle="--", linewidth=1, label=f"bigram entropy, {bigram:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
