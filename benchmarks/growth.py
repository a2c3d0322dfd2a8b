"""How time and memory of a training step grow with the length of a sequence, with depth and with the batch.

`python benchmarks/growth.py growth.json growth.png` measures onfoot beside PyTorch (eager), each in processes of its
own, and draws it. The figures of docs/performance.md come from here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from onfoot.bench import machine
from onfoot.bench.jobs import growing
from onfoot.bench.report import run_job

SERIES = {  # what grows -> (blocks, batch, tokens)
    "tokens a sequence": [(4, 2, 64), (4, 2, 256), (4, 2, 1024)],
    "blocks": [(2, 4, 256), (4, 4, 256), (8, 4, 256)],
    "sequences": [(4, 1, 256), (4, 4, 256), (4, 8, 256)],
}
WHO = ("onfoot", "eager")


def main(figures: Path, picture: Path) -> None:
    from dataclasses import replace

    from matplotlib.figure import Figure

    out: dict[str, list[dict[str, float]]] = {}
    for name, sizes in SERIES.items():
        for size in sizes:
            job = replace(growing(*size), contenders=WHO)
            results = run_job(job, rounds=1, threads=2, say=print)
            row = {"blocks": size[0], "batch": size[1], "tokens": size[2]}
            for r in results:
                row |= {f"{r.contender} ms": 1000 * r.seconds, f"{r.contender} MB": r.peak_bytes / 1e6}
            out.setdefault(name, []).append(row)
    figures.write_text(json.dumps({"machine": machine.describe(), "series": out}, indent=1) + "\n", encoding="utf-8")
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots(2, 3)
    for column, (name, rows) in enumerate(out.items()):
        key = {"tokens a sequence": "tokens", "blocks": "blocks", "sequences": "batch"}[name]
        for line, unit in enumerate(("ms", "MB")):
            for who, style in zip(WHO, ("o-", "s--"), strict=True):
                axes[line][column].plot([r[key] for r in rows], [r[f"{who} {unit}"] for r in rows], style, label=who)
            axes[line][column].set(xlabel=name, ylim=(0, None), ylabel="ms per step" if unit == "ms" else "peak MB")
    axes[0][0].legend()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
