"""A module is an engine: its pairs replace ours, whole, in every network, and a bad one is named."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_pairs
import pytest
from check_cases import CASES
from own_models import GPT2, LLAMA, TOKENS, moved, plain

import onfoot
from onfoot import ops
from onfoot.engine import OPS
from onfoot.own_engine import NotWrittenError, OwnEngine, PairError, as_engine, is_own
from onfoot.own_engine.pairs import GRADIENTS, PAIRS, result_shape


def same_gradients(config: Any, engine: Any, dtype: str = "float32", **settings: Any) -> bool:
    """Whether an engine gives the loss and the gradients of "numpy", bit for bit."""
    loss, grads = moved(onfoot.create(config, 0, dtype, engine)).loss_and_grads(TOKENS, **settings)
    loss_np, grads_np = moved(onfoot.create(config, 0, dtype, "numpy")).loss_and_grads(TOKENS, **settings)
    return loss == loss_np and set(grads) == set(grads_np) and all(np.array_equal(grads[n], grads_np[n]) for n in grads)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plain_copies_of_all_pairs_give_the_same_bits(dtype: str) -> None:
    assert same_gradients(GPT2, plain_pairs, dtype)
    assert not same_gradients(GPT2, plain(gelu_tanh_backward=lambda dy, saved: dy), dtype)


def test_a_file_a_folder_a_dict_a_dict_of_pairs_and_a_list_are_engines(tmp_path: Path) -> None:
    path = tmp_path / "my_ops.py"
    path.write_text(Path(plain_pairs.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    half = {"linear": (plain_pairs.linear_forward, plain_pairs.linear_backward)}
    for source in (str(path), path, tmp_path, plain(), half, [half, plain_pairs], [plain_pairs, {}]):
        engine = as_engine(source)  # type: ignore[arg-type]
        assert isinstance(engine, OwnEngine) and "linear" in engine.theirs
        assert not engine.records and not engine.recomputes_inputs
        assert same_gradients(GPT2, source)
    assert as_engine(half).theirs == {"linear"}
    assert as_engine(str(path)).name == "my_ops.py"


def test_a_later_source_of_a_list_wins() -> None:
    wrong = {"linear": (plain_pairs.linear_forward, lambda dy, saved: (dy, dy, dy))}
    assert same_gradients(GPT2, [wrong, plain_pairs])
    with pytest.raises(PairError):
        onfoot.create(GPT2, engine=[plain_pairs, wrong]).loss_and_grads(TOKENS)


def test_load_takes_a_module(tmp_path: Path) -> None:
    moved(onfoot.create(GPT2)).save(tmp_path)
    model = onfoot.load(tmp_path, engine=plain_pairs)
    assert model.engine.theirs == {"attention", "cross_entropy", "embedding", "gelu_tanh", "layer_norm", "linear"}
    assert model.loss(TOKENS) == onfoot.load(tmp_path, engine="numpy").loss(TOKENS)


@pytest.mark.parametrize("name", ["auto", "numpy", "numba", "torch", "", "nmupy"])
def test_names_of_our_engines_and_misspelt_ones_are_not_own_engines(name: str) -> None:
    assert not is_own(name)
    if name == "nmupy":
        with pytest.raises(ValueError, match=r"unknown engine 'nmupy'; choose from auto.*my_ops.py"):
            onfoot.create(GPT2, engine=name)


def test_a_folder_or_a_module_in_the_current_directory_is_an_engine_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_own("my-course") and not is_own("own_module_here")
    (tmp_path / "my-course").mkdir()
    (tmp_path / "own_module_here.py").write_text(Path(plain_pairs.__file__).read_text(encoding="utf-8"), "utf-8")
    assert is_own("my-course") and is_own("own_module_here")
    with pytest.raises(ValueError, match="my-course has no Python files"):
        onfoot.create(GPT2, engine="my-course")
    engine = as_engine("own_module_here")
    assert engine.name == "module own_module_here" and "linear" in engine.theirs


# --- what each network runs on ---


def test_no_network_goes_around_a_users_linear_layer() -> None:
    """A frozen layer, a LoRA layer, generation and the loss alone call the user's linear, too."""
    calls = {"forward": 0, "backward": 0}

    def forward(x: Any, weight: Any, bias: Any = None) -> Any:
        calls["forward"] += 1
        return plain_pairs.linear_forward(x, weight, bias)

    def backward(dy: Any, saved: Any) -> Any:
        calls["backward"] += 1
        return plain_pairs.linear_backward(dy, saved)

    def counted(work: Callable[[], Any]) -> tuple[int, int]:
        calls.update(forward=0, backward=0)
        work()
        return calls["forward"], calls["backward"]

    layers = 4 * GPT2.n_layer + 1
    model = onfoot.create(GPT2, engine={"linear": (forward, backward)})
    assert counted(lambda: model.loss_and_grads(TOKENS)) == (layers, layers)
    assert counted(lambda: model.loss(TOKENS)) == (layers, 0)
    assert counted(lambda: model.generate(TOKENS[:1, :3], 1)) == (layers, 0)
    model.add_lora(r=2)
    assert counted(lambda: model.loss_and_grads(TOKENS)) == (layers, layers)
    llama = onfoot.create(LLAMA, engine={"linear": (forward, backward)})
    assert counted(lambda: llama.loss_and_grads(TOKENS)) == (7 * 2 + 1, 7 * 2 + 1)


@pytest.mark.parametrize("targets", [None, ["c_attn.q", "c_attn.v"]])
def test_lora_on_a_users_pairs_gives_the_same_bits(targets: list[str] | None) -> None:
    results = []
    for engine in (plain_pairs, "numpy"):
        model = moved(onfoot.create(GPT2, engine=engine))
        model.add_lora(r=2, targets=targets, dropout=0.5)
        results.append(moved(model, 2).loss_and_grads(TOKENS, dropout_seed=3))
    (loss, grads), (loss_np, grads_np) = results
    assert loss == loss_np and len(grads) > 0 and all(np.array_equal(grads[n], grads_np[n]) for n in grads_np)


def test_grouped_queries_run_on_a_users_attention() -> None:
    calls = []

    def forward(q: Any, k: Any, v: Any) -> Any:
        calls.append(k.shape)
        return plain_pairs.attention_forward(q, k, v)

    model = moved(onfoot.create(LLAMA, 0, "float64", {"attention": (forward, plain_pairs.attention_backward)}))
    ours = moved(onfoot.create(LLAMA, 0, "float64", "numpy"))
    (loss, grads), (loss_np, grads_np) = model.loss_and_grads(TOKENS), ours.loss_and_grads(TOKENS)
    assert calls == [(3, 4, 12, 2)] * 2  # every query head has its own keys
    assert loss == pytest.approx(loss_np, rel=1e-14)
    for name, grad in grads_np.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-10, atol=1e-14)


def test_pairs_used_says_which_pairs_a_network_calls_and_whose_they_are() -> None:
    half = {"linear": (plain_pairs.linear_forward, plain_pairs.linear_backward), "swiglu": OPS_PAIR("swiglu")}
    assert onfoot.create(GPT2, engine=half).pairs_used() == {
        "attention": False, "cross_entropy": False, "embedding": False, "gelu_tanh": False, "layer_norm": False,
        "linear": True,
    }  # fmt: skip
    model = onfoot.create(GPT2, engine=plain_pairs)
    assert all(model.pairs_used().values())
    model.add_lora(r=1)
    assert model.pairs_used()["lora"] is False and model.pairs_used()["linear"] is True
    used = onfoot.create(LLAMA, engine="numpy").pairs_used()
    assert set(used) == {"attention", "cross_entropy", "embedding", "linear", "rms_norm", "rope", "swiglu"}
    assert "dropout" in onfoot.create(replace(GPT2, resid_pdrop=0.1), engine=plain_pairs).pairs_used()


def OPS_PAIR(name: str) -> tuple[Any, Any]:  # noqa: N802
    """Our pair in other functions, which are therefore a user's."""
    return tuple(lambda *a, half=half: OPS[f"{name}_{half}"](*a) for half in ("forward", "backward"))  # type: ignore[return-value]


def test_the_table_of_gradients_is_that_of_the_formulas() -> None:
    assert {f"{pair}_{half}" for pair in PAIRS for half in ("forward", "backward")} == set(OPS)
    for pair, given in CASES.items():
        y, saved = OPS[f"{pair}_forward"](**given)
        grads = OPS[f"{pair}_backward"](1.0 if pair == "cross_entropy" else np.ones_like(y), saved)
        shapes = [g.shape for g in (grads if isinstance(grads, tuple) else (grads,))]
        assert shapes == [given[name].shape for name in GRADIENTS[pair]], pair
        assert np.shape(y) == result_shape(pair, given), pair
    assert set(CASES) == set(GRADIENTS)


# --- arguments ---


def test_arguments_that_a_function_does_not_take_are_left_out_at_their_defaults() -> None:
    """`attention_forward(q, k, v)` has no causal, start and keep, and no layer needs them here."""
    assert same_gradients(GPT2, plain_pairs)
    for config, settings, argument in (
        (GPT2, {"segments": np.repeat([[0] * 5 + [1] * 7], 3, axis=0)}, "start"),
        (replace(GPT2, attn_pdrop=0.5), {"dropout_seed": 1}, "keep"),
        (replace(GPT2, causal=False), {"targets": TOKENS}, "causal"),
    ):
        with pytest.raises(PairError, match=f"your attention_forward does not take {argument}, which this model needs"):
            onfoot.create(config, engine=plain_pairs).loss_and_grads(TOKENS, **settings)  # type: ignore[arg-type]


def test_other_names_for_the_arguments_are_fine() -> None:
    def layer_norm_forward(h: Any, gamma: Any, beta: Any, epsilon: float = 1e-5) -> Any:
        return plain_pairs.layer_norm_forward(h, gamma, beta, epsilon)

    def linear_forward(inputs: Any, matrix: Any, /, *rest: Any) -> Any:
        return plain_pairs.linear_forward(inputs, matrix, *rest)

    def linear_backward(upstream: Any, cache: Any) -> Any:
        return list(plain_pairs.linear_backward(upstream, cache))

    functions = plain(
        layer_norm_forward=layer_norm_forward, linear_forward=linear_forward, linear_backward=linear_backward
    )
    assert same_gradients(replace(GPT2, layer_norm_epsilon=0.1), functions)


def test_a_function_with_too_few_arguments_is_refused_before_any_step() -> None:
    with pytest.raises(
        PairError, match=r"your linear_forward takes \(x\); an engine calls it with \(x, weight, bias\)"
    ):
        onfoot.create(GPT2, engine=plain(linear_forward=lambda x: (x, None)))


def test_float64_results_of_a_float32_model_are_rounded() -> None:
    def backward(dy: Any, saved: Any) -> Any:
        return plain_pairs.gelu_tanh_backward(dy, saved) * np.float64(1)

    _, grads = onfoot.create(GPT2, engine=plain(gelu_tanh_backward=backward)).loss_and_grads(TOKENS)
    assert {g.dtype for g in grads.values()} == {np.dtype("float32")}


# --- bad pairs and sources ---


BAD: list[tuple[str, Callable[..., Any], str]] = [
    ("linear_backward", lambda dy, s: None, "returns None; it must return dx, dweight and dbias"),
    ("linear_backward", lambda dy, s: (None, None, None), "returns None for dx and dweight; has it been written yet"),
    ("linear_backward", lambda dy, s: (dy, dy), "must return dx, dweight and dbias, got 2 values"),
    ("linear_backward", lambda dy, s: (s[0], s[1].T, None), r"has shape \(17, 8\); weight has shape \(8, 17\)"),
    ("linear_backward", lambda dy, s: (s[0] + np.nan, s[1], None), "dx of your .* has 288 of 288 entries that are nan"),
    (
        "linear_backward",
        lambda dy, s: (s[0] / [], s[1], None),
        r"raises ValueError: .*test_own_pairs.py, line \d+\), call",
    ),
    ("linear_backward", lambda dy, s: ("a", s[1], None), "must be an array of numbers, got a str"),
    ("linear_forward", lambda x, weight, bias=None: x @ weight, "must return y and what its backward needs, got a nda"),
    ("linear_forward", lambda x, weight, bias=None: (x, 0), r"has shape \(3, 12, 8\) instead of \(3, 12, 24\)"),
    ("cross_entropy_backward", lambda d, s: np.zeros(3), r"dlogits of your .* has shape \(3,\); logits has shape"),
    ("embedding_backward", lambda d, s: None, "returns None; it must return dweight"),
    ("cross_entropy_forward", lambda a, t, n: (np.zeros(2), 0), r"has shape \(2,\) instead of \(\)"),
]


@pytest.mark.parametrize(("name", "function", "message"), BAD)
def test_a_bad_result_is_an_error_at_the_first_step(name: str, function: Callable[..., Any], message: str) -> None:
    with pytest.raises(PairError, match=message) as caught:
        onfoot.create(GPT2, engine=plain(**{name: function})).loss_and_grads(TOKENS)
    assert f"your {name}" in str(caught.value)
    assert isinstance(caught.value, NotWrittenError) == ("returns None" in str(caught.value))


def test_numbers_that_overflow_in_our_formula_too_are_not_the_users_fault() -> None:
    model = onfoot.create(GPT2, engine=plain_pairs)
    model.params["transformer.ln_f.weight"] *= np.float32(3e38)
    model.params["transformer.wte.weight"] *= np.float32(1e3)
    with np.errstate(all="ignore"):
        loss, _ = model.loss_and_grads(TOKENS)
    assert not np.isfinite(loss)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"linear_forward": ops.head_forward}, "has linear_forward without linear_backward"),
        ({"linaer": (len, len)}, "has linaer_forward, which no engine knows; the pairs are attention, batch_norm"),
        ({}, "defines no pair; a pair is NAME_forward and NAME_backward"),
        ([], "defines no pair"),
        ({"linear": (3, 4)}, "has linear_forward, which no engine knows|not a Python function"),
        (types.ModuleType("empty"), "module empty defines no pair"),
    ],
)
def test_a_source_without_whole_known_pairs_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onfoot.create(GPT2, engine=source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def linear_forward(x):\n    return (x\n", r"my_ops.py, line 2: '\(' was never closed"),
        ("import nothing_of_that_name\n", "cannot import .*my_ops.py: ModuleNotFoundError"),
        ("x = 1\nraise SystemExit(3)\n", r"cannot import .*my_ops.py: SystemExit: 3 \(line 2 of .*my_ops.py\)"),
        ("def softmax2_backward(dy, s): pass\n", "has softmax2_backward, which no engine knows; .* underscore"),
        ("from onfoot.ops import linear_forward, linear_backward\n", "defines no pair"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        onfoot.create(GPT2, engine=str(tmp_path / "my_ops.py"))
    with pytest.raises(ValueError, match="no such file"):
        onfoot.create(GPT2, engine=str(tmp_path / "other.py"))


def test_files_that_import_each_other_are_read_from_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders with files of the same names do not mix, a changed file is read again, and a program's stays."""
    programs = types.ModuleType("own_parts")
    monkeypatch.setitem(sys.modules, "own_parts", programs)
    source = "from own_parts import SCALE\n\ndef relu_forward(x):\n    return x * SCALE, None\n\n"
    source += "def relu_backward(dy, saved):\n    return dy * SCALE\n"
    engines = []
    for scale in (2, 3):
        folder = tmp_path / str(scale)
        folder.mkdir()
        (folder / "own_parts.py").write_text(f"SCALE = {scale}\n", encoding="utf-8")
        (folder / "my_ops.py").write_text(source, encoding="utf-8")
        engines.append(as_engine(str(folder / "my_ops.py")))
        assert isinstance(engines[-1], OwnEngine)
        assert sorted(Path(f).name for f in engines[-1].files) == ["my_ops.py", "own_parts.py"]
    (tmp_path / "3" / "own_parts.py").write_text("SCALE = 50\n", encoding="utf-8")
    engines.append(as_engine(str(tmp_path / "3" / "my_ops.py")))
    assert [float(engine.relu_forward(np.ones(1))[0][0]) for engine in engines] == [2, 3, 50]
    assert sys.modules["own_parts"] is programs


def test_what_reads_our_saved_arrays_refuses_a_users_pairs() -> None:
    model = onfoot.create(GPT2, engine=plain_pairs)
    direction = {name: np.ones_like(p) for name, p in model.params.items()}
    with pytest.raises(ValueError, match=r"Hessian needs onfoot's own formulas.*numpy"):
        model.hvp(TOKENS, direction=direction)
    with pytest.raises(ValueError, match="the gradient of each example needs onfoot's own formulas"):
        model.example_norms(TOKENS)
    with pytest.raises(ValueError, match="quantised weights need one of onfoot's engines"):
        onfoot.create(replace(GPT2, n_embd=32, n_inner=32, vocab_size=32), engine=plain_pairs).quantize()
