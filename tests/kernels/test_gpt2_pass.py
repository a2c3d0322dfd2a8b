"""A small model's whole pass in one, against the formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import onfoot
from onfoot.kernels import pool
from onfoot.models import gpt2
from onfoot.models.layout import Layout
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE

pytest.importorskip("numba")
CLOSE = 2e-6
VOCABULARY = 37
SHAPES = [  # sequences, tokens, heads, width of a head, of a key, inside the MLP
    (1, 1, 1, 3, 1, 1),
    (6, 3, 1, 7, 5, 9),
    (6, 33, 3, 5, 2, 23),  # rows of a thread that are no multiple of anything
    (3, 7, 1, 41, 3, None),
    (6, 130, 2, 8, None, None),  # more rows than a chunk, more keys than a block
    (20, 21, 4, 16, None, 100),
    (6, 400, 1, 6, 11, 40),  # deeper than one packed block on the way to the weights
    (6, 9, 2, 60, None, 900),  # on the way through the MLP too
    (1, 1023, 2, 9, None, None),
]


def models(
    heads: int, width: int, key: int | None, inside: int | None, causal: bool = True, tied: bool = True
) -> tuple[Model, Model]:
    """The same weights, away from their first values, in float32 on the kernels and in float64 on the formulas."""
    config = onfoot.GPT2Config(
        n_layer=3,
        n_head=heads,
        n_embd=heads * width,
        n_positions=1024,
        vocab_size=VOCABULARY,
        qk_head_dim=key,
        n_inner=inside,
        causal=causal,
        tie_word_embeddings=tied,
    )
    ours = onfoot.create(config, 0, engine="numba")
    rng = np.random.default_rng(1)
    for p in ours.params.values():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    return ours, Model(config, ours.params, "float64", "numpy")


def in_one(model: Model, tokens: np.ndarray, targets: np.ndarray, dropout_seed: int | None = None) -> float | None:
    """The loss, where a pass is done in one."""
    run = model.new_run(dropout_seed=dropout_seed)
    layout = Layout(np.arange(tokens.shape[1]))
    return gpt2.pass_in_one(run, model.config, tokens, targets, layout, 1.0)


@pytest.mark.parametrize(("causal", "tied"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_loss_and_every_gradient_are_those_of_the_formulas(
    shape: tuple[int, int, int, int, int | None, int | None], causal: bool, tied: bool, threads: int
) -> None:
    sequences, n, *sizes = shape
    ours, truth = models(*sizes, causal, tied)
    rng = np.random.default_rng(2)
    tokens, targets = (rng.integers(0, VOCABULARY, (sequences, n)) for _ in range(2))
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    targets[-1, -1] = 5
    if sequences % threads == 0:
        assert in_one(ours, tokens, targets) is not None
    loss, grads = ours.loss_and_grads(tokens, targets)
    exact, right = truth.loss_and_grads(tokens, targets)
    assert abs(loss - exact) <= CLOSE * exact
    assert grads.keys() == right.keys()
    for name, grad in grads.items():
        assert grad.shape == right[name].shape
        size = max(np.linalg.norm(right[name]), 1e-3)  # of a gradient that all but vanishes, rounding is left
        assert np.linalg.norm(grad - right[name]) <= CLOSE * size, name
        if name.endswith("c_attn.bias"):
            assert not grad[gpt2._dead(ours.config)].any()  # exactly 0, as everywhere


def test_the_same_bits_twice(threads: int) -> None:
    ours, _ = models(3, 8, None, None)
    tokens = np.random.default_rng(0).integers(0, 11, (6, 50))
    (loss, grads), (again, twice) = ours.loss_and_grads(tokens), ours.loss_and_grads(tokens)
    assert loss == again and all((grads[name] == twice[name]).all() for name in grads)


def test_gradients_outlive_the_next_pass() -> None:
    ours, _ = models(2, 8, None, None)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 9))
    _, grads = ours.loss_and_grads(tokens)
    before = {name: grad.copy() for name, grad in grads.items()}
    ours.loss_and_grads(tokens[::-1])
    assert all((grads[name] == before[name]).all() for name in grads)


def test_where_nothing_counts_every_gradient_is_zero() -> None:
    ours, _ = models(2, 8, None, None)
    tokens = np.zeros((2, 9), np.int64)
    loss, grads = ours.loss_and_grads(tokens, np.full_like(tokens, IGNORE), divisor=1)
    assert loss == 0 and not any(grad.any() for grad in grads.values())


def test_who_goes_through_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_threads", 2)
    ours, truth = models(2, 8, None, None)
    tokens = np.zeros((4, 9), np.int64)

    def goes(model: Model, tokens: np.ndarray = tokens, seed: int | None = None) -> bool:
        return in_one(model, tokens, tokens, seed) is not None

    assert goes(ours) and not goes(truth)
    assert not goes(ours, tokens[:3])  # a thread would wait for the other
    assert not goes(ours, tokens - 1) and not goes(ours, tokens + VOCABULARY)  # no such tokens
    assert goes(ours, seed=1)  # a seed, but nothing is dropped
    for place in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        drops = Model(replace(ours.config, **{place: 0.1}), ours.params, engine="numba")
        assert goes(drops) and not goes(drops, seed=1)
    ours.trainable.remove("transformer.h.1.ln_2.bias")
    assert not goes(ours)
    ours.trainable.add("transformer.h.1.ln_2.bias")
    ours.recompute = True
    assert not goes(ours)
    ours.recompute = False
    ours.add_lora(r=2)
    assert not goes(ours)
    small = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=9, vocab_size=11)
    assert goes(onfoot.create(small))
    biased = {"lm_head_bias": True, "tie_word_embeddings": False}
    others = ({"n_embd": 512}, {"vocab_size": 40_000}, {"activation_function": "relu"}, biased)
    for other in others:  # three million numbers in a block; a large table; what the kernels do not know
        assert not goes(onfoot.create(replace(small, **other)))
    assert not goes(onfoot.create(replace(small, n_embd=128, n_layer=50)))  # two threads' gradients: 79 MB
    long = onfoot.create(replace(small, vocab_size=20_000, n_positions=512))
    assert goes(long, np.zeros((2, 512), np.int64)) and not goes(long, np.zeros((4, 512), np.int64))  # 164 MB of logits
