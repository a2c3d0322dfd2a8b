"""`pytest --onfoot-report FILE.html`: every assert_gradients check of a session on one page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import onfoot.check
from onfoot.check import assert_gradients, session
from onfoot.check.page import page

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import numpy as np
from onfoot.check import assert_gradients

def right(x, dout):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x))

def test_right():
    assert_gradients(right, layer="gelu", dtypes="float64")

def test_wrong():
    assert_gradients(lambda x, dout: 2 * right(x, dout), layer="gelu", dtypes="float64")

def test_anything_else():
    assert_gradients(np.sin, lambda x, dout: -dout * np.cos(x), [np.ones(3) / 3])
"""


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_mine.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


class Tags(HTMLParser):
    """Counts tags, and fails where one is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two workers"])
def test_the_page_has_every_check_of_the_session(tmp_path: Path, processes: list[str]) -> None:
    done = pytest_run(tmp_path, "-p", "onfoot_pytest", *processes, "--onfoot-report", "out/report.html")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "report.html: 3 gradient checks" in done.stdout
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for words in ("3 checks: 2 wrong, 1 right", "wrong: dx; dx is 2 times too large", "test_mine.py::test_right"):
        assert words in text
    assert text.index("test_mine.py::test_wrong") < text.index("test_mine.py::test_right")  # the wrong ones first
    tags = Tags()
    tags.feed(text)
    assert tags.seen["details"] == 3 and tags.open == []
    assert not re.search(r"src=|href=|url\(|@import|<script", text) and "prefers-color-scheme: dark" in text


def test_the_first_line_of_a_failure_is_the_verdict(tmp_path: Path) -> None:
    done = pytest_run(tmp_path)
    assert "FAILED test_mine.py::test_wrong - AssertionError: wrong: dx; dx is 2 times too large" in done.stdout
    assert "FAILED test_mine.py::test_anything_else - AssertionError: wrong: argument 0; " in done.stdout


def test_the_plugin_imports_nothing_without_its_option(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure(config):\n"
        "    print('IMPORTED', [m for m in ('numpy', 'onfoot', 'torch') if m in sys.modules])\n"
    )
    (tmp_path / "test_mine.py").write_text("def test(): assert True\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "onfoot_pytest", "test_mine.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "IMPORTED []" in done.stdout, done.stdout + done.stderr


def test_the_package_declares_its_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'\[project.entry-points.pytest11\]\nonfoot = "onfoot_pytest"', text)


def test_nothing_is_collected_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "entries", None)
    assert_gradients(np.sin, lambda x, dout: dout * np.cos(x), [np.ones(3)])
    assert session.entries is None
    session.start()
    assert_gradients(np.sin, lambda x, dout: dout * np.cos(x), [np.ones(3)])
    entries = session.entries or []
    assert [entry["passed"] for entry in entries] == ["yes"] and "passes: argument 0" in entries[0]["verdict"]


def test_names_are_escaped() -> None:
    evil = '<script>alert("x")</script>&amp;'
    text = page([{"test": evil, "title": evil, "passed": "", "verdict": evil, "report": evil}])
    assert "<script" not in text and text.count("&lt;script&gt;") == 4 and "&amp;amp;" in text
    assert "1 check: 1 wrong, 0 right" in text and "0 checks" in page([])


def test_a_verdict_is_one_line() -> None:
    def raising(x, dout):
        raise ValueError("first\nsecond")

    assert onfoot.check.gelu(raising).verdict.startswith("fails: it raises ValueError: first (test_plugin.py, line ")
    assert onfoot.check.gelu(lambda x, dout: 0 * x).verdict.startswith("wrong: dx; dx is 0")
    report = onfoot.check.gelu(lambda x, dout: dout + x**3)
    assert report.verdict == "wrong: dx; no known mistake explains it"
