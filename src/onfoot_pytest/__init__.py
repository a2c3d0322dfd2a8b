"""The pytest plugin of onfoot: `pytest --onfoot-report FILE.html` writes a page with every `assert_gradients` check.

It stands outside the package, because pytest imports a plugin when it starts: without the option, onfoot and NumPy are
not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("onfoot").addoption(
        "--onfoot-report",
        metavar="FILE.html",
        help="write all checks of onfoot.check.assert_gradients, right and wrong, to one HTML page",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("onfoot_report"):
        config.pluginmanager.register(Report(config), "onfoot-report")


class Report:
    """Collects the checks of this process and, with pytest-xdist, those of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        from onfoot.check import session

        session.start()
        self.config, self.session = config, session
        self.path = Path(config.getoption("onfoot_report"))

    def pytest_sessionfinish(self) -> None:
        entries = self.session.entries or []
        if hasattr(self.config, "workeroutput"):  # a worker of pytest-xdist
            self.config.workeroutput["onfoot"] = entries
            return
        from onfoot.check.page import page

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(page(entries), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes the checks of a worker that has ended."""
        assert self.session.entries is not None
        self.session.entries += getattr(node, "workeroutput", {}).get("onfoot", [])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        n = len(self.session.entries or [])
        terminalreporter.write_line(f"{self.path}: {n} gradient check{'s' if n != 1 else ''}")
