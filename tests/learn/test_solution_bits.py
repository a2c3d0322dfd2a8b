"""The solutions compute what the ops compute, bit for bit: a network trained with them is the same network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from learners import solution_modules

from onfoot import GPT2Config, create, ops
from onfoot.check.examples import examples
from onfoot.learn import EXERCISES
from onfoot.ops import tangents

PAIRS = [(exercise.name, pair) for exercise in EXERCISES for pair in exercise.pairs]
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def cast(x: Any, dtype: str) -> Any:
    return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def flat(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


@DTYPES
@pytest.mark.parametrize(("exercise", "pair"), PAIRS, ids=[pair for _, pair in PAIRS])
def test_a_pair_of_the_solutions_has_the_bits_of_ours(exercise: str, pair: str, dtype: str) -> None:
    inputs = [cast(x, dtype) for x in examples(3)[pair].inputs]
    with solution_modules() as modules:
        module = modules[exercise]
        y, saved = getattr(module, f"{pair}_forward")(*inputs)
        right, s_right = getattr(ops, f"{pair}_forward")(*inputs)
        assert same(y, right)
        dy = 1.0 if pair == "cross_entropy" else cast(np.random.default_rng(4).standard_normal(y.shape), dtype)
        found = flat(getattr(module, f"{pair}_backward")(dy, saved))
        expected = flat(getattr(ops, f"{pair}_backward")(dy, s_right))
    assert len(found) == len(expected)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_a_linear_layer_without_bias_has_no_gradient_for_it() -> None:
    x, weight = np.ones((2, 3)), np.ones((3, 4))
    with solution_modules() as modules:
        y, saved = modules["linear"].linear_forward(x, weight, None)
        dx, dweight, dbias = modules["linear"].linear_backward(y, saved)
    assert same(y, ops.linear_forward(x, weight)[0])
    assert dx.shape == (2, 3) and dweight.shape == (3, 4) and dbias is None


@DTYPES
@pytest.mark.parametrize("ignored", [False, True])
def test_the_whole_network_has_the_bits_of_our_model(dtype: str, ignored: bool) -> None:
    config = GPT2Config(n_layer=3, n_head=4, n_embd=24, n_positions=11, vocab_size=19)
    model = create(config, seed=5, dtype=dtype, engine="numpy")
    rng = np.random.default_rng(6)
    for value in model.params.values():  # away from the initial values
        value += cast(0.3 * rng.standard_normal(value.shape), dtype)
    tokens, targets = rng.integers(0, 19, (3, 9)), rng.integers(0, 19, (3, 9))
    if ignored:
        targets[1, 4] = -100
    right, grads = model.loss_and_grads(tokens, targets)
    with solution_modules() as modules:
        loss, saved = modules["gpt2"].gpt2_forward(dict(model.params), tokens, targets, config)
        found = modules["gpt2"].gpt2_backward(saved)
    assert float(loss) == right
    assert set(found) == set(grads)
    assert {name for name in grads if not same(found[name], grads[name])} == set()


@DTYPES
def test_an_update_has_the_bits_of_ours(dtype: str) -> None:
    rng = np.random.default_rng(7)
    p, m, g = (cast(rng.standard_normal((4, 5)), dtype) for _ in range(3))
    v = g * g + p * p
    settings = (1e-2, (0.9, 0.95), 1e-8, 0.1, 3)
    ours = [x.copy() for x in (p, m, v)]
    ops.adamw_update(*ours, g, *settings)
    with solution_modules() as modules:
        found = modules["adamw"].adamw_update(p.copy(), m.copy(), v.copy(), g, *settings)
    assert [same(a, b) for a, b in zip(found, ours, strict=True)] == [True] * 3


@DTYPES
def test_tangents_have_the_bits_of_ours(dtype: str) -> None:
    rng = np.random.default_rng(8)
    x, weight, bias, x_dot, weight_dot, bias_dot = (
        cast(rng.standard_normal(shape), dtype) for shape in 2 * ((2, 3, 5), (5, 4), (4,))
    )
    with solution_modules() as modules:
        own = modules["tangents"]
        saved = ops.linear_forward(x, weight, bias)[1]
        right = tangents.linear_tangent(x_dot, weight_dot, bias_dot, saved)[0]
        assert same(own.linear_tangent(x_dot, weight_dot, bias_dot, tuple(saved)), right)
        gamma, beta, gamma_dot, beta_dot = x[0, 0], x[0, 1], x[0, 2], x[1, 0]
        norm = ops.layer_norm_forward(x, gamma, beta)[1]
        right = tangents.layer_norm_tangent(x_dot, gamma_dot, beta_dot, norm)[0]
        assert same(own.layer_norm_tangent(x_dot, gamma_dot, beta_dot, tuple(norm)), right)
