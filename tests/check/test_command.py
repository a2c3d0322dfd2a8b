"""`onfoot check`: reports, exit status, and functions by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onfoot.check.engines import InstallationReport, OpResult, check_op, installation
from onfoot.check.examples import examples
from onfoot.check.layers import LAYERS
from onfoot.cli import app
from onfoot.engine import ENGINES, OPS, Engine, get_engine

RIGHT = """
import numpy as np

def t(x):
    return np.swapaxes(x, -1, -2)

def attention_backward(q, k, v, dout, causal=True):
    root = np.sqrt(q.shape[-1])
    scores = q @ t(k) / root
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    a = e / e.sum(axis=-1, keepdims=True)
    da = dout @ t(v)
    ds = a * (da - (a * da).sum(axis=-1, keepdims=True)) / root
    return ds @ k, t(ds) @ q, t(a) @ dout
"""
WRONG = RIGHT.replace("keepdims=True)) / root", "keepdims=True))")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right_attention.py").write_text(RIGHT)
    (tmp_path / "wrong_attention.py").write_text(WRONG)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    (tmp_path / "two.py").write_text("value = 3\n\ndef a(x): ...\n\ndef b(x): ...\n\nclass C: ...\n")
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


@pytest.mark.parametrize(
    "target", ["right_attention:attention_backward", "right_attention.py:attention_backward", "right_attention.py"]
)
def test_a_right_function_is_found_by_name_and_passes(here: Path, target: str) -> None:
    result = run(target, "--layer", "attention")
    assert result.exit_code == 0, result.output
    assert "✓ passes: every gradient agrees to rounding, in 10 cases, in float64 and float32" in result.stdout


def test_a_wrong_function_ends_with_status_1_and_its_diagnosis(here: Path) -> None:
    result = run("wrong_attention:attention_backward", "--layer", "attention")
    assert result.exit_code == 1
    for words in (
        "attention · wrong_attention:attention_backward",
        "✗ wrong: dq, dk",
        "dq is √d_k = 2.65 times too large",
        "1. 1/√d_k missing from the backward pass   [dq, dk]",
        "violates  eq 28: Δ_raw = Δ_scaled/√d_k",
        "fix       divide the gradient of the scores by √d_k",
        "docs/errata.md, E42",
    ):
        assert words in result.stdout


def test_a_report_for_programs(here: Path) -> None:
    result = run("wrong_attention.py", "--layer", "attention", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["passed"] is False and report["wrong"] == ["dq", "dk"]
    assert report["diagnosis"]["complete"] is True
    assert [f["name"] for f in report["diagnosis"]["findings"]] == ["1/√d_k missing from the backward pass"]
    assert report["diagnosis"]["residual"] < 1e-12
    assert report["cases"][0]["gradients"]["dq"]["ok"] is False
    assert report["cases"][0]["shapes"]["q"] == [5, 4, 4, 7]


def test_options_of_the_layer_and_of_the_check(here: Path) -> None:
    target = "right_attention:attention_backward"
    assert run(target, "--layer", "attention", "--no-causal").exit_code == 0
    assert run(target, "--layer", "attention", "--dtype", "float32", "--seed", "9").exit_code == 0
    assert run(target, "--layer", "attention", "--arrays", "numpy").exit_code == 0
    strict = run(target, "--layer", "attention", "--strict")
    assert strict.exit_code == 1  # it aligns its mask with the first key
    assert "the mask aligned with the first key" in strict.stdout


INVALID = {
    "right_attention:attention_backward": "Give --layer with one of attention, attention_dropout,",
    "right_attention:attention_backward --layer convolution": "unknown layer 'convolution'; choose from attention,",
    "right_attention:backwards --layer attention": "has no 'backwards'; it defines t, attention_backward",
    "right_attention.py:t.x --layer attention": "has no 't.x'",
    "nowhere.py --layer attention": "nowhere.py: no such file",
    "nowhere:f --layer attention": "cannot import nowhere: ModuleNotFoundError",
    "broken:f --layer attention": "cannot import broken: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "unfinished.py:f --layer attention": "cannot import unfinished.py: SyntaxError",
    "two.py --layer attention": "cannot choose a function in two.py: it defines a, b; pass two.py:NAME",
    "two.py:value --layer attention": "'value' in two.py must be a function, a class or a pair, got int",
    "right_attention:t --layer attention --form erf": "layer attention has no option form; its options are causal",
    "right_attention:t --layer gelu --form exact": "form must be tanh or erf, got 'exact'",
    "right_attention:t --layer block --n-head 0": "n_head must be > 0, got 0",
    "right_attention:t --layer atention": "unknown layer 'atention' (did you mean attention?); choose from",
    "right_attention:t --layer attention --seed -1": "seed must be >= 0, got -1",
    "two.py:C --layer attention": "C is a class without a forward and a backward method, and neither an nn.Module nor",
    "right_attention:t --layer attention --dtype float8": "Invalid value for '--dtype'",
    "right_attention:t --layer attention --layout columns": "layer attention has no layout 'columns'; choose from auto",
    "attention": "attention is a layer, not a function; give a function and --layer attention",
    "--layer gelu --no-causal": "layer gelu has no option causal",
    "--strict": "--strict needs a function",
    "--layer gelu --seed 4": "--seed needs a function",
    "--no-causal": "--causal needs a layer",
}


@pytest.mark.parametrize("command", INVALID)
def test_invalid_arguments_exit_with_status_2(here: Path, command: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert INVALID[command] in " ".join(result.stderr.split())


def test_a_layer_without_a_function_shows_its_contract_and_known_mistakes() -> None:
    result = run("--layer", "layer_norm")
    assert result.exit_code == 0
    assert "(x, weight, bias, dout) → dx, dweight, dbias" in result.stdout
    assert "γ outside the means" in result.stdout
    assert "no mask" in run("--layer", "attention").stdout
    assert "no mask" not in run("--layer", "attention", "--no-causal").stdout
    assert json.loads(run("--layer", "rope", "--json").stdout)["options"] == {"theta": 10000.0}


def test_help_shows_the_contract() -> None:
    text = " ".join(run("--help").stdout.replace("│", "").split())
    for layer in LAYERS:
        assert layer in text
    assert "(batch, heads, tokens, head_dim)" in text
    assert "Exit status: 0" in text


# The installation


def test_a_wrong_backward_pass_of_an_engine_is_found() -> None:
    table = {**OPS, "gelu_tanh_backward": OPS["gelu_erf_backward"]}
    engine = Engine("numpy", table, get_engine("numpy")._asarray)
    result = check_op(engine, "gelu_tanh", examples()["gelu_tanh"])
    assert not result.ok and "wrong: dx" in result.message


def test_an_engine_that_is_wrong_in_both_passes_is_found_too() -> None:
    table = {**OPS, "gelu_tanh_forward": OPS["gelu_erf_forward"], "gelu_tanh_backward": OPS["gelu_erf_backward"]}
    engine = Engine("numpy", table, get_engine("numpy")._asarray)
    result = check_op(engine, "gelu_tanh", examples()["gelu_tanh"])
    assert not result.ok and "differs from the formula" in result.message


def test_this_installation_passes_every_op_of_every_engine() -> None:
    result = run()
    assert result.exit_code == 0, result.stdout
    header = result.stdout.splitlines()[2].split()
    skipped = [engine for engine in ENGINES if f"{engine}: not checked" in result.stdout]
    assert set(header) | set(skipped) == set(ENGINES)
    for engine in header:
        for name in get_engine(engine).table.keys() & OPS.keys():  # the networks go through what fuses several
            assert f"\n  {name.removesuffix('_forward').removesuffix('_backward')} " in result.stdout
    assert "✗" not in result.stdout and "no example" not in result.stdout


def third_engine(**changes: Callable) -> Engine:
    names = ("linear_forward", "linear_backward", "relu_forward", "relu_backward")
    return Engine("third", {**{name: OPS[name] for name in names}, **changes}, get_engine("numpy")._asarray)


def test_an_engine_that_is_added_to_the_table_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(dy, saved):
        return tuple(2 * g for g in OPS["linear_backward"](dy, saved))

    def refused(x):
        raise TypeError("no float32 here")

    third = third_engine(linear_backward=twice, relu_forward=refused, new_forward=abs, new_backward=abs)

    def get(name: str) -> Engine:
        if name != "third":
            raise ValueError(f"{name} is not installed")
        return third

    monkeypatch.setattr("onfoot.engine.ENGINES", ("third", "fourth"))
    monkeypatch.setattr("onfoot.engine.get_engine", get)
    monkeypatch.setattr("onfoot.check.engines.networks", dict)
    report = installation()
    assert {r.op: r.ok for r in report.results} == {"linear": False, "new": True, "relu": False}
    json.dumps(report.to_dict(), allow_nan=False)
    text = " ".join(str(report).split())
    assert "✗ linear on third:" in text and "these are 2 times the correct values" in text
    assert "no float32 here" in text
    assert "new on third: not checked; no example" in text
    assert "fourth: not checked; fourth is not installed" in text
    assert "✗ 2 of 2 checks failed" in text


def test_a_wrong_op_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = InstallationReport([OpResult("numpy", "relu", False, 0.5, "dx is wrong")], {"torch": "not there"}, 1.0)
    monkeypatch.setattr("onfoot.check.engines.installation", lambda: bad)
    result = run()
    assert result.exit_code == 1
    assert "✗ relu on numpy:" in result.stdout and "torch: not checked; not there" in result.stdout
    assert json.loads(run("--json").stdout)["passed"] is False
