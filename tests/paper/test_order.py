"""Order: equivariance against invariance, and what a causal mask alone tells a network about positions."""

from __future__ import annotations

import numpy as np
import pytest

import onfoot
import oracles
from onfoot.models.model import Model
from onfoot.ops import Head, attention_forward, head_forward

TOKENS = np.array([[5, 12, 3, 7, 3, 1, 0]])


def network(n_layer: int, causal: bool = True, positions: bool = False, seed: int = 3) -> Model:
    """A GPT-2 away from its initial values; without positions, its table of positions is 0."""
    config = onfoot.GPT2Config(
        n_layer=n_layer, n_head=2, n_embd=8, n_positions=9, vocab_size=13, tie_word_embeddings=False, causal=causal
    )
    model = onfoot.create(config, seed=0, dtype="float64", engine="numpy")
    params = oracles.scrambled(dict(model.params), seed, scale=0.6)
    if not positions:
        params["transformer.wpe.weight"] = np.zeros_like(params["transformer.wpe.weight"])
    return Model(config, params, "float64", "numpy")


def test_pooling_makes_an_equivariant_head_invariant_and_the_head_itself_is_not() -> None:
    rng = np.random.default_rng(0)
    a, order = rng.normal(size=(6, 4)), np.array([3, 0, 5, 1, 4, 2])
    head = Head(*(rng.normal(size=shape) for shape in [(4, 3), (3,)] * 2 + [(4, 5), (5,)]))
    for causal in (False, True):
        y, moved = head_forward(a, head, causal)[0], head_forward(a[order], head, causal)[0]
        assert np.abs(moved - y).max() > 0.1  # never invariant
        assert np.allclose(moved, y[order], atol=1e-12) == (not causal)
        assert np.allclose(moved.sum(axis=0), y.sum(axis=0), atol=1e-12) == (not causal)


@pytest.mark.parametrize(
    ("n_layer", "positions", "same"), [(1, False, True), (2, False, False), (1, True, False)], ids=str
)
def test_one_causal_block_knows_the_set_of_earlier_tokens_and_two_know_their_order(
    n_layer: int, positions: bool, same: bool
) -> None:
    model = network(n_layer, positions=positions)
    logits = model.logits(TOKENS)[0, -1]
    reordered = TOKENS[:, [4, 2, 0, 5, 1, 3, 6]]  # the last token stays
    change = np.abs(model.logits(reordered)[0, -1] - logits).max()
    assert (change < 1e-12) == same
    assert (change > 1e-3) == (not same)
    other = np.where(TOKENS == 12, 11, TOKENS)  # another token, and not another order
    assert np.abs(model.logits(other)[0, -1] - logits).max() > 1e-3


@pytest.mark.parametrize("n_layer", [1, 3])
def test_a_causal_network_without_positions_cannot_count_equal_tokens(n_layer: int) -> None:
    equal = np.full((1, 8), 4)
    logits = network(n_layer).logits(equal)[0]
    np.testing.assert_allclose(logits, np.broadcast_to(logits[0], logits.shape), atol=1e-12)
    with_positions = network(n_layer, positions=True).logits(equal)[0]
    assert np.abs(with_positions - with_positions[0]).max() > 1e-2
    marked = network(n_layer).logits(np.concatenate([[[2]], equal], axis=1))[0]  # one other token in front
    assert min(np.abs(marked[i] - marked[j]).max() for i in range(1, 9) for j in range(1, i)) > 1e-9


def test_uniform_causal_attention_to_a_first_token_is_one_over_the_position() -> None:
    v = np.zeros((10, 1))
    v[0] = 1
    zeros = np.zeros((10, 3))
    y, _ = attention_forward(zeros, zeros, v)
    np.testing.assert_allclose(y[:, 0], [1 / t for t in range(1, 11)], rtol=1e-14)
    first, rest = 2.5, -0.5
    y, _ = attention_forward(zeros, zeros, np.where(v == 1, first, rest))
    np.testing.assert_allclose(y[:, 0], [first / t + (1 - 1 / t) * rest for t in range(1, 11)], rtol=1e-13)
