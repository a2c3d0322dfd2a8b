"""Every catalogued mistake, planted in an otherwise correct implementation, is named; nothing else is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from outside import NAMED, OUTSIDE
from planted import CHANGES as PLANTED_CHANGES
from planted import NEEDS, PLANTED, spoilt
from planted.attention import all_heads
from planted.dense import lora
from planted.norms import layer_norm
from right import RIGHT

from onfoot.arrays import to_numpy
from onfoot.check import CATALOGUE, attention
from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.diagnose import Diagnosis, _compatible
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.mistakes import mistakes_of, replaced_pieces

Array = np.ndarray
ROUNDING = 1e-9


def diagnosis(layer: str, function: Callable[..., Any], seed: int, **options: Any) -> Diagnosis:
    """The diagnosis, in float64 only by default: that is the dtype it is based on."""
    report = check_layer(LAYERS[layer], function, seed=seed, **{"dtypes": ["float64"], **options})
    assert report.diagnosis is not None, f"nothing was found wrong\n{report}"
    return report.diagnosis


def test_every_catalogued_mistake_is_planted() -> None:
    assert set(PLANTED) == {(m.layer, m.name) for m in CATALOGUE}


@pytest.mark.parametrize(("layer", "name"), PLANTED)
def test_a_planted_mistake_is_named_first_at_sizes_nobody_has_seen(layer: str, name: str, fresh: int) -> None:
    found = diagnosis(layer, PLANTED[layer, name], seed=fresh, **NEEDS[layer, name])
    names, residual = found.candidates[0]
    assert names == [name]
    assert found.complete and found.also == [] and residual < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("more", range(5))
@pytest.mark.parametrize(("layer", "name"), PLANTED)
def test_a_planted_mistake_is_named_first_again_and_again(layer: str, name: str, more: int, fresh: int) -> None:
    found = diagnosis(layer, PLANTED[layer, name], seed=fresh, dtypes=["float64", "float32"], **NEEDS[layer, name])
    assert found.candidates[0][0] == [name]
    assert found.complete and found.also == []


@pytest.mark.parametrize("name", ["1/√d_k missing from the backward pass", "the mean in place of the weighted sum"])
def test_a_mistake_is_named_in_float32_alone(name: str) -> None:
    found = diagnosis("attention", PLANTED["attention", name], seed=11, dtypes=["float32"])
    assert found.candidates[0][0] == [name] and found.complete


def test_non_causal_attention_is_distinguished_from_a_missing_mask() -> None:
    backward = PLANTED["attention", "no mask"]
    assert diagnosis("attention", backward, seed=3).candidates[0][0] == ["no mask"]
    assert attention(backward, causal=False, seed=3).passed


def test_the_smallest_mistake_is_far_above_what_rounding_is_allowed() -> None:
    report = check_layer(LAYERS["gelu"], PLANTED["gelu", "tanh-GELU with erf's derivative"], seed=2)
    for dtype, factor in (("float64", 1e10), ("float32", 60)):
        assert max(m.error / m.allowed for o in report.outcomes for m in o.measured if o.dtype == dtype) > factor


# Two mistakes at once


def both(layer: str, *names: str) -> tuple[str, set[str]]:
    return layer, set(names)


def scale_and_mean(q, k, v, dout):
    return all_heads(q, k, v, dout, True, backward_scale=0, rule=lambda da, a: da * a - (da * a).mean(1)[:, None])


def mean_and_values(q, k, v, dout):
    rule = {"rule": lambda da, a: da * a - (da * a).mean(1)[:, None]}
    return all_heads(q, k, v, dout, True, dv=lambda a, do: a @ do, **rule)


def mask_and_keys(q, k, v, dout):
    return all_heads(q, k, v, dout, True, see=lambda n, m, c: np.full((n, m), True), dk=lambda ds, q, k: ds.T @ k)


def width_and_rows(q, k, v, dout):
    return all_heads(q, k, v, dout, True, forward_scale=0, rule=lambda da, a: (da - (da * a).sum(1)) * a)


def gamma_and_features(x, weight, bias, dout):
    return layer_norm(x, weight, bias, dout, gamma="outside", raw=True)


def unbiased_without_gamma(x, weight, bias, dout):
    return layer_norm(x, weight, bias, dout, gamma="missing", ddof=1)


def path_and_scale(x, weight, down, up, alpha, dout):
    return lora(x, weight, down, up, alpha, dout, frozen=0, scale=lambda a, r: a)


PAIRS = {
    scale_and_mean: both("attention", "1/√d_k missing from the backward pass", "the mean in place of the weighted sum"),
    mean_and_values: both("attention", "the mean in place of the weighted sum", "dv without the transpose of ρ"),
    mask_and_keys: both("attention", "no mask", "dk from k in place of q"),
    width_and_rows: both(
        "attention", "1/√d_k missing from the forward pass", "row sums broadcast along the wrong axis"
    ),
    gamma_and_features: both("layer_norm", "γ outside the means", "dweight from x in place of ā"),
    unbiased_without_gamma: both("layer_norm", "γ missing from dx", "unbiased variance"),
    path_and_scale: both("lora", "the frozen path missing from dx", "α in place of α/r"),
}


SLOW_PAIRS = (width_and_rows, unbiased_without_gamma, mask_and_keys)


@pytest.mark.parametrize(
    "function", [pytest.param(f, marks=pytest.mark.slow if f in SLOW_PAIRS else [], id=f.__name__) for f in PAIRS]
)
def test_two_mistakes_at_once_are_both_named(function: Callable[..., Any]) -> None:
    layer, names = PAIRS[function]
    found = diagnosis(layer, function, seed=4711, arrays="torch" if layer == "lora" else "numpy")
    assert set(found.candidates[0][0]) == names
    assert found.complete and found.residual < ROUNDING


def pairs_of(layer: str) -> list[tuple[str, str]]:
    """Planted mistakes that can be combined: they change different arguments and replace different pieces."""
    pieces = {m.name: replaced_pieces(m) for m in CATALOGUE if m.layer == layer}
    spoils = {name: set(changes) for (one, name), (_, changes) in PLANTED_CHANGES.items() if one == layer}
    return [
        (a, b) for a, b in itertools.combinations(spoils, 2) if not spoils[a] & spoils[b] and not pieces[a] & pieces[b]
    ]


def check_pair(layer: str, a: str, b: str, seed: int) -> None:
    """Both are named, or only one if it hides the other or equals both together."""
    function, changes = PLANTED_CHANGES[layer, a]
    together = spoilt(function, {**changes, **PLANTED_CHANGES[layer, b][1]})
    found = diagnosis(layer, together, seed=seed)
    names = {f.name for f in found.findings}
    assert found.complete and found.residual < ROUNDING, (a, b)
    assert names == {a, b} or len(names) == 1, (a, b, names)


COMBINED = ["attention", "layer_norm", "rms_norm", "lora"]


@pytest.mark.parametrize("layer", COMBINED)
def test_any_two_mistakes_at_once_are_explained(layer: str, fresh: int) -> None:
    pairs = pairs_of(layer)
    assert len(pairs) > 20
    for i in np.random.default_rng(fresh).permutation(len(pairs))[:3]:
        check_pair(layer, *pairs[i], seed=fresh)


def test_two_mistakes_are_named_where_together_they_cancel_to_rounding() -> None:
    check_pair("attention", "the mean in place of the weighted sum", "no mask", seed=389474030)  # tokens all alike


def test_two_mistakes_are_named_where_together_they_divide_by_rounding_noise() -> None:
    check_pair("rms_norm", "features centred first", "no eps", seed=685263672)  # a row of equal features


@pytest.mark.slow
@pytest.mark.parametrize("layer", COMBINED)
def test_all_pairs_of_mistakes_are_explained(layer: str, fresh: int) -> None:
    for pair in pairs_of(layer):
        check_pair(layer, *pair, seed=fresh)


# Factors and exchanged gradients


def right_attention(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    return all_heads(q, k, v, dout, True)


CHANGES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "√d_k in one gradient": (
        lambda q, dq, dk, dv: (dq, np.sqrt(q.shape[-1]) * dk, dv),
        ["dk is √d_k = 2.65 times too large"],
    ),
    "d_k below": (lambda q, dq, dk, dv: (dq / q.shape[-1], dk, dv), ["dq is d_k = 7 times too small"]),
    "n": (lambda q, dq, dk, dv: (dq, dk, q.shape[-2] * dv), ["dv is n = 4 times too large"]),
    "n − 1": (lambda q, dq, dk, dv: (dq, dk, (q.shape[-2] - 1) * dv), ["dv is (n − 1) = 3 times too large"]),
    "B": (lambda q, dq, dk, dv: (dq, dk, dv / q.shape[0]), ["dv is B = 5 times too small"]),
    "twice": (lambda q, dq, dk, dv: (2 * dq, dk, dv), ["dq is 2 times too large"]),
    "a sign": (lambda q, dq, dk, dv: (dq, -dk, dv), ["dk has the wrong sign"]),
    "a sign and H": (
        lambda q, dq, dk, dv: (dq, dk, -q.shape[1] * dv),
        ["dv has the wrong sign and is H = 4 times too large"],
    ),
    "a number": (lambda q, dq, dk, dv: (0.3 * dq, dk, dv), ["dq is 0.3 times the correct gradient in every case"]),
    "exchanged": (
        lambda q, dq, dk, dv: (dk, dq, dv),
        ["dk is returned in place of dq", "dq is returned in place of dk"],
    ),
    "zero": (lambda q, dq, dk, dv: (dq, dk, 0 * dv), ["dv is 0 everywhere"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_factor_is_recognised_by_the_size_it_comes_from(change: str) -> None:
    spoil, expected = CHANGES[change]
    found = diagnosis("attention", lambda q, k, v, dout: spoil(q, *right_attention(q, k, v, dout)), seed=0)
    assert [f.name for f in found.findings] == expected


def test_a_factor_of_r_over_alpha_is_recognised() -> None:
    def backward(x, weight, down, up, alpha, dout):
        dx, ddown, dup = lora(*(torch.from_numpy(a) for a in (x, weight, down, up)), alpha, torch.from_numpy(dout))
        return down.shape[1] / alpha * dx, ddown, dup  # both paths of dx: a scale that is missing has a name of its own

    found = diagnosis("lora", backward, seed=0)
    assert [f.name.split(" = ")[0] for f in found.findings] == ["dx is α/r"]
    assert found.findings[0].name.endswith("times too small")


def test_a_mistake_in_one_gradient_alone_is_named_there() -> None:
    def backward(q, k, v, dout):
        _, dk, dv = right_attention(q, k, v, dout)
        dq, _, _ = all_heads(q, k, v, dout, True, rule=lambda da, a: da * a)
        return dq, dk, dv

    found = diagnosis("attention", backward, seed=5)
    assert [(f.name, f.gradients) for f in found.findings] == [("the sum missing from the gradient of softmax", ["dq"])]


def test_explained_gradients_are_named_and_unexplained_ones_listed() -> None:
    def backward(q, k, v, dout):
        dq, dk, dv = right_attention(q, k, v, dout)
        return np.sqrt(q.shape[-1]) * dq, np.sqrt(q.shape[-1]) * dk, np.tanh(dv)

    found = diagnosis("attention", backward, seed=5)
    assert [f.name for f in found.findings] == ["1/√d_k missing from the backward pass"]
    assert found.unexplained == ["dv"] and not found.complete


def test_all_mistakes_that_fit_equally_well_are_listed() -> None:
    def backward(q, k, v, dout):
        dq, dk, _ = right_attention(q, k, v, dout)
        _, _, dv = all_heads(q, k, v, dout, True, forward_scale=0)
        return np.tanh(dq), np.sin(dk), dv

    found = diagnosis("attention", backward, seed=5)
    names = [found.findings[0].name, *(name for one in found.also for name in one)]
    assert set(names) == {"1/√d_k missing from the forward pass", "1/√d_k missing from both passes"}
    assert found.unexplained == ["dq", "dk"]


# Mistakes outside the catalogue


PARTS = {name for name, layer in LAYERS.items() if layer.parts and len(layer.gradients) > 2}  # slow if nothing fits
KEPT = ("loss_head",)  # of these, in every run
EVERY_RUN = ("attention", "loss_head", "adamw", "layer_norm", "embedding")  # layers of which one wrong formula is
NAMELESS = [one for one in OUTSIDE if one not in NAMED]
ONE_EACH = dict(reversed(NAMELESS)).items()  # the first one of a layer: the search is made in full


@pytest.mark.parametrize(
    ("layer", "what"),
    [pytest.param(*one, marks=[] if one in ONE_EACH and one[0] in EVERY_RUN else pytest.mark.slow) for one in NAMELESS],
)
def test_a_wrong_formula_that_nothing_reproduces_gets_no_name(layer: str, what: str, fresh: int) -> None:
    found = diagnosis(layer, OUTSIDE[layer, what], seed=fresh)
    assert found.findings == [] and not found.complete
    assert found.unexplained
    assert all(residual > 1e-4 for _, residual in found.candidates)


@pytest.mark.parametrize(("layer", "what"), NAMED)
def test_a_wrong_formula_outside_the_catalogue_is_named(layer: str, what: str, fresh: int) -> None:
    found = diagnosis(layer, OUTSIDE[layer, what], seed=fresh)
    first = found.findings[0]
    assert re.search(NAMED[layer, what], f"{first.name}, {first.value}")
    assert found.complete and found.residual < ROUNDING and len(found.findings) == 1


def test_every_layer_has_mistakes_outside_the_catalogue() -> None:
    assert {layer for layer, _ in OUTSIDE} == set(LAYERS)


def noise(g: Array) -> Array:
    return np.sin(1e3 * np.arange(g.size)).reshape(g.shape)


SPOILT: dict[str, Callable[[Array], Array]] = {
    "a little noise": lambda g: g + 1e-4 * np.abs(g).max() * noise(g),
    "rolled": lambda g: np.roll(g, 1, axis=0) + 0.1 * g,
    "bent": lambda g: np.tanh(g) + 0.01 * noise(g),
    "clipped": lambda g: np.clip(g, -0.2 * np.abs(g).max(), 0.3 * np.abs(g).max()),
    "rounded": lambda g: np.round(g, 1) + 0.02,
    "turned round": lambda g: g[::-1] * 1.5 + 0.01,
    "weighted": lambda g: g * (1 + 0.5 * noise(g)),
}


QUICK = ("a little noise",)


@pytest.mark.parametrize("spoil", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow) for s in SPOILT])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(name, marks=pytest.mark.slow if name in PARTS - {*KEPT} else [])
        for name in LAYERS
        if "block" not in name and name != "multi_head"
    ],
)
def test_a_spoilt_gradient_gets_no_name(layer: str, spoil: str) -> None:
    function = RIGHT[layer][0]
    n = len(LAYERS[layer].gradients)
    rng = np.random.default_rng([len(layer), len(spoil)])
    place = int(rng.integers(n))

    def backward(*arguments: Any) -> Any:
        found = function(*arguments)
        grads = [to_numpy(g) for g in (found if isinstance(found, (tuple, list)) else [found])]
        grads[place] = SPOILT[spoil](grads[place])
        return tuple(grads)

    report = check_layer(LAYERS[layer], backward, seed=int(rng.integers(10**6)), arrays="auto")
    assert not report.passed
    assert report.diagnosis is not None
    assert report.diagnosis.findings == []
    assert report.diagnosis.unexplained == [LAYERS[layer].gradients[place]]
    assert all(residual > 1e-6 for _, residual in report.diagnosis.candidates)
    assert "No known mistake" in str(report)


def test_mistakes_that_replace_the_same_piece_are_not_tried_together() -> None:
    of_piece: dict[str, list[Any]] = {}
    for mistake in mistakes_of(LAYERS["layer_norm"], {}):
        for piece in replaced_pieces(mistake):
            of_piece.setdefault(piece, []).append(mistake)
    pairs = [tuple(found[:2]) for found in of_piece.values() if len(found) > 1]
    assert pairs and not any(_compatible(Candidate(pair)) for pair in pairs)
    assert all(_compatible(Candidate((one,))) for pair in pairs for one in pair)


@pytest.mark.parametrize(("off", "fits"), [(0.0, True), (1e-10, False)])
def test_a_candidate_fits_up_to_rounding_and_not_only_nearly(off: float, fits: bool) -> None:
    layer = LAYERS["linear"]
    cases = [first_case(layer, seed, layer.options, ANY) for seed in (1, 2, 3)]
    answers = [[g * (1 + off) for g in layer.reference(*case.inputs)] for case in cases]
    magnitudes = [[float(np.linalg.norm(g)) for g in found] for found in answers]
    evidence = Evidence(layer, layer.options, cases, answers, magnitudes, "float64")
    assert [evidence.fits(Candidate(), g) for g in range(3)] == [fits] * 3
