"""Names in people's code: which argument, gradient, size or option they mean, and where they say nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onfoot.check import LAYERS, linear
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.forms import Expected, forms_of
from onfoot.check.forms.names import gradient_named, match, size_named
from onfoot.check.layouts import axes_of, layouts

# layer, names -> the arguments they mean
MEANT = [
    ("linear", "dout x weight bias", "dout x weight bias"),
    ("linear", "grad_output inp W", "dout x weight"),
    ("linear", "X W b dY", "x weight bias dout"),
    ("layer_norm", "g x gamma beta", "dout x weight bias"),
    ("layer_norm", "x g b dy", "x weight bias dout"),
    ("layer_norm", "hidden_states scale shift upstream", "x weight bias dout"),
    ("rms_norm", "dL_dy x w", "dout x weight"),
    ("attention", "do Q K V", "dout q k v"),
    ("attention", "query key value grad", "q k v dout"),
    ("softmax_cross_entropy", "y t", "logits targets"),
    ("softmax_cross_entropy", "logits y", "logits targets"),
    ("embedding", "grad_out idx table", "dout ids weight"),
    ("lora", "x W A B alpha dout", "x weight down up alpha dout"),
    ("head", "x Wq bq Wk bk Wv bv dout", "a w_q b_q w_k b_k w_v b_v dout"),
    ("multi_head", "q k v W_Q W_K W_V dout", "query key value w_q w_k w_v dout"),
    ("swiglu", "gate up g", "gate up dout"),
    ("rope", "dy x pos", "dout x positions"),
    ("adamw", "w dw m v t", "param grad m v step"),
]


@pytest.mark.parametrize(("layer", "names", "meant"), MEANT)
def test_names_mean_arguments(layer: str, names: str, meant: str) -> None:
    found = match(names.split(), LAYERS[layer].arguments)
    assert found.unknown == [] and " ".join(found.arguments.values()) == meant


def test_names_that_say_nothing_are_unknown() -> None:
    assert match(["foo", "x"], LAYERS["linear"].arguments).unknown == ["foo"]
    assert match(["epsilon", "x"], LAYERS["layer_norm"].arguments, {"eps": 1}).options == {"epsilon": "eps"}


KEYS = {
    "linear": {
        "dx": "dx", "dX": "dx", "grad_x": "dx", "d_x": "dx", "x": "dx", "x_grad": "dx", "grad_input": "dx",
        "dW": "dweight", "grad_weight": "dweight", "dL_dW": "dweight", "weight_grad": "dweight", "gW": "dweight",
        "db": "dbias", "b": "dbias", "dbias": "dbias", "grad_b": "dbias", "hidden_state": None, "cache": None,
    },
    "layer_norm": {"dgamma": "dweight", "dbeta": "dbias", "gamma": "dweight", "grad_gamma": "dweight"},
    "attention": {"dQ": "dq", "dK": "dk", "grad_value": "dv", "d_q": "dq"},
    "head": {"dWq": "dw_q", "dW_k": "dw_k", "db_v": "db_v", "grad_wv": "dw_v"},
    "lora": {"dA": "ddown", "dB": "dup", "grad_A": "ddown", "dup": "dup"},
}  # fmt: skip


@pytest.mark.parametrize(("layer", "key"), [(layer, key) for layer, keys in KEYS.items() for key in keys])
def test_keys_mean_gradients(layer: str, key: str) -> None:
    assert gradient_named(key, LAYERS[layer].gradients) == KEYS[layer][key]


def test_sizes_of_a_constructor() -> None:
    inputs = {"x": np.zeros((2, 3, 5)), "weight": np.zeros((5, 7)), "bias": np.zeros(7)}
    found = {
        name: size_named(name, inputs, {"eps": 1e-5}) for name in ("n_in", "out_features", "dim", "eps", "p", "foo")
    }
    assert found == {"n_in": 5, "out_features": 7, "dim": 5, "eps": 1e-5, "p": 0.0, "foo": None}
    assert size_named("num_embeddings", {"ids": np.zeros((2, 3), int), "weight": np.zeros((9, 4))}, {}) == 9
    assert size_named("d_model", {"x": np.zeros((2, 3, 8))}, {}) == 8


def forms(function: Any, layer: str) -> list[Any]:
    found = LAYERS[layer]
    return forms_of(function, Expected(found.name, found.arguments, found.gradients, found.options, False))


def test_one_letter_names_are_taken_in_the_order_of_the_contract() -> None:
    def backward(a, b, c, d):  # by its name alone, b would be the bias
        return d @ b.T, np.tensordot(a, d, ([0, 1], [0, 1])), d.sum((0, 1))

    assert forms(backward, "linear")[0].sentence == ""
    assert linear(backward, dtypes="float64").passed


def test_only_the_upstream_gradient_is_taken_by_name_if_the_rest_says_nothing() -> None:
    def backward(grad_output, one, two, three):
        return grad_output @ two.T, np.tensordot(one, grad_output, ([0, 1], [0, 1])), grad_output.sum((0, 1))

    assert linear(backward, dtypes="float64").passed


# Layouts


def test_the_axes_of_every_argument_are_found() -> None:
    heads = ("batch", "heads", "tokens", "head_dim")
    assert axes_of(LAYERS["attention"], {"causal": True}) == dict.fromkeys(("q", "k", "v", "dout"), heads)
    rows = ("batch", "tokens", "width")
    assert axes_of(LAYERS["layer_norm"], {"eps": 1e-5}) == {
        "x": rows, "weight": ("width",), "bias": ("width",), "dout": rows
    }  # fmt: skip
    assert axes_of(LAYERS["rope"], {"theta": 1e4})["positions"] == ("tokens",)
    assert axes_of(LAYERS["embedding"], {})["weight"] == ("vocabulary", "width")


POSSIBLE = {
    "attention": "bthd sequence single_head",
    "linear": "transposed rows rows+transposed sequence sequence+transposed",
    "layer_norm": "rows sequence",
    "gelu": "rows sequence",
    "softmax_cross_entropy": "rows",  # a mean over the batch is not the sum of the sequences' means
    "next_token_loss": "",  # in rows, the next token would belong to another sequence
    "rope": "bthd sequence single_head",
    "embedding": "rows sequence",
    "adamw": "",
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_layer_has_the_layouts_that_give_the_same_gradients(name: str) -> None:
    layer = LAYERS[name]
    case = first_case(layer, 1, layer.options, ANY)
    assert " ".join(layout.option for layout in layouts(layer, case, layer.options)) == POSSIBLE[name]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layout_and_back_is_the_same_gradient(name: str) -> None:
    """A function that returns its inputs: turned into a layout and back, they must be the inputs, or their sum."""
    layer = LAYERS[name]
    case = first_case(layer, 1, layer.options, ANY)
    given = dict(zip(layer.arguments, case.inputs, strict=True))
    for layout in layouts(layer, case, layer.options):
        calls = layout.calls(case.inputs)
        for i, argument in enumerate(layer.arguments):
            x = given[argument]
            if f"d{argument}" in layer.gradients and isinstance(x, np.ndarray):
                found = layout.joined(argument, [call[i] for call in calls], x.shape)
                times = 1 if set(layout._looped()) & set(layout.axes[argument]) else len(calls)
                np.testing.assert_allclose(found, times * x)
    assert axes_of(layer, layer.options).keys() == given.keys()
