"""The checks of a test session, collected for one page: `pytest --onfoot-report FILE.html`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onfoot.check.general_report import GradientReport
    from onfoot.check.report import LayerReport

Entry = dict[str, str]  # plain texts, which a test process can send to another
entries: list[Entry] | None = None  # None: nobody collects them


def start() -> None:
    """Collects the checks from now on."""
    global entries
    entries = []


def record(report: LayerReport | GradientReport) -> None:
    """Adds the report of a check, if they are collected."""
    if entries is None:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    entries.append(
        {
            "test": test,
            "title": str(report).partition("\n")[0],
            "passed": "yes" if report.passed else "",
            "verdict": report.verdict,
            "report": str(report),
        }
    )
