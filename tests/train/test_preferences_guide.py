"""The guide to preference tuning: its files, commands and lines of data, as they stand on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onfoot.data.preferences import read_preferences
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from pages import page_blocks, run_page

PAGE = "docs/preferences.md"


def test_the_example_in_python_runs(tmp_path: Path) -> None:
    assert run_page("docs/preferences.md", tmp_path).printed[-1] == "True\n"


def test_the_lines_of_data_can_be_read(tmp_path: Path) -> None:
    (lines,) = [block.text for block in page_blocks(PAGE) if block.language == "json"]
    (tmp_path / "pairs.jsonl").write_text(lines)
    plain, explicit, implicit = read_preferences([tmp_path / "pairs.jsonl"], byte_tokenizer(), ChatTemplate())
    assert (explicit[1].ids == implicit[1].ids).all() and len(plain[0]) < len(plain[1])


@pytest.mark.slow
def test_the_worked_example_prefers_digits(tmp_path: Path) -> None:
    out = "".join(run_page(PAGE, tmp_path, slow=True).printed)
    base, tuned = (int(n) for n in re.findall(r": (\d+) of 20 answers in digits", out))
    assert base < 16 and tuned > 18
