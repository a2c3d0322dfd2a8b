"""Whole networks on the kernels, in float32, against the formulas in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onfoot
from campaigns.engines import sensitivity
from llama_oracle import random_config, scrambled_llama
from onfoot.models.model import Model

pytest.importorskip("numba")
CLOSE = 2e-6
CONFIG = onfoot.GPT2Config(n_layer=2, n_head=3, n_embd=21, n_positions=40, vocab_size=53)


def away_from_start(
    config: onfoot.GPT2Config, seed: int = 0, engine: str = "numba", **lora: Any
) -> tuple[Model, Model]:
    """The same weights in float32 on an engine and in float64 on the formulas; norms not 1, biases not 0."""
    ours, truth = onfoot.create(config, seed, engine=engine), onfoot.create(config, seed, "float64", "numpy")
    for model in (ours, truth):
        if lora:
            model.add_lora(**lora)
        rng = np.random.default_rng(seed)
        for p in model.params.values():
            p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    for name, p in truth.params.items():
        p[...] = ours.params[name]
    return ours, truth


def assert_same_gradients(
    ours: Model, truth: Model, tokens: np.ndarray, targets: Any = None, close: float = CLOSE, **more: Any
) -> None:
    loss, grads = ours.loss_and_grads(tokens, targets, **more)
    right, exact = truth.loss_and_grads(tokens, targets, **more)
    assert loss == pytest.approx(right, rel=1e-6)
    assert grads.keys() == exact.keys() == ours.trainable
    for name, g in grads.items():
        assert g.dtype == np.float32
        assert np.linalg.norm(g - exact[name]) <= close * max(np.linalg.norm(exact[name]), 1e-3), name
    assert ours.loss(tokens, targets, segments=more.get("segments")) == pytest.approx(right, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 4),
    width=st.integers(1, 9),
    key_width=st.one_of(st.none(), st.integers(1, 9)),
    vocabulary=st.integers(2, 70),
    tied=st.booleans(),
    bias=st.booleans(),
    causal=st.booleans(),
    activation=st.sampled_from(["gelu_new", "gelu", "relu"]),
    shape=st.tuples(st.integers(1, 4), st.integers(2, 40)),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_gradient_of_any_network_is_that_of_the_formulas(
    heads: int,
    width: int,
    key_width: int | None,
    vocabulary: int,
    tied: bool,
    bias: bool,
    causal: bool,
    activation: str,
    shape: tuple[int, int],
    seed: int,
) -> None:
    config = onfoot.GPT2Config(
        n_layer=2, n_head=heads, n_embd=4 * heads * width, n_positions=40, vocab_size=vocabulary, qk_head_dim=key_width,
        tie_word_embeddings=tied, lm_head_bias=bias and not tied, causal=causal, activation_function=activation,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    tokens, targets = (rng.integers(0, vocabulary, shape) for _ in range(2))
    targets[:, 1:][rng.random((shape[0], shape[1] - 1)) < 0.2] = -100
    ours, truth = away_from_start(config, seed)
    loss, grads = ours.loss_and_grads(tokens, targets)
    right, exact = truth.loss_and_grads(tokens, targets)
    rounding = sensitivity(truth, {"tokens": tokens, "targets": targets}, exact, rng)  # of the parameters alone
    assert loss == pytest.approx(right, rel=1e-6) and ours.loss(tokens, targets) == pytest.approx(right, rel=1e-6)
    assert grads.keys() == exact.keys() == ours.trainable
    for name, g in grads.items():
        most = CLOSE * max(np.linalg.norm(exact[name]), 1e-3)
        assert np.linalg.norm(g - exact[name]) <= max(most, 4 * rounding[name]), name


@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], ["c_attn.q", "c_attn.v"], ["lm_head", "c_fc"]])
def test_adapters_have_the_gradients_of_the_formulas(targets: list[str]) -> None:
    ours, truth = away_from_start(CONFIG, r=3, alpha=6, targets=targets)
    tokens = np.random.default_rng(0).integers(0, 53, (3, 39))
    assert_same_gradients(ours, truth, tokens)


def test_dropout_and_packed_examples_have_the_gradients_of_the_formulas() -> None:
    config = replace(CONFIG, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 53, (3, 40))
    segments = np.sort(rng.integers(0, 4, (3, 40)), axis=1)
    ours, truth = away_from_start(config)
    assert_same_gradients(ours, truth, tokens, segments=segments)
    _, grads = ours.loss_and_grads(tokens, segments=segments, dropout_seed=7)
    _, exact = truth.loss_and_grads(tokens, segments=segments, dropout_seed=7)
    for name, g in grads.items():
        assert np.linalg.norm(g - exact[name]) <= 4e-6 * np.linalg.norm(exact[name]), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_llama_has_the_gradients_of_the_formulas(seed: int, kind: str) -> None:
    config = replace(random_config(seed, 1 + seed % 3, tied=bool(seed % 2), kind=kind), attention_dropout=0.2)
    ours, truth = (scrambled_llama(config, seed, *of) for of in (("float32", "numba"), ("float64", "numpy")))
    for name, p in truth.params.items():
        p[...] = ours.params[name]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, min(config.n_positions, 13)))
    assert_same_gradients(ours, truth, tokens, close=1e-5)  # weights of 0.3 make rounding grow from block to block
    (loss, grads), (right, exact) = (model.loss_and_grads(tokens, dropout_seed=seed) for model in (ours, truth))
    assert loss == pytest.approx(right, rel=1e-6) and loss != ours.loss(tokens)
    for name, g in grads.items():
        assert np.linalg.norm(g - exact[name]) <= 1e-5 * max(np.linalg.norm(exact[name]), 1e-3), name


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_recomputed_blocks_give_the_same_bits(engine: str) -> None:
    config = replace(CONFIG, resid_pdrop=0.1)
    model = away_from_start(config, engine=engine)[0]
    tokens = np.random.default_rng(0).integers(0, 53, (3, 40))
    loss, grads = model.loss_and_grads(tokens, dropout_seed=1)
    model.recompute = True
    again, recomputed = model.loss_and_grads(tokens, dropout_seed=1)
    assert loss == again and grads.keys() == recomputed.keys()
    assert all((grads[name] == recomputed[name]).all() for name in grads)


def test_two_runs_have_the_same_bits() -> None:
    """In two processes, after three steps: the same threads give the same sums."""
    code = (
        "import onfoot, numpy as np, zlib\n"
        "c = onfoot.GPT2Config(n_layer=2, n_head=3, n_embd=36, n_positions=40, vocab_size=53)\n"
        "m = onfoot.create(c, 0, engine='numba'); o = onfoot.AdamW(m)\n"
        "t = np.random.default_rng(0).integers(0, 53, (5, 40))\n"
        "print([m.train_step(o, t) for _ in range(3)], zlib.crc32(b''.join(p.tobytes() for p in m.params.values())))"
    )
    outs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outs) == 1 and outs.pop().strip()


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_step_in_one_call_is_the_gradients_and_the_update(engine: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 53, (3, 40))
    one, two = (away_from_start(CONFIG, engine=engine)[0] for _ in range(2))
    first, second = onfoot.AdamW(one), onfoot.AdamW(two)
    for _ in range(3):
        loss = one.train_step(first, tokens)
        right, grads = two.loss_and_grads(tokens)
        second.step(grads)
        assert loss == right
    assert all((p == two.params[name]).all() for name, p in one.params.items())


def test_a_traced_pass_has_the_same_loss_and_gradients() -> None:
    ours, _ = away_from_start(CONFIG)
    tokens = np.random.default_rng(0).integers(0, 53, (2, 40))
    trace, (loss, grads) = ours.trace(tokens), ours.loss_and_grads(tokens)
    assert trace.loss == pytest.approx(loss, rel=1e-6)
    for name, g in grads.items():
        assert np.linalg.norm(trace.grads[name] - g) <= 2 * CLOSE * max(np.linalg.norm(g), 1e-3)


def test_generation_with_a_cache_equals_generation_without() -> None:
    ours, truth = away_from_start(CONFIG)
    prompts = [np.arange(3), np.arange(11) % 53]
    assert all(
        (a == b).all()
        for a, b in zip(
            ours.generate(prompts, 20, temperature=0), truth.generate(prompts, 20, temperature=0), strict=True
        )
    )
