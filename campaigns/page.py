"""The table of docs/reliability.md, written from `campaigns/results/` so that its figures are those of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "campaigns" / "results", ROOT / "docs" / "reliability.md"
SHOWN = 12  # figures in a cell
LONG = ("folders", "equivalent", "per layer")  # what is in the file alone
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def table() -> str:
    """One row per campaign that has run: what was tried, with which seed, and what failed."""
    rows = ["| campaign | attempts | seed | time | failures | figures |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        shown = {name: value for name, value in record["figures"].items() if name not in LONG}
        if "killed" in shown:
            shown = {"killed": shown["killed"], "survived": shown["total"] - shown["killed"], **shown}
        figures = "; ".join(f"{name}: {_plain(value)}" for name, value in shown.items())
        minutes = f"{record['seconds'] / 60:.0f} min" if record["seconds"] >= 60 else f"{record['seconds']} s"
        failures = len(record["failures"])
        attempts = record["figures"].get("total", record["count"])  # of a list, no more than it has
        rows.append(
            f"| `{record['campaign']}` | {attempts:,} | {record['seed']} | {minutes} | {failures} | {figures} |"
        )
    return "\n".join(rows) + "\n"


def update() -> None:
    """Puts the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


def _plain(value: Any) -> str:
    """A figure in a cell: of long lists and tables, only how many there are."""
    if isinstance(value, dict | list) and len(value) > SHOWN:
        return f"{len(value)} kinds"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
