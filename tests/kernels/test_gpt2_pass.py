"""A small model's whole pass in one, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.models import gpt2
from onfoot.models.layout import Layout
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE

pytest.importorskip("numba")
CLOSE = 2e-6
CONFIG = onfoot.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=1024, vocab_size=37)
CASES: list[tuple[int, int, dict[str, Any]]] = [  # sequences, tokens, fields
    (1, 1, {"n_head": 1, "n_embd": 3, "qk_head_dim": 1, "n_inner": 1}),
    (6, 3, {"n_head": 1, "n_embd": 7, "qk_head_dim": 5, "n_inner": 9}),
    (6, 33, {"n_head": 3, "n_embd": 15, "qk_head_dim": 2, "n_inner": 23}),  # rows that are no multiple of anything
    (6, 7, {"n_head": 1, "n_embd": 41, "qk_head_dim": 3}),
    (
        6,
        11,
        {"n_head": 3, "n_embd": 20, "head_dim": 7, "qk_head_dim": 4, "n_inner": 9},
    ),  # heads wider than the stream
    (6, 130, {}),  # more rows than a chunk, more keys than a block
    (20, 21, {"n_head": 4, "n_embd": 64, "n_inner": 100}),
    (6, 400, {"n_head": 1, "n_embd": 6, "qk_head_dim": 11}),  # deeper than one packed block on the way to the weights
    (6, 9, {"n_embd": 120, "n_inner": 900}),  # on the way through the MLP,
    (6, 9, {"n_embd": 390, "n_inner": 10, "n_layer": 1}),  # through all other layers,
    (6, 9, {"vocab_size": 401}),  # and through the head
    (1, 1023, {"n_embd": 18}),
    (9, 5, {}),
]


def models(**fields: Any) -> tuple[Model, Model]:
    """The same weights, away from their first values, in float32 on the kernels and in float64 on the formulas."""
    config = replace(CONFIG, **fields)
    ours = onfoot.create(config, 0, engine="numba")
    rng, spread = np.random.default_rng(1), min(0.1, 1 / np.sqrt(config.n_embd))  # scores of any width are about 1
    for p in ours.params.values():
        p += rng.normal(0, spread, p.shape).astype(np.float32)
    return ours, Model(config, ours.params, "float64", "numpy")


def in_one(model: Model, tokens: np.ndarray, targets: np.ndarray, dropout_seed: int | None = None) -> float | None:
    """The loss, where a pass is done in one."""
    run = model.new_run(dropout_seed=dropout_seed)
    layout = Layout(np.arange(tokens.shape[1]))
    return gpt2.pass_in_one(run, model.config, tokens, targets, layout, 1.0)


def compare(ours: Model, truth: Model, sequences: int, n: int) -> None:
    """The loss and all gradients, for targets of which some do not count."""
    rng = np.random.default_rng(2)
    tokens, targets = (rng.integers(0, ours.config.vocab_size, (sequences, n)) for _ in range(2))
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    targets[-1, -1] = 5
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


@pytest.mark.parametrize(("causal", "tied"), [(True, True), (False, False)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_and_every_gradient_are_those_of_the_formulas(
    case: tuple[int, int, dict[str, Any]], causal: bool, tied: bool, threads: int
) -> None:
    sequences, n, fields = case
    ours, truth = models(**fields, causal=causal, tie_word_embeddings=tied)
    tokens = np.zeros((sequences, n), np.int64)
    if sequences % threads == 0:
        assert in_one(ours, tokens, tokens) is not None
    compare(ours, truth, sequences, n)


@pytest.mark.parametrize("n", [4, 10])
def test_threads_are_never_without_a_sequence(n: int, on_threads: Callable[[int], None]) -> None:
    on_threads(n)
    ours, truth = models()
    tokens = np.zeros((n, 5), np.int64)
    assert in_one(ours, tokens, tokens) is not None and in_one(ours, tokens[1:], tokens[1:]) is None
    compare(ours, truth, n, 5)
    compare(ours, truth, n - 1, 5)


def test_the_same_bits_twice(threads: int) -> None:
    ours, _ = models(n_head=3, n_embd=24)
    tokens = np.random.default_rng(0).integers(0, 11, (6, 50))
    assert in_one(ours, tokens, tokens) is not None
    (loss, grads), (again, twice) = ours.loss_and_grads(tokens), ours.loss_and_grads(tokens)
    assert loss == again and all((grads[name] == twice[name]).all() for name in grads)


def test_gradients_outlive_the_next_pass(threads: int) -> None:
    ours, _ = models()
    tokens = np.random.default_rng(0).integers(0, 11, (6, 9))
    assert in_one(ours, tokens, tokens) is not None
    _, grads = ours.loss_and_grads(tokens)
    before = {name: grad.copy() for name, grad in grads.items()}
    ours.loss_and_grads(tokens[::-1])
    assert all((grads[name] == before[name]).all() for name in grads)


def test_each_gradient_is_handed_over_once_from_the_last_to_the_first(threads: int) -> None:
    ours, _ = models()
    tokens = np.random.default_rng(0).integers(0, 11, (6, 9))
    assert in_one(ours, tokens, tokens) is not None
    taken: list[tuple[str, np.ndarray]] = []
    loss, left = ours.loss_and_grads(tokens, take=lambda name, grad: taken.append((name, grad)))
    again, grads = ours.loss_and_grads(tokens)
    assert loss == again and not left
    assert [name for name, _ in taken] == list(reversed(grads))
    assert all((grad == grads[name]).all() for name, grad in taken)


def test_where_nothing_counts_every_gradient_is_zero(threads: int) -> None:
    ours, _ = models()
    tokens = np.zeros((6, 9), np.int64)
    assert in_one(ours, tokens, tokens) is not None
    loss, grads = ours.loss_and_grads(tokens, np.full_like(tokens, IGNORE), divisor=1)
    assert loss == 0 and not any(grad.any() for grad in grads.values())


def test_a_target_outside_the_vocabulary_is_refused(threads: int) -> None:
    ours, _ = models()
    tokens = np.zeros((6, 9), np.int64)
    for wrong in (-1, 37, 10**6):
        with pytest.raises(IndexError, match=str(wrong)):
            in_one(ours, tokens, tokens + wrong)


def test_who_goes_through_in_one(on_threads: Callable[[int], None]) -> None:
    on_threads(2)
    ours, truth = models()
    tokens = np.zeros((4, 9), np.int64)

    def goes(model: Model, tokens: np.ndarray = tokens, seed: int | None = None) -> bool:
        return in_one(model, tokens, tokens, seed) is not None

    assert goes(ours) and not goes(truth) and not goes(Model(CONFIG, ours.params, "float64", "numba"))
    layout = Layout(np.arange(9), np.zeros((4, 9), np.int64))  # packed examples
    assert gpt2.pass_in_one(ours.new_run(), ours.config, tokens, tokens, layout, 1.0) is None
    traced = ours.new_run(note=lambda name, value: None)
    assert gpt2.pass_in_one(traced, ours.config, tokens, tokens, Layout(np.arange(9)), 1.0) is None
    assert not goes(ours, np.zeros((2, 1025), np.int64))  # more tokens than positions
    assert not goes(ours, tokens[:3])  # a thread would wait for the other
    assert not goes(ours, tokens - 1) and not goes(ours, tokens + 37)  # no such tokens
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
