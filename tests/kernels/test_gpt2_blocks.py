"""A small model's blocks in one, against the formulas block by block in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import onfoot
from onfoot.kernels import pool
from onfoot.models import gpt2
from onfoot.models.layout import Layout
from onfoot.models.model import Model

pytest.importorskip("numba")
CLOSE = 2e-6
SHAPES = [  # sequences, tokens, heads, width of a head, of a key, inside the MLP
    (1, 1, 1, 1, 1, 1),
    (2, 3, 1, 7, 5, 9),
    (7, 33, 3, 5, 2, 23),  # rows of a thread that are no multiple of anything
    (2, 130, 2, 8, None, None),  # more rows than a chunk, more keys than a block
    (20, 21, 4, 16, None, 100),
    (3, 400, 1, 6, 11, 40),  # deeper than one packed block on the way to the weights
    (2, 9, 2, 60, None, 900),  # on the way through the MLP too
]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = pool.threads()
    pool.set_threads(request.param)
    yield request.param
    pool.set_threads(before)


def models(heads: int, width: int, key: int | None, inside: int | None, causal: bool = True) -> tuple[Model, Model]:
    """The same weights, away from their first values, in float32 on the kernels and in float64 on the formulas."""
    config = onfoot.GPT2Config(
        n_layer=3,
        n_head=heads,
        n_embd=heads * width,
        n_positions=400,
        vocab_size=11,
        qk_head_dim=key,
        n_inner=inside,
        causal=causal,
    )
    ours = onfoot.create(config, 0, engine="numba")
    rng = np.random.default_rng(1)
    for p in ours.params.values():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    return ours, Model(config, ours.params, "float64", "numpy")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_every_gradient_are_those_of_the_formulas(
    shape: tuple[int, int, int, int, int | None, int | None], causal: bool, threads: int
) -> None:
    sequences, tokens, *sizes = shape
    ours, truth = models(*sizes, causal)
    names = gpt2._block_params(3)
    rng = np.random.default_rng(2)
    x, up = (rng.standard_normal((sequences, tokens, ours.config.n_embd)).astype(np.float32) for _ in range(2))
    y, saved = ours.engine.gpt2_blocks_forward(
        x, [ours.params[name] for name in names], ours.config.n_head, ours.config.layer_norm_epsilon, causal
    )
    dx, grads = ours.engine.gpt2_blocks_backward(up, saved)

    run, layout = truth.new_run(), Layout(np.arange(tokens))
    exact, blocks = gpt2._blocks_forward(run, truth.config, x.astype(np.float64), layout, None)
    exact_dx = gpt2._blocks_backward(run, truth.config, up.astype(np.float64), blocks)
    assert np.linalg.norm(y - exact) <= CLOSE * np.linalg.norm(exact)
    assert np.linalg.norm(dx - exact_dx) <= CLOSE * np.linalg.norm(exact_dx)
    for name, grad in zip(names, grads, strict=True):
        right = run.grads[name]
        if name.endswith("c_attn.bias"):
            grad[gpt2._dead(ours.config)] = 0  # the keys' part is 0 but for rounding
        assert grad.shape == right.shape
        assert np.linalg.norm(grad - right) <= CLOSE * max(np.linalg.norm(right), 1e-3), name


def test_the_same_bits_twice(threads: int) -> None:
    ours, _ = models(3, 8, None, None)
    tokens = np.random.default_rng(0).integers(0, 11, (6, 50))
    (loss, grads), (again, twice) = ours.loss_and_grads(tokens), ours.loss_and_grads(tokens)
    assert loss == again and all((grads[name] == twice[name]).all() for name in grads)


def in_one(model: Model, tokens: np.ndarray, dropout_seed: int | None = None) -> bool:
    """Whether a pass goes through the blocks in one."""
    run = model.new_run(dropout_seed=dropout_seed)
    saved = gpt2.features_forward(run, model.config, tokens, Layout(np.arange(tokens.shape[1])))[1]
    return isinstance(saved[3], gpt2.InOne)


def test_who_goes_through_in_one() -> None:
    before = pool.threads()
    pool.set_threads(2)
    try:
        ours, truth = models(2, 8, None, None)
        tokens = np.zeros((4, 9), np.int64)
        assert in_one(ours, tokens) and not in_one(truth, tokens)
        assert not in_one(ours, tokens[:3])  # a thread would wait for the other
        assert in_one(ours, tokens, dropout_seed=1)  # a seed, but nothing is dropped
        ours.config = replace(ours.config, resid_pdrop=0.1)
        assert in_one(ours, tokens) and not in_one(ours, tokens, dropout_seed=1)
        ours.trainable.remove("transformer.h.1.ln_2.bias")
        assert not in_one(ours, tokens)
        ours.trainable.add("transformer.h.1.ln_2.bias")
        ours.recompute = True
        assert not in_one(ours, tokens)
        ours.recompute = False
        ours.add_lora(r=2)
        assert not in_one(ours, tokens)
        wide = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=512, n_positions=9, vocab_size=11))
        assert not in_one(wide, tokens)  # each thread would pack three million numbers
    finally:
        pool.set_threads(before)
