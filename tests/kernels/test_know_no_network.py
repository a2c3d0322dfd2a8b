"""Kernels and the recording depend on ops, not on networks: a new family needs no change in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import onfoot

PACKAGE = Path(onfoot.__file__).parent
FILES = sorted([*(PACKAGE / "kernels").glob("*.py"), *(PACKAGE / "recording").glob("*.py")])
NAMES = "gpt", "llama", "qwen", "smol", "c_attn", "c_proj", "c_fc", "q_proj", "gate_proj", "wte", "embed_tokens"
FAMILIES = re.compile("|".join([*NAMES, r"\bh\.\d", r"layers\.\d"]), re.IGNORECASE)


def imported(tree: ast.AST) -> set[str]:
    """The modules that a file imports, wherever in it."""
    out: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            out |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
    return out


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_names_a_family_or_a_parameter_or_imports_models(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert FAMILIES.findall(text) == []
    assert {name for name in imported(ast.parse(text)) if name == "onfoot" or name.startswith("onfoot.models")} == set()


def test_a_family_would_be_seen() -> None:
    assert FAMILIES.search("transformer.h.0.ln_1") and FAMILIES.search('"gate_proj"') and FAMILIES.search("GPT2Config")
    assert "onfoot.models.gpt2" in imported(ast.parse("def f():\n    from onfoot.models import gpt2"))
