"""The layers that only the exercises have: right by autograd and finite differences, and each mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onfoot.check.known import check_layer
from onfoot.check.layer import Case, Layer, Mistake
from onfoot.check.layers import LAYERS
from onfoot.learn.layers import OWN_LAYERS
from onfoot.learn.layers.gpt2 import BLOCKS, HEADS, NAMES

OURS = {name: layer for name, layer in OWN_LAYERS.items() if layer.name not in LAYERS}
EACH = pytest.mark.parametrize("name", OURS)


def cases(layer: Layer) -> list[Case]:
    return layer.cases(np.random.default_rng(11), **layer.options)


def close(found: Any, right: Any) -> bool:
    return found.shape == right.shape and np.allclose(found, right, rtol=1e-9, atol=1e-11)


@EACH
def test_the_steps_compute_the_exact_result(name: str) -> None:
    layer = OURS[name]
    for case in cases(layer):
        right = layer.reference(*case.inputs, **layer.options)
        found = layer.run(layer.pieces, case, layer.options)
        assert [close(a, b) for a, b in zip(found, right, strict=True)] == [True] * len(layer.gradients)


def attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def self_attention(x: Any, weight: Any, bias: Any) -> Any:
    b, t, c = x.shape
    q, k, v = ((x @ weight + bias).reshape(b, t, 3, 2, c // 2)[:, :, i].transpose(1, 2) for i in range(3))
    return attention(q, k, v).transpose(1, 2).reshape(b, t, c)


def grouped(q: Any, k: Any, v: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def network(*inputs: Any) -> Any:
    """GPT-2's mean loss, in PyTorch's own layers."""
    *values, tokens, targets = inputs
    w = {name.removeprefix("transformer."): value for name, value in zip(NAMES, values, strict=True)}
    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    width = x.shape[-1]

    def norm(x: Any, layer: str) -> Any:
        return F.layer_norm(x, (width,), w[f"{layer}.weight"], w[f"{layer}.bias"], 1e-5)

    def dense(x: Any, layer: str) -> Any:
        return x @ w[f"{layer}.weight"] + w[f"{layer}.bias"]

    assert HEADS == 2
    for b in range(BLOCKS):
        h = f"h.{b}"
        heads = self_attention(norm(x, f"{h}.ln_1"), w[f"{h}.attn.c_attn.weight"], w[f"{h}.attn.c_attn.bias"])
        x = x + dense(heads, f"{h}.attn.c_proj")
        hidden = F.gelu(dense(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + dense(hidden, f"{h}.mlp.c_proj")
    logits = norm(x, "ln_f") @ w["wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


AUTOGRAD: dict[str, Callable[..., Any]] = {
    "softmax": lambda scores: torch.softmax(scores, -1),
    "loss_with_ignored": lambda logits, targets, divisor: (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100) / divisor
    ),
    "self_attention": self_attention,
    "grouped_query": grouped,
    "gpt2": network,
}


@pytest.mark.parametrize("name", AUTOGRAD)
def test_the_exact_gradients_are_those_of_autograd(name: str) -> None:
    layer = OWN_LAYERS[name]
    for case in cases(layer):
        given = [torch.from_numpy(np.asarray(x)) for x in case.inputs]
        *inputs, dout = given if name != "gpt2" else [*given, torch.tensor(1.0, dtype=torch.float64)]
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point() and x.ndim]
        right = torch.autograd.grad(AUTOGRAD[name](*inputs), leaves, dout)
        found = layer.reference(*case.inputs, **layer.options)
        assert [close(a, b.numpy()) for a, b in zip(found, right, strict=True)] == [True] * len(layer.gradients)


def test_the_cached_attention_is_that_of_all_tokens_at_once() -> None:
    for case in cases(OURS["kv_cache"]):
        x, weight, bias, _ = map(torch.from_numpy, case.inputs)
        (found,) = OURS["kv_cache"].reference(*case.inputs)
        assert close(found, self_attention(x, weight, bias).numpy())


FORWARD: dict[str, Callable[..., Any]] = {
    "linear_tangent": lambda x, weight, bias: x @ weight + bias,
    "softmax_tangent": lambda scores: torch.softmax(scores, -1),
    "layer_norm_tangent": lambda x, weight, bias: F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5),
}


@pytest.mark.parametrize("name", FORWARD)
def test_tangents_are_those_of_autograd(name: str) -> None:
    for case in cases(OURS[name]):
        values = [torch.from_numpy(x) for x in case.inputs]
        half = len(values) // 2
        _, right = torch.autograd.functional.jvp(FORWARD[name], tuple(values[:half]), tuple(values[half:]))
        (found,) = OURS[name].reference(*case.inputs)
        assert close(found, right.numpy())


MISTAKES = [(key, mistake) for key, layer in OWN_LAYERS.items() for mistake in layer.mistakes]


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_every_mistake_of_a_layer_carries_its_name(name: str) -> None:
    layer = OWN_LAYERS[name]  # the diagnosis finds a layer's own mistakes by this name
    assert {mistake.layer for mistake in layer.mistakes} <= {layer.name}


@pytest.mark.parametrize(("key", "mistake"), MISTAKES, ids=[f"{key}: {one.name}" for key, one in MISTAKES])
def test_a_mistake_of_the_exercises_is_named(key: str, mistake: Mistake) -> None:
    layer = OWN_LAYERS[key]
    pieces, options = layer.pieces.with_changes(mistake.apply(layer.pieces)), {**layer.options, **mistake.needs}

    def wrong(*inputs: Any) -> Any:
        return layer.run(pieces, Case("", inputs, {}), options)

    report = check_layer(layer, wrong, dtypes="float64", arrays="numpy", strict=True, **mistake.needs)
    assert not report.passed and report.diagnosis is not None
    assert [finding.name for finding in report.diagnosis.findings] == [mistake.name]
    assert report.diagnosis.complete
