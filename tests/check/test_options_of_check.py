"""`onfoot check`: the options select what is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onfoot.cli import app

GELU = """
import numpy as np
def gelu_backward(x, dout):
    c = np.sqrt(2 / np.pi).astype(x.dtype)
    u = c * (x + 0.044715 * x**3)
    t = np.tanh(u)
    return dout * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x))
"""


@pytest.mark.parametrize(
    ("dtype", "checked"), [("float64", ["float64"]), ("float32", ["float32"]), ("both", ["float32", "float64"])]
)
def test_the_requested_dtype_is_checked(tmp_path: Path, dtype: str, checked: list[str]) -> None:
    (tmp_path / "mine.py").write_text(GELU)
    typed = ["check", f"{tmp_path}/mine.py:gelu_backward", "--layer", "gelu", "--dtype", dtype, "--seed", "3", "--json"]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert sorted({case["dtype"] for case in report["cases"]}) == checked
    assert report["seed"] == 3 and report["strict"] is False
