"""Mistakes that no catalogue has, each planted in a right function: what the probes and slips call them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onfoot.check.candidate import _round_numbers
from onfoot.check.diagnose import Diagnosis
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.route_probes import on_route
from onfoot.check.routes import ROUTES, Route
from onfoot.check.shares import rules_of

Array = np.ndarray
Function = Callable[..., Any]


def diagnosis(layer: str, function: Function, seed: int) -> Diagnosis:
    report = check_layer(LAYERS[layer], function, seed=seed, dtypes=["float64"])
    assert report.diagnosis is not None, f"nothing was found wrong\n{report}"
    return report.diagnosis


# a linear layer by tiles of rows


def tiled(start: Function, stop: Function, add: bool = True) -> Function:
    """Rows in tiles of 4; `start` and `stop` map (first row of the tile, number of rows) to the rows that are read."""

    def backward(x: Array, weight: Array, bias: Array, dout: Array) -> tuple[Array, ...]:
        x2, g2 = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
        dweight = np.zeros_like(weight)
        for i in range(0, len(x2), 4):
            tile = slice(start(i, len(x2)), stop(i, len(x2)))
            share = x2[tile].T @ g2[tile]
            dweight = dweight + share if add else share
        return dout @ weight.T, dweight, dout.sum((0, 1))

    return backward


def first(i: int, n: int) -> int:
    return i


def fourth(i: int, n: int) -> int:
    return i + 4


TILES = {
    "overwritten": (tiled(first, fourth, add=False), "only the last tile of 4 rows .* overwrites"),
    "overlapping": (
        tiled(first, lambda i, n: i + 5),
        "first of every tile of 4 rows .* counted twice: the tiles overlap",
    ),
    "with gaps": (tiled(first, lambda i, n: i + 3), "last of every tile of 4 rows .* left out"),
    "full ones only": (
        tiled(first, lambda i, n: i + 4 if i + 4 <= n else i),
        "last, partly filled tile of 4 rows .* left out",
    ),
}


@pytest.mark.parametrize("what", TILES)
def test_wrong_tiles_are_named_with_their_size(what: str) -> None:
    function, says = TILES[what]
    found = diagnosis("linear", function, seed=5)
    assert found.complete and found.residual < 1e-9
    assert re.search(says, found.findings[0].name), found.findings
    assert found.findings[0].gradients == ["dweight"]


def test_right_tiles_pass() -> None:
    assert check_layer(LAYERS["linear"], tiled(first, fourth), dtypes=["float64"]).passed


def test_every_rule_changes_some_index() -> None:
    factors, kept = rules_of(11)
    assert factors.shape == (len(kept), 11) and (factors != 1).any(axis=1).all()


# attention, head by head


def attention(q: Array, k: Array, v: Array, dout: Array, **changed: Function) -> tuple[Array, ...]:
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    s = np.where(np.tri(n) > 0, q @ k.swapaxes(2, 3) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp, out = dout @ v.swapaxes(2, 3), p @ v
    delta = changed.get("delta", lambda dout, out, v: (dout * out).sum(-1, keepdims=True))(dout, out, v)
    ds = p * (dp - delta) * scale
    ds = changed.get("ds", lambda ds: ds)(ds)
    dk = ds.swapaxes(2, 3) @ q
    return ds @ changed.get("keys", lambda k: k)(k), dk, p.swapaxes(2, 3) @ dout


def i_j(ds: Array) -> tuple[Array, Array]:
    i, j = np.indices(ds.shape[-2:])
    return i, j


ATTENTION = {
    "delta from v": ({"delta": lambda dout, out, v: (dout * v).sum(-1, keepdims=True)}, "row sum of v ∘ dout"),
    "delta from out": ({"delta": lambda dout, out, v: (out * out).sum(-1, keepdims=True)}, "the output ∘ the output"),
    "no diagonal": ({"ds": lambda ds: ds * (i_j(ds)[0] != i_j(ds)[1])}, "the diagonal masked"),
    "diagonal tiles": (
        {"ds": lambda ds: ds * (i_j(ds)[0] // 3 == i_j(ds)[1] // 3)},
        "only tiles of 3 queries and 3 keys on the diagonal count",
    ),
    "a loop that ends early": (
        {"ds": lambda ds: ds * (i_j(ds)[0] < ds.shape[-2] - 1)},
        "the last query of .* left out",
    ),
    "the first head's keys": (
        {"keys": lambda k: np.broadcast_to(k[:, :1], k.shape)},
        "the first head of k is used for all heads",
    ),
}


@pytest.mark.parametrize("what", ATTENTION)
def test_a_part_of_attention_is_named(what: str) -> None:
    changed, says = ATTENTION[what]
    found = diagnosis("attention", lambda q, k, v, dout: attention(q, k, v, dout, **changed), seed=3)
    assert found.complete and found.residual < 1e-9
    assert re.search(says, found.findings[0].name), found.findings


def test_this_attention_is_right_without_a_change() -> None:
    assert check_layer(LAYERS["attention"], attention, dtypes=["float64"]).passed


# other functions' gradients, by autograd


def loss_gradient(loss: Function) -> Function:
    def backward(logits: Array, targets: Array, dout: float) -> Array:
        z = torch.from_numpy(logits).requires_grad_()
        value = loss(z, torch.from_numpy(targets))
        return torch.autograd.grad(value, z, torch.tensor(dout, dtype=z.dtype))[0].numpy()

    return backward


def of_target(p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return p.gather(-1, targets[..., None]).squeeze(-1)


def one_hot(p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(targets, p.shape[-1]).to(p.dtype)


LOSSES = {
    "no logarithm": (lambda z, t: -of_target(z.softmax(-1), t).mean(), "logarithm is missing"),
    "squared error": (
        lambda z, t: ((z.softmax(-1) - one_hot(z, t)) ** 2).sum(-1).mean(),
        "squared error",
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_the_gradient_of_another_loss_is_named(what: str) -> None:
    loss, says = LOSSES[what]
    found = diagnosis("softmax_cross_entropy", loss_gradient(loss), seed=1)
    assert found.complete and re.search(says, found.findings[0].name), found.findings


def test_exchanged_roles_are_one_cause() -> None:
    def backward(gate: Array, up: Array, dout: Array) -> tuple[Array, ...]:
        a, b = (torch.from_numpy(x).requires_grad_() for x in (gate, up))
        out = torch.nn.functional.silu(b) * a
        return tuple(g.numpy() for g in torch.autograd.grad(out, (a, b), torch.from_numpy(dout)))

    found = diagnosis("swiglu", backward, seed=2)
    assert [f.name for f in found.findings] == ["the roles of gate and up are exchanged"]


# tables


def padding(ids: Array, weight: Array, dout: Array) -> Array:
    table = torch.from_numpy(weight).requires_grad_()
    out = torch.nn.functional.embedding(torch.from_numpy(ids), table, padding_idx=0)
    return torch.autograd.grad(out, table, torch.from_numpy(dout))[0].numpy()


def sorted_ids(ids: Array, weight: Array, dout: Array) -> Array:
    dweight = np.zeros_like(weight)
    np.add.at(dweight, np.sort(ids.ravel()), dout.reshape(-1, dout.shape[-1]))
    return dweight


def lost_and_short(ids: Array, weight: Array, dout: Array) -> Array:
    """Two mistakes, of which one is not in the catalogue."""
    dweight = np.zeros_like(weight)
    dweight[ids.ravel(), :-1] = dout.reshape(-1, dout.shape[-1])[:, :-1]
    return dweight


TABLES = {
    padding: ["id 0 is taken for padding"],
    sorted_ids: ["ids are sorted"],
    lost_and_short: ["repeated ids lost", "the last column of dweight is left out"],
}


@pytest.mark.parametrize("function", TABLES)
def test_mistakes_in_a_table_are_named(function: Function) -> None:
    found = diagnosis("embedding", function, seed=4)
    assert found.complete
    for finding, says in zip(found.findings, TABLES[function], strict=True):
        assert re.search(says, finding.name)


def test_a_probe_and_a_factor_together_are_two_findings() -> None:
    def backward(logits: Array, targets: Array, dout: float) -> Array:
        p = np.exp(logits - logits.max())
        p = p / p.sum() - np.eye(logits.shape[-1])[targets]
        return dout * p / targets.shape[0]

    found = diagnosis("softmax_cross_entropy", backward, seed=6)
    assert found.complete and len(found.findings) == 2
    assert "over all entries" in found.findings[0].name and "n = " in found.findings[1].name


def test_columns_of_another_array_are_named() -> None:
    def backward(x: Array, weight: Array, down: Array, up: Array, alpha: float, dout: Array) -> tuple[Array, ...]:
        r = down.shape[1]
        s = alpha / r
        dx = dout @ (weight + s * down @ up).T
        return dx, s * np.einsum("bti,btr->ir", x, dout[..., :r]), s * np.einsum("btr,bto->ro", x @ down, dout)

    found = diagnosis("lora", backward, seed=0)
    assert re.search("the first columns of dout in place of dout upᵗ", found.findings[0].name), found.findings


# other derivations


def route_id(route: Route) -> str:
    return f"{route.layer}: {next(iter(vars(route.pieces)))}"


@pytest.mark.parametrize("route", ROUTES, ids=route_id)
def test_every_route_gives_the_exact_gradients(route: Route) -> None:
    layer = LAYERS[route.layer]
    options = {**layer.options, **route.needs}
    for case in layer.cases(np.random.default_rng(7), **options):
        if "large" in case.name or case.beyond:
            continue  # a route may divide by a probability of 0, and does not know ignored targets
        found = layer.run(on_route(layer, route).pieces, case, options)
        for got, right in zip(found, layer.reference(*case.inputs, **options), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("route", ROUTES, ids=route_id)
def test_every_step_of_a_route_has_words_and_a_formula(route: Route) -> None:
    assert set(route.words) == set(vars(route.pieces))
    assert all(what and right for what, right in route.words.values())


def test_a_wrong_power_in_the_gradient_of_the_variance_is_named() -> None:
    def backward(x: Array, weight: Array, bias: Array, dout: Array) -> tuple[Array, ...]:
        d = x.shape[-1]
        c = x - x.mean(-1, keepdims=True)
        inv = (c.var(-1, keepdims=True) + 1e-5) ** -0.5
        g = dout * weight
        dvar = (g * c).sum(-1, keepdims=True) * -0.5 * inv
        dmean = -(g * inv).sum(-1, keepdims=True)
        return g * inv + dvar * 2 * c / d + dmean / d, (dout * c * inv).sum((0, 1)), dout.sum((0, 1))

    found = diagnosis("layer_norm", backward, seed=9)
    assert found.complete and "1/σ in place of 1/σ³" in found.findings[0].name


def test_round_numbers_are_those_that_people_write() -> None:
    assert 1 / 0.9 in _round_numbers(1 / 0.9 * (1 + 3e-14))
    assert 0.044715 in _round_numbers(0.044715 * (1 - 2e-12))
    assert np.sqrt(7) in _round_numbers(np.sqrt(7) * (1 + 1e-13))
    assert all(abs(one - 0.3) < 1e-9 for one in _round_numbers(0.3))


def test_the_first_query_alone_comes_before_weights_cut_off_to_integers(fresh: int) -> None:
    """Of the causal weights only the first query's is 1, so that both have the same numbers."""

    def backward(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        s = np.where(np.tri(q.shape[-2], k.shape[-2]) > 0, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return ds @ k, ds.swapaxes(-1, -2) @ q, p[..., :1, :].swapaxes(-1, -2) @ dout[..., :1, :]

    assert [f.name for f in diagnosis("attention", backward, fresh).findings] == [
        "only the first query of ρ in dv counts"
    ]


def test_a_sum_of_squares_in_place_of_their_mean_is_one_mistake(fresh: int) -> None:
    def rms(x: Array, weight: Array, dout: Array) -> tuple[Array, ...]:
        r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        h, g = x * r, dout * weight
        return r * (g - h * (g * h).sum(-1, keepdims=True)), (dout * h).sum((0, 1))

    def layer(x: Array, weight: Array, bias: Array, dout: Array) -> tuple[Array, ...]:
        c = x - x.mean(-1, keepdims=True)
        r = 1 / np.sqrt((c * c).sum(-1, keepdims=True) + 1e-5)
        h, g = c * r, dout * weight
        dx = r * (g - g.mean(-1, keepdims=True) - h * (g * h).sum(-1, keepdims=True))
        return dx, (dout * h).sum((0, 1)), dout.sum((0, 1))

    for name, function in (("rms_norm", rms), ("layer_norm", layer)):
        (found,) = diagnosis(name, function, fresh).findings
        assert "in place of its mean, in both passes: an L2 norm" in found.name


@pytest.mark.parametrize("value", [1e-200, 5e-324, 1e200, 0.0, -1e-200])
def test_a_fitted_number_close_to_0_does_not_end_the_search_with_an_error(value: float) -> None:
    assert value in _round_numbers(value)
