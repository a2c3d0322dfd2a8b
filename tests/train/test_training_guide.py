"""The guide to the trainer: its code and its commands, as they stand on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onfoot.train.options import CHANGEABLE
from pages import ROOT, run_page

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_code_of_the_guide_runs(tmp_path: Path) -> None:
    names = run_page("docs/training.md", tmp_path).names
    runs = tmp_path / "work" / "runs"
    assert list((runs / "tuned").rglob("adapter_config.json"))
    assert names["step"].step == 3
    assert '"perplexity"' in (runs / "good" / "log.jsonl").read_text(encoding="utf-8")
    assert names["found"].suggestion > 0
    assert (runs / "book" / "checkpoints" / "step-0000004").is_dir()  # extended by 2 steps


@pytest.mark.slow
def test_the_learning_rate_of_the_guide_is_measured(tmp_path: Path) -> None:
    assert "120 steps" in PAGE
    assert "suggest" in "".join(run_page("docs/training.md", tmp_path, slow=True).printed)


def test_the_guide_lists_what_may_change() -> None:
    listed = re.search(r"These may change: (.*?)\. `run\.json`", PAGE, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`--([\w-]+)`", listed[1])) == {name.replace("_", "-") for name in CHANGEABLE}
