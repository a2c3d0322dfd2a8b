"""`onfoot check`: the options select what is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.mistakes import mistakes_of
from onfoot.check.slips import slips
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


def test_every_option_that_a_layer_or_a_fix_names_is_on_the_command_line() -> None:
    known = {
        option for param in get_command(app).commands["check"].params for option in (*param.opts, *param.secondary_opts)
    }
    for layer in LAYERS.values():
        for mistake in (*mistakes_of(layer, layer.options), *slips(layer, layer.options)):
            assert set(re.findall(r"(?<!\S)--[a-z0-9-]+", mistake.fix)) <= known, mistake.fix
        assert {f"--{name.replace('_', '-')}" for name in layer.options} <= known, layer.name


ADAMW = """
import numpy as np
def adamw(param, grad, m, v, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1):
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    update = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return param - lr * update - lr * weight_decay * param, m, v
"""


@pytest.mark.parametrize(
    "options",
    [
        {"weight-decay": "0"},
        {"eps": "1e-6", "lr": "0.01", "beta1": "0.8", "beta2": "0.999"},
    ],
)
def test_the_options_of_adamw_are_given_to_the_function(tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "mine.py").write_text(ADAMW)
    typed = ["check", f"{tmp_path}/mine.py:adamw", "--layer", "adamw", "--dtype", "float64", "--json", "--no-isolated"]
    result = CliRunner().invoke(
        app, [*typed, *(word for name, value in options.items() for word in (f"--{name}", value))]
    )
    assert result.exit_code == 0, result.output
    used = json.loads(result.stdout)["options"]
    assert all(used[name.replace("-", "_")] == float(value) for name, value in options.items())


@pytest.mark.parametrize("layer", ["layer_norm", "rms_norm", "adamw"])
def test_an_eps_of_0_can_be_chosen(layer: str) -> None:
    found = LAYERS[layer]
    assert check_layer(found, lambda *x: found.reference(*x, **{**found.options, "eps": 0.0}), eps=0.0).passed
