"""Where the chain breaks: mistakes planted between the layers of composite layers are located, path by path."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from planted.network import Spoilt, merge, split
from planted.registry import autograd
from right import RIGHT

import onfoot.check
from onfoot.arrays import to_numpy
from onfoot.check.case_sizes import ANY
from onfoot.check.chain import Chain, find_break, is_composite, small_case
from onfoot.check.layers import LAYERS

Change = Callable[[torch.Tensor], torch.Tensor]
Spoils = dict[str, Change]


def at(spoils: Spoils, place: str, x: torch.Tensor) -> torch.Tensor:
    """x, with the gradient that arrives at this place changed."""
    return Spoilt.apply(x, spoils[place]) if place in spoils else x


def attend(spoils: Spoils, qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = (split(z) for z in qkv.chunk(3, -1))
    scores = at(spoils, "scores", q @ k.mT / q.shape[-1] ** 0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return merge(at(spoils, "rho", scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ v)


def block(spoils: Spoils) -> Callable[..., Any]:
    """GPT-2's block by autograd; `spoils` maps places between its layers to changes of the gradient there."""

    def forward(x, g1, b1, w_qkv, b_qkv, w_proj, b_proj, g2, b2, w_fc, b_fc, w_out, b_out):
        d = x.shape[-1:]
        normed = at(spoils, "ln_1", F.layer_norm(at(spoils, "x", x), d, g1, b1))
        mixed = at(spoils, "heads", attend(spoils, at(spoils, "qkv", normed @ w_qkv + b_qkv)))
        h = at(spoils, "h", at(spoils, "x_skip", x) + mixed @ w_proj + b_proj)
        normed = at(spoils, "ln_2", F.layer_norm(at(spoils, "h_branch", h), d, g2, b2))
        hidden = at(spoils, "gelu", F.gelu(at(spoils, "fc", normed @ w_fc + b_fc), approximate="tanh"))
        return at(spoils, "h_skip", h) + hidden @ w_out + b_out

    return lambda *arguments: autograd(forward, arguments[:-1], arguments[-1])


def packed(spoils: Spoils) -> Callable[..., Any]:
    def forward(x, w_qkv, b_qkv, w_o, b_o):
        qkv = at(spoils, "qkv", at(spoils, "x", x) @ w_qkv + b_qkv)
        return at(spoils, "heads", attend(spoils, qkv)) @ w_o + b_o

    return lambda *arguments: autograd(forward, arguments[:-1], arguments[-1])


def located(layer: str, backward: Callable[..., Any]) -> Chain | None:
    found = LAYERS[layer]
    case = small_case(found, found.options, ANY)
    assert case is not None
    tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in case.inputs]
    return find_break(found, found.options, case, [to_numpy(g) for g in backward(*tensors)])


def zero(d: torch.Tensor) -> torch.Tensor:
    return 0 * d


def bent(d: torch.Tensor) -> torch.Tensor:
    return d + 0.1 * d**3


# place and change: (right down to, the first wrong step, how)
IN_BLOCK: dict[str, tuple[Spoils, str, str, str]] = {
    "the skip gradient around the MLP missing": (
        {"h_skip": zero},
        "dln_2_weight and dln_2_bias",
        "the gradient below the MLP",
        "dout is missing",
    ),
    "the MLP's gradient missing": (
        {"h_branch": zero},
        "dln_2_weight and dln_2_bias",
        "the gradient below the MLP",
        "the branch's gradient is missing",
    ),
    "the MLP's gradient with the wrong sign": (
        {"h_branch": torch.neg},
        "dln_2_weight and dln_2_bias",
        "the gradient below the MLP",
        "the branch's gradient has the wrong sign",
    ),
    "the MLP's gradient twice": (
        {"h_branch": lambda d: 2 * d},
        "dln_2_weight and dln_2_bias",
        "the gradient below the MLP",
        "the branch's gradient is 2 times too large",
    ),
    "the skip gradient around attention missing": (
        {"x_skip": zero},
        "dln_1_weight and dln_1_bias",
        "dx",
        "the gradient below the MLP is missing",
    ),
    "attention's gradient missing": (
        {"x": zero},
        "dln_1_weight and dln_1_bias",
        "dx",
        "the branch's gradient is missing",
    ),
    "the gradient of GELU's output": (
        {"gelu": lambda d: 3 * d},
        "dout_weight and dout_bias",
        "a linear layer's input gradient (the second MLP layer) // the gradient of GELU's input",
        "which is 3 times too large",
    ),
    "the gradient of GELU's input": (
        {"fc": bent},
        "dout_weight and dout_bias",
        "a linear layer's input gradient (the second MLP layer) // the gradient of GELU's input",
        "",
    ),
    "the gradient of ln_2's output": (
        {"ln_2": bent},
        "dfc_weight and dfc_bias",
        "a linear layer's input gradient (the first MLP layer)",
        "",
    ),
    "the gradient of the heads' outputs": (
        {"heads": bent},
        "dproj_weight and dproj_bias",
        "a linear layer's input gradient (the output projection) // the split of dout into heads",
        "",
    ),
    "the keys' share of the gradient missing": (
        {"qkv": lambda d: d * torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(d.shape[-1] // 3)},
        "dproj_weight and dproj_bias",
        "dq | dk | dv",
        "dk is missing",
    ),
    "queries and keys exchanged": (
        {"qkv": lambda d: torch.cat([d.chunk(3, -1)[i] for i in (1, 0, 2)], -1)},
        "dproj_weight and dproj_bias",
        "dq | dk | dv",
        "",
    ),
    "the gradient of ln_1's output": (
        {"ln_1": bent},
        "dattn_weight and dattn_bias",
        "a linear layer's input gradient (the q, k, v projection)",
        "",
    ),
    "the gradient at the first sum": (
        {"h": bent},
        "dln_2_weight and dln_2_bias",
        "the gradient below the MLP",
        "",
    ),
}
IN_SELF_ATTENTION: dict[str, tuple[Spoils, str, str, str]] = {
    "the output projection": (
        {"heads": bent},
        "dw_o and db_o",
        "a linear layer's input gradient (the output projection) // the gradient of the heads' outputs",
        "",
    ),
    "only the values": (
        {"qkv": lambda d: d * torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(d.shape[-1] // 3)},
        "dw_o and db_o",
        "dq | dk | dv",
        "dq and dk are missing",
    ),
    "the queries' gradient with the wrong sign": (
        {"qkv": lambda d: d * torch.tensor([-1.0, 1.0, 1.0]).repeat_interleave(d.shape[-1] // 3)},
        "dw_o and db_o",
        "dq | dk | dv",
        "dq has the wrong sign",
    ),
    "the gradient of x alone": (
        {"x": bent},
        "dw_qkv and db_qkv",
        "a linear layer's input gradient (the q, k, v projection)",
        "",
    ),
}
EVERY = [("block", block, name, one) for name, one in IN_BLOCK.items()]
EVERY += [("self_attention", packed, name, one) for name, one in IN_SELF_ATTENTION.items()]


@pytest.mark.parametrize(("layer", "made", "name", "one"), EVERY, ids=lambda x: x if isinstance(x, str) else "")
def test_a_break_is_located(layer: str, made: Callable[..., Any], name: str, one: tuple[Spoils, str, str, str]) -> None:
    spoils, right, steps, how = one
    found = located(layer, made(spoils))
    assert found is not None
    assert " and ".join(found.right) == right
    assert set(steps.split(" // ")) & set(found.steps), found.steps
    assert found.how == how
    assert not found.alone


def test_the_gradients_that_follow_are_all_wrong_ones_and_no_others() -> None:
    found = located("block", block({"ln_2": bent}))
    assert found is not None
    below = ("dx", "dln_1_weight", "dln_1_bias", "dattn_weight", "dattn_bias", "dproj_weight", "dproj_bias")
    assert found.follow == [*below, "dln_2_weight", "dln_2_bias"]


def test_a_second_mistake_in_a_last_step_is_told_apart() -> None:
    def backward(*arguments: Any) -> Any:
        grads = list(block({"h_skip": zero})(*arguments))
        grads[3] = torch.tanh(grads[3])  # dattn_weight
        return grads

    found = located("block", backward)
    assert found is not None
    assert found.steps == ["the gradient below the MLP"] and found.how == "dout is missing"
    assert found.alone == ["dattn_weight"] and "dattn_weight" not in found.follow
    assert "Wrong besides: dattn_weight." in str(found)


def test_two_last_steps_leave_the_chain_right() -> None:
    def backward(*arguments: Any) -> Any:
        grads = list(block({})(*arguments))
        grads[5], grads[9] = torch.tanh(grads[5]), torch.tanh(grads[9])
        return grads

    found = located("block", backward)
    assert found is not None and found.steps == []
    assert str(found) == "The chain is right down to dx. Wrong at their own ends: dproj_weight and dfc_weight."


def test_what_no_single_step_explains_is_not_said() -> None:
    """A mistake of the forward pass changes several steps; noise in every gradient fits none."""

    def without_mask(*arguments: Any) -> Any:
        def forward(x, w_qkv, b_qkv, w_o, b_o):
            q, k, v = (split(z) for z in (x @ w_qkv + b_qkv).chunk(3, -1))
            return merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v) @ w_o + b_o

        return autograd(forward, arguments[:-1], arguments[-1])

    assert located("self_attention", lambda *a: [g + 0.01 * g.abs().sqrt() for g in packed({})(*a)]) is None
    found = located("self_attention", without_mask)
    assert found is None or set(found.alone) | set(found.follow) >= {"dx", "dw_qkv", "dw_o"}


@pytest.mark.parametrize("layer", [name for name, layer in LAYERS.items() if is_composite(layer)])
def test_a_right_function_has_no_break(layer: str) -> None:
    assert located(layer, RIGHT[layer][0]) is None


def test_every_composite_layer_has_a_small_case_and_no_single_op_is_one() -> None:
    composite = {name for name, layer in LAYERS.items() if is_composite(layer)}
    assert composite >= {"head", "multi_head", "self_attention", "cross_attention", "block", "tied_head", "loss_head"}
    assert not composite & {"attention", "layer_norm", "linear", "gelu", "adamw_step", "softmax"}


def test_the_report_has_the_break_as_text_and_for_programs() -> None:
    report = onfoot.check.block(block({"h_skip": zero}), dtypes="float64", arrays="torch")
    text = " ".join(str(report).split())
    assert "1. the skip connection around the MLP missing" in text
    assert (
        "Where the chain breaks: Right down to dln_2_weight and dln_2_bias. First wrong: the gradient below the MLP, "
        "dout is missing." in text
    )
    assert "Right: gradient below the MLP: dout + the gradient from ln_2" in text
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))["chain"]
    assert found["steps"] == ["the gradient below the MLP"] and found["right"] == ["dln_2_weight", "dln_2_bias"]
    assert found["text"] == str(report.chain)


def test_a_mistake_that_begins_at_some_size_has_no_break_in_the_small_case() -> None:
    def backward(*arguments: Any) -> Any:
        spoils = {"h_skip": zero} if arguments[0].shape[1] > 64 else {}
        return block(spoils)(*arguments)

    report = onfoot.check.block(backward, dtypes="float64", arrays="torch")
    assert not report.passed and report.chain is None
