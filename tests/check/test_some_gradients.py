"""A function that returns only some gradients is judged on those; templates; numeric examples; what a report tells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted.attention import all_heads
from right import RIGHT
from typer.testing import CliRunner

import onfoot.check
from onfoot.check.equations import EQUATIONS, equation_of, page_of
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.template import template
from onfoot.cli import app

DOCS = Path(__file__).resolve().parents[2]


def norm_gradients(x, weight, bias, dout):
    sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    z, g = (x - x.mean(axis=-1, keepdims=True)) / sigma, dout * weight
    dx = (g - g.mean(axis=-1, keepdims=True) - z * (g * z).mean(axis=-1, keepdims=True)) / sigma
    return dx, (dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))


SOME: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "dx alone": (lambda *x: norm_gradients(*x)[0], ["dweight", "dbias"]),
    "dx in a tuple": (lambda *x: norm_gradients(*x)[:1], ["dweight", "dbias"]),
    "two of three": (lambda *x: norm_gradients(*x)[:2], ["dbias"]),
    "the first and the last": (lambda *x: (norm_gradients(*x)[0], None, norm_gradients(*x)[2]), ["dweight"]),
    "one of a parameter's shape": (lambda *x: norm_gradients(*x)[1], ["dx", "dbias"]),
    "a dict": (lambda *x: {"dbias": norm_gradients(*x)[2], "dx": norm_gradients(*x)[0]}, ["dweight"]),
    "a dict with None": (lambda *x: {"dbias": norm_gradients(*x)[2], "dx": None}, ["dx", "dweight"]),
    "a dict of all": (lambda *x: dict(zip(("dx", "dweight", "dbias"), norm_gradients(*x), strict=True)), []),
}


@pytest.mark.parametrize("how", SOME)
def test_the_gradients_that_are_given_are_judged(how: str) -> None:
    function, not_given = SOME[how]
    report = onfoot.check.layer_norm(function)
    assert report.passed and report.not_given == not_given
    assert report.to_dict()["not_given"] == not_given
    listed = f"not given, and not judged: {', '.join(not_given)}"
    assert (listed in str(report)) is bool(not_given)


@pytest.mark.parametrize("how", SOME)
def test_a_wrong_one_of_them_is_found(how: str) -> None:
    function, not_given = SOME[how]
    double = {"dict": lambda found: {name: g if g is None else 2 * g for name, g in found.items()}}
    several = {"tuple": lambda found: tuple(g if g is None else 2 * g for g in found)}

    def wrong(*inputs: Any) -> Any:
        found = function(*inputs)
        return {**double, **several}.get(type(found).__name__, lambda g: 2 * g)(found)

    report = onfoot.check.layer_norm(wrong, dtypes="float64")
    assert report.wrong == [name for name in ("dx", "dweight", "dbias") if name not in not_given]
    assert report.diagnosis is not None and report.diagnosis.complete


def test_a_known_mistake_in_dx_alone_is_named() -> None:
    def dx(x, weight, bias, dout):
        sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        return dout * weight / sigma

    report = onfoot.check.layer_norm(dx)
    assert report.diagnosis is not None and report.diagnosis.findings[0].gradients == ["dx"]
    assert report.diagnosis.findings[0].name == "mean and variance held constant"


# Templates


def run(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_template_is_python_that_can_be_filled_in(layer: str) -> None:
    found, space = LAYERS[layer], {}
    text = run("--layer", layer, "--template").stdout
    assert text == template(found, found.options)
    assert all(len(line) <= 120 for line in text.splitlines())
    exec(compile(text, "template.py", "exec"), space)
    empty: Any = space[f"{layer}_backward"]
    report = check_layer(found, empty, arrays="numpy")
    assert not report.passed and "nothing to judge yet: it returns None; begin with" in str(report)
    assert found.gradients[0] in empty.__doc__ and found.contract[0][:20] in empty.__doc__
    filled = text.replace(text[text.index("    " + _result(found, 0) + " = None") :], "    return RIGHT(")
    options = ", ".join(f"{name}={name}" for name in found.options)
    filled += ", ".join((*found.arguments, options)) + ")\n"
    exec(compile(filled, "template.py", "exec"), space)
    space["RIGHT"] = found.reference
    function: Any = space[f"{layer}_backward"]
    assert check_layer(found, function, arrays="numpy", dtypes="float64").passed


def _result(layer: Any, i: int) -> str:
    name = layer.gradients[i]
    return f"new_{name}" if name in layer.arguments else name


def test_a_template_is_written_to_a_new_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("mine.py", "--layer", "rms_norm", "--template", "--eps", "1e-5")
    assert result.exit_code == 0 and "onfoot check mine.py --layer rms_norm" in result.stdout
    text = Path("mine.py").read_text(encoding="utf-8")
    assert "onfoot check mine.py:rms_norm_backward --layer rms_norm" in text and "eps=1e-05" in text
    filled = text.replace(
        "dweight = None",
        "x, g = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps), None; dweight = (dout * x).sum((0, 1))",
    )
    Path("mine.py").write_text(filled, encoding="utf-8")
    result = run("mine.py", "--layer", "rms_norm", "--eps", "1e-5")
    assert result.exit_code == 0 and "not given, and not judged: dx" in result.stdout
    again = run("mine.py", "--layer", "rms_norm", "--template")
    assert again.exit_code == 2 and "mine.py exists and is not overwritten" in " ".join(again.stderr.split())
    assert Path("mine.py").read_text(encoding="utf-8") == filled


INVALID = {
    "--template": "--template needs a layer",
    "--template --layer gelu --seed 3": "--seed has no effect on a template",
    "--template --layer gelu --tokens 3": "--tokens has no effect on a template",
    "--template --layer gelu --json": "--json has no effect on a template",
    "--template --layer gelu file:function": "the template is written to a file whose name ends in .py",
    "--template --layer gelu nowhere/file.py": "cannot write nowhere/file.py: No such file or directory",
    "--tokens 3 --layer gelu": "--tokens needs a function",
    "--no-isolated": "--no-isolated needs a function",
}


@pytest.mark.parametrize("command", INVALID)
def test_invalid_arguments_of_a_template(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command.split())
    assert result.exit_code == 2 and INVALID[command] in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


# What a report tells


def scaled_wrongly(q, k, v, dout):
    dq, dk, dv = all_heads(q, k, v, dout, True)
    return dq * np.sqrt(q.shape[-1]), dk * np.sqrt(q.shape[-1]), dv


def test_a_report_has_the_formula_the_page_and_numbers() -> None:
    report = onfoot.check.attention(scaled_wrongly, arrays="numpy")
    text = str(report)
    assert "violates  eq 28: Δ_raw = Δ_scaled/√d_k" in text
    assert "read      docs/equations/attention.md#eq-28" in text
    assert re.search(
        r"Example with two tokens:\n  q     \[\[.*\]\]\n  k .*\n  v .*\n  dout .*\n  dq    yours  .*\n        right  ",
        text,
    )
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    finding, example = found["diagnosis"]["findings"][0], found["example"]
    assert finding["formula"] == EQUATIONS["28"] and finding["page"].endswith("attention.md#eq-28")
    assert example["gradient"] == "dq" and np.shape(example["inputs"]["q"]) == (1, 1, 2, 2)
    inputs = [np.array(example["inputs"][name]) for name in ("q", "k", "v", "dout")]
    np.testing.assert_allclose(example["right"], all_heads(*inputs, True)[0])
    np.testing.assert_allclose(example["yours"], scaled_wrongly(*inputs)[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_has_an_example_of_two_tokens(layer: str) -> None:
    right = RIGHT[layer][0]

    def twice(*inputs: Any) -> Any:
        found = right(*inputs)
        return tuple(2 * g for g in found) if isinstance(found, tuple) else 2 * found

    report = check_layer(LAYERS[layer], twice, dtypes="float64")
    assert report.example is not None and report.example.index is None
    np.testing.assert_allclose(report.example.yours, 2 * report.example.right)
    assert all(len(line) < 120 for line in report.example.lines())


def test_an_example_that_needs_more_tokens_is_one_entry() -> None:
    def backward(q, k, v, dout):
        dq, dk, dv = all_heads(q, k, v, dout, True)
        dq[..., 3:, :] = np.nan
        return dq, dk, dv

    report = onfoot.check.attention(backward, arrays="numpy")
    assert report.example is not None and report.example.index is not None and report.example.index[2] == 3
    assert "is nan; right is " in str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_right_function_has_no_example() -> None:
    assert onfoot.check.layer_norm(norm_gradients).example is None


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_page_to_read_has_the_equation(equation: str) -> None:
    page, _, anchor = page_of(equation).partition("#")
    assert f'<a id="{anchor}"></a>**({equation})**' in (DOCS / page).read_text(encoding="utf-8")
    assert page_of("XYZ.1") == "docs/equations/README.md"


def test_check_and_torch_are_there_after_import_onfoot() -> None:
    code = "import sys, onfoot; assert 'torch' not in sys.modules; onfoot.check.LAYERS; onfoot.torch"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", LAYERS)
def test_every_gradient_has_an_equation_and_a_page(name: str) -> None:
    for gradient in LAYERS[name].gradients:
        equation = equation_of(name, gradient)
        assert equation in EQUATIONS, gradient
        page, _, anchor = page_of(equation).partition("#")
        assert f'id="{anchor}"' in (DOCS / page).read_text(), equation
    assert equation_of("gelu", "dx", "erf") == "G.6"


def test_a_finding_without_an_explanation_has_the_equation_of_its_gradient() -> None:
    report = onfoot.check.relu(lambda x, dout: -dout * (x > 0), dtypes="float64")
    assert report.verdict == "wrong: dx; dx has the wrong sign"
    assert "right     eq G.2: ∂x = Δ where x > 0, else 0" in str(report)
    assert "read      docs/equations/activation.md#eq-g-2" in str(report)
    (finding,) = report.to_dict()["diagnosis"]["findings"]
    assert finding["equation"] == "G.2" and finding["formula"] and finding["page"].endswith("#eq-g-2")


def test_an_example_has_as_many_digits_as_the_difference_needs() -> None:
    report = onfoot.check.relu(lambda x, dout: 1.00001 * dout * (x > 0), dtypes="float64")
    (line,) = re.findall(r"^Example: .* is (\S+; right is \S+)$", str(report), re.MULTILINE)
    yours, right = line.split("; right is ")
    assert yours != right and len(yours) <= 9
