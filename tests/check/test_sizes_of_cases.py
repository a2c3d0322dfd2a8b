"""Mistakes that begin at some size are found; sizes can be chosen, and a function's declared sizes are respected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planted.attention import all_heads

import onfoot.check
from onfoot.check.case_sizes import LARGE, all_cases, read_sizes, sizes_for
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.report import LayerReport

Gradients = tuple[np.ndarray, ...]
Planted = Callable[[Gradients], None]


def correct(layer: str) -> Callable[..., Gradients]:
    """The correct gradients, as a function to plant mistakes in: only where they begin is tested here."""
    found = LAYERS[layer]
    return lambda *inputs: tuple(np.array(g) for g in found.reference(*inputs, **found.options))


def planted(layer: str, plant: Callable[..., None]) -> Callable[..., Gradients]:
    def backward(*inputs: Any) -> Gradients:
        grads = correct(layer)(*inputs)
        plant(grads, *inputs)
        return grads

    return backward


def beyond_tokens(n: int, g: int = 0) -> Callable[..., None]:
    """Gradient g is wrong from token n on."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        grads[g][..., n:, :] *= 1.01

    return plant


def beyond_columns(n: int, g: int = 0) -> Callable[..., None]:
    def plant(grads: Gradients, *inputs: Any) -> None:
        grads[g][..., n:] = 0

    return plant


def beyond_pairs(n: int) -> Callable[..., None]:
    def plant(grads: Gradients, *inputs: Any) -> None:
        grads[0][n:] = 0

    return plant


def last_partial(tile: int, g: int = 0) -> Callable[..., None]:
    """A loop over whole tiles of tokens: the rest is left out, if there is at least one whole tile."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        n = grads[g].shape[-2]
        if n > tile and n % tile:
            grads[g][..., n - n % tile :, :] = 0

    return plant


def longer_than(n: int, g: int = 0) -> Callable[..., None]:
    def plant(grads: Gradients, *inputs: Any) -> None:
        if grads[g].shape[-2] > n:
            grads[g][...] *= 2

    return plant


def whole_tiles(tile: int, g: int = 0) -> Callable[..., None]:
    """An empty last tile: wrong only if the tokens fill all tiles."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        if grads[g].shape[-2] % tile == 0:
            grads[g][..., -1, :] = np.nan

    return plant


def batch_of_one(g: int = 0) -> Callable[..., None]:
    def plant(grads: Gradients, *inputs: Any) -> None:
        if len(inputs[0]) == 1:
            grads[g][...] = -grads[g]

    return plant


def sums_up_to(n: int, g: int) -> Callable[..., None]:
    """A sum over tokens (dweight, dbias) of at most n tokens of each sequence."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        grads[g][...] -= inputs[-1][:, n:].sum(axis=(0, 1)).sum()

    return plant


def several_sequences(g: int) -> Callable[..., None]:
    """A gradient that is summed over sequences is divided by their number: right if there is one."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        if len(inputs[0]) > 1:
            grads[g][...] /= len(inputs[0])

    return plant


def wider_than(n: int, g: int = 0) -> Callable[..., None]:
    """Another path for wide rows, wrong everywhere."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        if grads[g].shape[-1] > n:
            grads[g][...] *= 1.001

    return plant


def rest_of_columns(tile: int, g: int = 0) -> Callable[..., None]:
    """A loop over whole tiles of columns."""

    def plant(grads: Gradients, *inputs: Any) -> None:
        n = grads[g].shape[-1]
        if n > tile and n % tile:
            grads[g][..., n - n % tile :] = 0

    return plant


TOKENS = (16, 32, 64, 128)
COLUMNS = (32, 64, 100, 128)
PARTS = (16, 32, 64, 100)  # tiles of columns; 128 columns fill those of 16, 32, 64 and 128
TILED = (
    *("attention", "head", "multi_head", "layer_norm", "rms_norm", "linear", "lora", "softmax_cross_entropy"),
    *("rope", "swiglu", "gelu", "embedding"),
)
OF_PARTS = ("block", "head_dropout", "next_token_loss", "tied_embedding")  # out of the same parts, and slower
SUMMED = {"layer_norm": 1, "rms_norm": 1, "linear": 1, "head": 1, "multi_head": 3}  # a gradient summed over tokens
NEWER = ("softmax", "relu", "silu", "rope_attention", "attention_dropout", "grouped_query_attention")
SEVERAL = ("self_attention", "cross_attention", "post_norm_block")
PLANTED = {
    **{f"{layer}: tokens from {n}": (layer, beyond_tokens(n)) for layer in TILED for n in TOKENS},
    **{f"{layer}: columns from {n}": (layer, beyond_columns(n)) for layer in TILED for n in COLUMNS},
    **{f"{layer}: wider than {n}": (layer, wider_than(n)) for layer in TILED for n in COLUMNS},
    **{f"{layer}: the rest of a tile of {n}": (layer, last_partial(n)) for layer in TILED for n in TOKENS},
    **{f"{layer}: the rest of {n} columns": (layer, rest_of_columns(n)) for layer in TILED for n in PARTS},
    **{f"{layer}: longer than {n}": (layer, longer_than(n)) for layer in TILED for n in TOKENS},
    **{f"{layer}: full tiles of {n}": (layer, whole_tiles(n)) for layer in TILED for n in TOKENS},
    **{f"{layer}: one sequence": (layer, batch_of_one()) for layer in (*TILED, *OF_PARTS)},
    **{f"{layer}: several sequences": (layer, several_sequences(g)) for layer, g in SUMMED.items()},
    **{f"{layer}: sums from column {n}": (layer, beyond_columns(n, g)) for layer, g in SUMMED.items() for n in COLUMNS},
    **{f"{layer}: tokens from 128": (layer, beyond_tokens(128)) for layer in OF_PARTS},
    **{f"{layer}: columns from 128": (layer, beyond_columns(128)) for layer in OF_PARTS},
    **{f"{layer}: the rest of a tile of 64": (layer, last_partial(64)) for layer in OF_PARTS},
    **{f"layer_norm: dweight of {n} tokens": ("layer_norm", sums_up_to(n, 1)) for n in TOKENS},
    **{f"linear: dbias of {n} tokens": ("linear", sums_up_to(n, 2)) for n in TOKENS},
    **{f"attention: dk from key {n}": ("attention", beyond_tokens(n, 1)) for n in TOKENS},
    **{f"attention: dv, columns from {n}": ("attention", beyond_columns(n, 2)) for n in COLUMNS},
    **{f"linear: dweight, rows from {n}": ("linear", beyond_tokens(n, 1)) for n in TOKENS},
    **{f"lora: ddown, a rank from {n}": ("lora", beyond_columns(n, 1)) for n in (16, 32, 64)},
    **{f"{layer}: tokens from {n}": (layer, beyond_tokens(n)) for layer in NEWER for n in (16, 128)},
    **{f"{layer}: columns from {n}": (layer, beyond_columns(n)) for layer in SEVERAL for n in (32, 64)},
    **{f"{layer}: the rest of a tile of 64": (layer, last_partial(64)) for layer in SEVERAL},
    **{f"{layer}: one sequence": (layer, batch_of_one()) for layer in SEVERAL if layer != "post_norm_block"},
    **{f"loss_head: dweight, columns from {n}": ("loss_head", beyond_columns(n, 1)) for n in COLUMNS},
    **{f"tied_head: rows from {n}": ("tied_head", beyond_tokens(n)) for n in TOKENS},
    **{f"dpo: pairs from {n}": ("dpo", beyond_pairs(n)) for n in TOKENS},
    **{f"adamw_step: columns from {n}": ("adamw_step", beyond_columns(n)) for n in COLUMNS},
    **{f"adamw: columns from {n}": ("adamw", beyond_columns(n)) for n in COLUMNS},
    **{f"adamw: rows from {n}": ("adamw", beyond_tokens(n)) for n in TOKENS},
}  # fmt: skip


@pytest.fixture
def no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a mistake is found does not depend on its name, which takes longer."""
    monkeypatch.setattr("onfoot.check.known.explain", lambda report, magnitudes: None)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, one in enumerate(PLANTED)]
)
def test_a_mistake_that_begins_at_some_size_is_found(mistake: str, no_diagnosis: None) -> None:
    layer, plant = PLANTED[mistake]
    assert not check_layer(LAYERS[layer], planted(layer, plant), dtypes="float64", arrays="numpy").passed


@pytest.mark.parametrize("layer", LAYERS)
def test_the_functions_that_carry_the_mistakes_are_right_without_them(layer: str) -> None:
    report = check_layer(LAYERS[layer], planted(layer, lambda grads, *inputs: None), arrays="numpy")
    assert report.passed and len([o for o in report.outcomes if o.case.large]) == 2 * len(LARGE)


def tiled(q, k, v, dout, tile=16, start=0):
    """Flash attention's loop over tiles of keys; with `start`, sums are not rescaled after so many keys."""
    n, d = q.shape[-2:]
    out, total, top = np.zeros_like(dout), np.zeros((*q.shape[:-1], 1)), np.full((*q.shape[:-1], 1), -np.inf)
    visible = np.tril(np.ones((n, n), bool))
    scores = np.where(visible, q @ k.swapaxes(-1, -2) / np.sqrt(d), -np.inf)
    for i in range(0, n, tile):
        part = scores[..., i : i + tile]
        new = np.maximum(top, part.max(-1, keepdims=True))
        weights = np.exp(part - new)
        rescale = 1.0 if start and i >= start else np.exp(top - new)
        out, total, top = (
            out * rescale + weights @ v[..., i : i + tile, :],
            total * rescale + weights.sum(-1, keepdims=True),
            new,
        )
    out, rho = out / total, np.exp(scores - top) / total
    ds = rho * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True)) / np.sqrt(d)
    return ds @ k, ds.swapaxes(-1, -2) @ q, rho.swapaxes(-1, -2) @ dout


@pytest.mark.parametrize("start", TOKENS)
def test_a_running_maximum_that_is_not_rescaled_after_a_tile_is_found(start: int) -> None:
    assert onfoot.check.attention(tiled, dtypes="float64").passed
    report = onfoot.check.attention(lambda *x: tiled(*x, start=start), dtypes="float64")
    assert not report.passed
    assert {o.case.name for o in report.failed} <= set(LARGE)


def test_the_report_says_that_only_large_sizes_are_wrong_and_where() -> None:
    report = onfoot.check.attention(planted("attention", beyond_tokens(128)), dtypes="float64", arrays="numpy")
    text = " ".join(str(report).split())
    assert "Right in every case with sizes up to 8, wrong only in larger ones: look for a tile" in text
    assert "along axis 2: indices 128 to 192" in text
    assert "Example: dq[0, 0, " in text and "in “many tokens, many features” is " in text


def test_a_known_mistake_on_the_path_for_long_sequences_is_named() -> None:
    def backward(q, k, v, dout):
        dq, dk, dv = all_heads(q, k, v, dout, True)
        factor = np.sqrt(q.shape[-1]) if q.shape[-2] > 64 else 1.0
        return dq * factor, dk * factor, dv

    report = onfoot.check.attention(backward, dtypes="float64")
    assert report.diagnosis is not None
    assert report.diagnosis.findings[0].name == "1/√d_k missing from the backward pass"


def shapes(report: LayerReport, argument: int = 0) -> set[tuple[int, ...]]:
    return {o.case.inputs[argument].shape for o in report.outcomes}


def test_sizes_are_those_that_were_asked_for() -> None:
    report = onfoot.check.attention(correct("attention"), tokens=48, head_dim=16, heads=3, batch=2)
    assert report.passed and shapes(report) == {(2, 3, 48, 16)}
    assert "one token" not in {o.case.name for o in report.outcomes}  # its name would be untrue
    report = onfoot.check.layer_norm(correct("layer_norm"), width=768)
    assert report.passed and {shape[-1] for shape in shapes(report)} == {768}
    report = onfoot.check.linear(correct("linear"), width=(8, 24))
    assert {n for shape in shapes(report, 1) for n in shape} == {8, 24}


def test_heads_and_width_of_a_layer_whose_heads_share_the_width() -> None:
    report = onfoot.check.multi_head(
        lambda *x, n_head: LAYERS["multi_head"].reference(*x, n_head=n_head), heads=4, width=32
    )
    assert report.passed and report.options["n_head"] == 4
    assert {shape[-1] for shape in shapes(report)} == {32}
    report = onfoot.check.multi_head(lambda *x, n_head: LAYERS["multi_head"].reference(*x, n_head=n_head), n_head=5)
    assert report.passed and all(shape[-1] % 5 == 0 for shape in shapes(report))


def test_a_function_that_declares_its_sizes_gets_no_others() -> None:
    seen = set()

    @onfoot.check.sizes(tokens_multiple_of=16, head_dim=(64, 128))
    def kernel(q, k, v, dout):
        assert q.shape[-2] % 16 == 0 and q.shape[-1] in (64, 128), "these sizes are not supported"
        seen.add(q.shape[-2:])
        return all_heads(q, k, v, dout, True)

    assert onfoot.check.attention(kernel).passed
    assert len({tokens for tokens, _ in seen}) > 3 and {dim for _, dim in seen} == {64, 128}
    assert max(tokens for tokens, _ in seen) > 128
    with pytest.raises(ValueError, match="tokens=40 is not among the sizes that the function declares: 16, 32, 48"):
        onfoot.check.attention(kernel, tokens=40)


def test_a_wrong_function_with_declared_sizes_is_found_and_named() -> None:
    def kernel(q, k, v, dout):
        assert q.shape[-1] == 64
        dq, dk, dv = all_heads(q, k, v, dout, True)
        return 8 * dq, 8 * dk, dv

    kernel.sizes = {"head_dim": 64}
    report = onfoot.check.attention(kernel, dtypes="float64")
    assert report.diagnosis is not None
    assert report.diagnosis.findings[0].name == "1/√d_k missing from the backward pass"


def test_values_of_another_width_than_keys_are_tried_but_not_counted() -> None:
    def same_width(q, k, v, dout):
        assert v.shape[-1] == q.shape[-1], "d_v must be d_k"
        return all_heads(q, k, v, dout, True)

    report = onfoot.check.attention(same_width)
    assert report.passed and "“values of another width”: v and dout are d_v wide" in " ".join(str(report).split())
    strict = onfoot.check.attention(same_width, strict=True)
    assert not strict.passed and "d_v must be d_k" in str(strict)


INVALID = {
    "layer gelu has no size head_dim; its sizes are batch, tokens, width": lambda: onfoot.check.gelu(abs, head_dim=4),
    "tokens must be a number >= 1 or several of them, got 0": lambda: onfoot.check.gelu(abs, tokens=0),
    "tokens must be a number >= 1 or several of them, got 2.5": lambda: onfoot.check.gelu(abs, tokens=2.5),
    "head_dim=7 must be even": lambda: onfoot.check.rope(abs, head_dim=7),
    "width=9 must be a multiple of the number of heads, 2": lambda: onfoot.check.block(abs, width=9),
    "n_head=3 and heads=2 are the same size": lambda: onfoot.check.block(abs, n_head=3, heads=2),
    "unknown size 'length'": lambda: onfoot.check.sizes(length=3),
    "tokens is declared twice": lambda: onfoot.check.sizes(tokens=3, tokens_multiple_of=3),
    "tokens_multiple_of must be one number": lambda: onfoot.check.sizes(tokens_multiple_of=(3, 4)),
    "layer linear has no size heads": lambda: check_layer(LAYERS["linear"], onfoot.check.sizes(heads=2)(lambda x: x)),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_sizes_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        INVALID[message]()


@pytest.mark.parametrize("layer", LAYERS)
def test_every_case_has_allowed_sizes_and_different_shapes_where_any_is_allowed(layer: str) -> None:
    found = LAYERS[layer]
    sizes, _ = sizes_for(
        found, {}, {f"{size}_multiple_of": 4 for size in found.sizes if size not in ("batch", "heads")}
    )
    options = dict(found.options)
    for case in all_cases(found, 3, options, sizes):
        assert found.sizes == ("batch",) or all(n % 4 == 0 for n in np.shape(case.inputs[0])[-1:]), case.name
    assert len({np.shape(case.inputs[0]) for case in all_cases(found, 3, options, read_sizes({}))}) > 3


def test_a_slow_function_is_run_in_large_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.check.known.SLOW", 0.0)
    report = onfoot.check.gelu(correct("gelu"), arrays="numpy")
    assert report.passed
    assert {o.dtype for o in report.outcomes if o.case.large} == {"float64"}
    assert any("run in float64 only" in warning for warning in report.warnings)
