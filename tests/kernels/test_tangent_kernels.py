"""The kernels of tangents against their formulas in float64, on any shape and number of threads; recorded passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onfoot
from onfoot import kernels
from onfoot.kernels import self_test
from onfoot.models import recorded_tangents
from onfoot.models.dual import KINDS
from onfoot.models.model import Model
from onfoot.models.second_order import tangent_pass
from onfoot.recording import pool
from oracles import assert_close, scrambled

pytest.importorskip("numba")
TABLE = kernels.table()


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = pool.threads()
    onfoot.set_threads(request.param)
    yield request.param
    onfoot.set_threads(before)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def check(name: str, args: tuple[Any, ...], moving: str, rng: np.random.Generator) -> None:
    for what, got, expected in self_test.along(TABLE, rng, name, args, moving):
        assert got.dtype == np.float32
        assert_close(got, expected, 5e-6, what)


sizes = st.integers(1, 70)


@given(st.integers(1, 9), sizes, sizes, sizes, st.booleans(), st.integers(0, 9))
def test_linear_layers(b: int, t: int, inside: int, outside: int, transposed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, bias = normal(rng, b, t, inside), normal(rng, outside)
    w = normal(rng, outside, inside).T if transposed else normal(rng, inside, outside)
    check("linear", (x, w, bias), "0 1 2", rng)
    check("frozen_linear", (x, w, bias), "0 - -", rng)
    low = normal(rng, inside, 3), normal(rng, 3, outside)
    check("lora_linear", (x, w, bias, *low, 0.7, None), "0 - - 3 4", rng)


@given(sizes, st.integers(2, 200), st.integers(0, 9))
def test_norms_and_activations(n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w, b = normal(rng, n, width), normal(rng, width), normal(rng, width)
    check("layer_norm", (x, w, b, 1e-2), "0 1 2", rng)
    check("rms_norm", (x, w, 1e-2), "0 1", rng)
    for name in ("gelu_tanh", "gelu_erf", "relu"):
        check(name, (2 * x,), "0", rng)
    check("swiglu", (2 * x, normal(rng, n, width)), "0 1", rng)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    sizes,
    st.integers(0, 20),
    st.integers(1, 40),
    st.booleans(),
)
def test_attention(batch: int, heads: int, group: int, t: int, more: int, width: int, causal: bool) -> None:
    rng = np.random.default_rng(t)
    q, k = normal(rng, batch, heads * group, t, width), normal(rng, batch, heads, t + more, width)
    v = normal(rng, batch, heads, t + more, 2 * width - 1)
    start = rng.integers(0, np.arange(t) + more + 1, (batch, 1, t))
    for packed in (None, start):
        check("grouped_query", (q, k, v, causal, packed), "0 1 2", rng)
    if group == 1:
        check("attention", (q, k, v, causal, start), "0 1 2", rng)


def test_any_number_of_threads_agrees(threads: int) -> None:
    rng = np.random.default_rng(threads)
    for file in kernels.TANGENTS:
        for what, got, expected in self_test.COMPARISONS[file](TABLE, rng):
            assert_close(got, expected, 5e-6, what)


GPT2 = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=24, n_positions=16, vocab_size=31, resid_pdrop=0.2)
LLAMA = onfoot.LlamaConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SEGMENTS = np.repeat([[0] * 4 + [1] * 6 + [2] * 3], 3, axis=0)


def model(config: Any, lora: bool, dtype: str = "float32", engine: str = "numba") -> Model:
    made = Model(config, scrambled(onfoot.create(config).params, 1), dtype, engine)
    if lora:
        made.add_lora(r=3)
        rng = np.random.default_rng(2)
        for name in sorted(made.trainable):
            made.params[name] = rng.normal(0, 0.3, made.params[name].shape)
    return made


@pytest.mark.parametrize("policy", ["plain", "packed", "dropout", "recomputed", "some targets"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_recorded_passes_equal_the_formulas_and_repeat_their_bits(config: Any, lora: bool, policy: str) -> None:
    fast, exact = model(config, lora), model(config, lora, "float64", "numpy")
    fast.recompute = policy == "recomputed"
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, 31, (2, 3, 13))
    targets[:, -1] = -100
    targets[:, :9] = -100 if policy == "some targets" else targets[:, :9]
    more: dict[str, Any] = {"segments": SEGMENTS} if policy == "packed" else {}
    more |= {"dropout_seed": 5} if policy == "dropout" else {}
    before = len(fast._steps)  # type: ignore[arg-type]
    for kind in KINDS:
        for seed in (4, 5):  # the second direction is replayed
            draw = np.random.default_rng(seed)
            u = {n: draw.normal(size=fast.params[n].shape) for n in sorted(fast.trainable)}
            got = tangent_pass(fast, tokens, targets, u, kind=kind, **more)
            again = tangent_pass(fast, tokens, targets, u, kind=kind, **more)
            expected = tangent_pass(exact, tokens, targets, u, kind=kind, **more)
            assert got.loss == again.loss and got.loss == pytest.approx(expected.loss, rel=1e-5)
            assert (got.token_dots == again.token_dots).all()
            only = fast.hvp(tokens, targets, u, kind=kind, **more)  # without the gradients themselves
            assert all((only[name] == x).all() for name, x in got.hvp.items())
            assert_close(got.token_dots, expected.token_dots, 1e-4)
            assert set(got.hvp) == set(expected.hvp) == fast.trainable and set(got.grads) == set(expected.grads)
            scale = np.sqrt(sum((x**2).sum() for x in expected.hvp.values()))
            for name, x in expected.hvp.items():
                assert (got.hvp[name] == again.hvp[name]).all()
                assert np.linalg.norm(got.hvp[name] - x) <= 1e-4 * scale, name
            dots = fast.example_dots(tokens, targets, u, **more)
            assert_close(dots, exact.example_dots(tokens, targets, u, **more), 1e-4)
    assert len(fast._steps._directions) == len(fast.trainable)  # type: ignore[union-attr]  # one copy for all of them
    assert len(fast._steps) == before + 5  # type: ignore[arg-type]  # Hessian, Gauss–Newton, both without gradients, dots


def test_one_thread_gives_the_bits_of_the_pass_without_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = pool.threads()
    onfoot.set_threads(1)
    try:
        for config in (GPT2, LLAMA):
            made = model(config, False)
            tokens = np.random.default_rng(0).integers(0, 31, (2, 11))
            u = {n: np.random.default_rng(1).normal(size=made.params[n].shape) for n in made.trainable}
            recorded = made.hvp(tokens, None, u)
            with monkeypatch.context() as patch:
                patch.setattr("onfoot.models.second_order.recorded_tangents", lambda *args: None)
                plain = made.hvp(tokens, None, u)
            assert all((recorded[n] == plain[n]).all() for n in plain)
    finally:
        onfoot.set_threads(threads)


def test_a_new_parameter_array_is_recorded_anew() -> None:
    made = model(GPT2, False)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 11))
    u = {n: np.ones(made.params[n].shape) for n in made.trainable}
    first = made.hvp(tokens, None, u)
    for name in made.trainable:
        made.params[name] = made.params[name] * 1.5
    other = made.hvp(tokens, None, u)
    exact = Model(GPT2, {n: np.asarray(p) for n, p in made.params.items()}, "float64", "numpy").hvp(tokens, None, u)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert_close(other[name], exact[name], 1e-4)
    assert np.abs(other[name] - first[name]).max() > 1e-2 * np.abs(first[name]).max()


def test_without_the_kernels_of_tangents_the_formulas_are_used() -> None:
    made, exact = model(LLAMA, False), model(LLAMA, False, "float64", "numpy")
    made.engine.table = {n: f for n, f in made.engine.table.items() if "tangent" not in n}
    tokens = np.random.default_rng(0).integers(0, 31, (2, 11))
    u = {n: np.random.default_rng(1).normal(size=made.params[n].shape) for n in made.trainable}
    expected = exact.hvp(tokens, None, u)
    for name, got in made.hvp(tokens, None, u).items():
        assert_close(got, expected[name], 1e-4, name)
    assert recorded_tangents.recorded_tangents(exact, None, {}, "hessian", True, True) is None  # type: ignore[arg-type]
