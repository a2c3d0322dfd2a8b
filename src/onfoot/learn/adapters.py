"""How a learner's functions are called: the arguments of the checker's layer in, its gradients out.

The checker calls `f(x, weight, bias, dout)` and expects the gradients; a learner's file has the pair `y, saved =
linear_forward(x, weight, bias)` and `linear_backward(dy, saved)`. An adapter joins the two, in the process that has
loaded the learner's file. It passes on what the learner returned, None included.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.check.layers import adamw
from onfoot.check.load import load_file
from onfoot.learn.layers import gpt2, self_attention
from onfoot.ops.attention import softmax
from onfoot.ops.rope import angles, frequencies

Function = Callable[..., Any]
HEADS = gpt2.HEADS


OUR_LINE = re.compile(r" \(adapters\.py, line \d+\)")  # in an error that was raised here, not in the learner's file


class WrongReturnError(Exception):
    """What a learner's function returned cannot be used; the function itself did not raise."""


class Adapter(NamedTuple):
    """The given forward pass and the function to write, with the arguments of a layer, and our own forward pass."""

    function: str  # the learner's function that is judged
    forward: Function  # (module, *arguments) -> the output of the given forward pass
    backward: Function  # (module, *arguments) -> the gradients
    expected: Function | None  # (*arguments) -> what the given forward pass must return; None if nothing is given


def pair(name: str) -> Adapter:
    """A pair whose arguments are those of the layer."""

    def forward(module: Any, *arguments: Any) -> Any:
        return getattr(module, f"{name}_forward")(*arguments[:-1])[0]

    def backward(module: Any, *arguments: Any) -> Any:
        *inputs, dout = arguments
        _, saved = getattr(module, f"{name}_forward")(*inputs)
        return getattr(module, f"{name}_backward")(dout, saved)

    return Adapter(f"{name}_backward", forward, backward, lambda *arguments: forward(ops, *arguments))


def _loss(module: Any, logits: Any, targets: Any, divisor: Any, dout: Any) -> Any:
    return module.cross_entropy_forward(logits, targets, divisor)[0]


def _loss_backward(module: Any, logits: Any, targets: Any, divisor: Any, dout: Any) -> Any:
    return module.cross_entropy_backward(dout, module.cross_entropy_forward(logits, targets, divisor)[1])


def _one_head(module: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    return module.one_head_forward(q, k, v)[0]


def _one_head_backward(module: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    return module.one_head_backward(dout, module.one_head_forward(q, k, v)[1])


def _self_attention(module: Any, x: Any, weight: Any, bias: Any, dout: Any) -> Any:
    return module.self_attention_forward(x, weight, bias, HEADS)[0]


def _self_attention_backward(module: Any, x: Any, weight: Any, bias: Any, dout: Any) -> Any:
    return module.self_attention_backward(dout, module.self_attention_forward(x, weight, bias, HEADS)[1])


def _block(module: Any, x: Any, *rest: Any) -> Any:
    return module.block_forward(x, dict(zip(gpt2.OF_BLOCK, rest[:-1], strict=True)), HEADS)[0]


def _block_backward(module: Any, x: Any, *rest: Any) -> Any:
    *values, dout = rest
    _, saved = module.block_forward(x, dict(zip(gpt2.OF_BLOCK, values, strict=True)), HEADS)
    found = module.block_backward(dout, saved)
    if found is None:
        return None
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[1], dict):
        raise WrongReturnError("block_backward must return two values: dx, and a dict of the other gradients by name")
    return {"dx": found[0], **found[1]}


def _gpt2(module: Any, *inputs: Any) -> tuple[Any, Any]:
    *values, tokens, targets = inputs
    config = SimpleNamespace(n_layer=gpt2.BLOCKS, n_head=HEADS, layer_norm_epsilon=gpt2.EPS)
    return module.gpt2_forward(dict(zip(gpt2.NAMES, values, strict=True)), tokens, targets, config)


def _gpt2_backward(module: Any, *inputs: Any) -> Any:
    found = module.gpt2_backward(_gpt2(module, *inputs)[1])
    if found is not None and not isinstance(found, dict):
        raise WrongReturnError("gpt2_backward must return a dict of the gradients by name")
    return found


def _lora(module: Any, x: Any, weight: Any, down: Any, up: Any, alpha: float, dout: Any) -> tuple[Any, Any]:
    return module.lora_forward(x, down, up, alpha / down.shape[1])


def _lora_backward(module: Any, *arguments: Any) -> Any:
    """The gradients of the adapter alone, with the frozen layer's part of dx added: the layer has both."""
    weight, dout = arguments[1], arguments[-1]
    found = module.lora_backward(dout, _lora(module, *arguments)[1])
    if not (isinstance(found, (tuple, list)) and len(found) == 3):
        return found
    dx, ddown, dup = found
    frozen = dout @ weight.T
    return dx + frozen if getattr(dx, "shape", None) == frozen.shape else dx, ddown, dup


def _lora_linear(module: Any, x: Any, weight: Any, down: Any, up: Any, alpha: float, dout: Any) -> tuple[Any, Any]:
    return module.lora_linear_forward(x, weight, None, down, up, alpha / down.shape[1])


def _cached(module: Any, x: Any, weight: Any, bias: Any, cuts: Any) -> Any:
    """The outputs of all chunks, one behind the other; None if the first is None."""
    found, cache, begin = [], None, 0
    for length in cuts.tolist():
        part = x[:, begin : begin + length]
        returned = module.cached_attention(part, weight, bias, HEADS, cache)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            raise WrongReturnError("cached_attention must return two values: y and the new cache")
        y, cache = returned
        if y is None:
            return None
        if getattr(y, "shape", None) != part.shape:
            what = f"has shape {y.shape}" if hasattr(y, "shape") else f"is a {type(y).__name__}"
            raise WrongReturnError(f"of {length} new tokens, y {what}; expected an array of shape {part.shape}")
        found.append(y)
        begin += length
    return np.concatenate(found, axis=1)


def _rotation(module: Any, x: Any, positions: Any, dout: Any) -> tuple[Any, Any]:
    cos, sin = module.angles(positions, x.shape[-1])
    return module.rope_forward(x, cos.astype(x.dtype), sin.astype(x.dtype))


def _adamw(module: Any, param: Any, grad: Any, m: Any, v: Any, step: int) -> Any:
    given = adamw.DEFAULTS
    betas = given["beta1"], given["beta2"]
    return module.adamw_update(param, m, v, grad, given["lr"], betas, given["eps"], given["weight_decay"], step)


def _norm_tangent(module: Any, x: Any, weight: Any, bias: Any, *dots: Any) -> Any:
    return module.layer_norm_tangent(*dots, tuple(ops.layer_norm_forward(x, weight, bias)[1]))


def alone(function: str, call: Function) -> Adapter:
    """A function that has no given forward pass."""
    return Adapter(function, call, call, None)


ADAPTERS: dict[str, Adapter] = {
    "linear": pair("linear"),
    "relu": pair("relu"),
    "gelu_tanh": pair("gelu_tanh"),
    "softmax": Adapter(
        "softmax_gradient",
        lambda module, scores, dout: module.softmax(scores),
        lambda module, scores, dout: module.softmax_gradient(dout, module.softmax(scores)),
        lambda scores, dout: softmax(scores),
    ),
    "cross_entropy": Adapter(
        "cross_entropy_backward", _loss, _loss_backward, lambda *arguments: _loss(ops, *arguments)
    ),
    "embedding": pair("embedding"),
    "layer_norm": pair("layer_norm"),
    "one_head": Adapter(
        "one_head_backward",
        _one_head,
        _one_head_backward,
        lambda q, k, v, dout: ops.attention_forward(q, k, v, causal=False)[0],
    ),
    "attention": pair("attention"),
    "unmasked": Adapter(
        "attention_backward",
        lambda module, q, k, v, dout: module.attention_forward(q, k, v, False)[0],
        lambda module, q, k, v, dout: module.attention_backward(dout, module.attention_forward(q, k, v, False)[1]),
        lambda q, k, v, dout: ops.attention_forward(q, k, v, causal=False)[0],
    ),
    "self_attention": Adapter(
        "self_attention_backward",
        _self_attention,
        _self_attention_backward,
        lambda x, weight, bias, dout: self_attention.forward(x, weight, bias, HEADS),
    ),
    "block": Adapter("block_backward", _block, _block_backward, lambda *arguments: gpt2.block_output(*arguments[:-1])),
    "tied": Adapter(
        "tied_backward",
        lambda module, ids, weight, dout: module.tied_forward(ids, weight)[0],
        lambda module, ids, weight, dout: module.tied_backward(dout, module.tied_forward(ids, weight)[1]),
        lambda ids, weight, dout: weight[ids] @ weight.T,
    ),
    "gpt2": Adapter(
        "gpt2_backward",
        lambda module, *inputs: _gpt2(module, *inputs)[0],
        _gpt2_backward,
        gpt2.loss,
    ),
    "lora": Adapter(
        "lora_backward",
        lambda module, *arguments: _lora(module, *arguments)[0],
        _lora_backward,
        lambda *arguments: _lora(ops, *arguments)[0],
    ),
    "lora_linear": Adapter(
        "lora_linear_backward",
        lambda module, *arguments: _lora_linear(module, *arguments)[0],
        lambda module, *arguments: module.lora_linear_backward(arguments[-1], _lora_linear(module, *arguments)[1]),
        lambda *arguments: _lora_linear(ops, *arguments)[0],
    ),
    "kv_cache": alone("cached_attention", _cached),
    "rms_norm": pair("rms_norm"),
    "rope": Adapter(
        "rope_backward",
        lambda module, *arguments: _rotation(module, *arguments)[0],
        lambda module, *arguments: module.rope_backward(arguments[-1], _rotation(module, *arguments)[1]),
        lambda x, positions, dout: ops.rope_forward(x, *angles(positions, frequencies(10000.0, x.shape[-1])))[0],
    ),
    "swiglu": pair("swiglu"),
    "grouped_query": pair("grouped_query"),
    "adamw": alone("adamw_update", _adamw),
    "linear_tangent": alone(
        "linear_tangent",
        lambda module, x, weight, bias, *dots: module.linear_tangent(*dots, (x, weight, True)),
    ),
    "softmax_tangent": alone(
        "softmax_tangent", lambda module, scores, dot: module.softmax_tangent(dot, softmax(scores))
    ),
    "layer_norm_tangent": alone("layer_norm_tangent", _norm_tangent),
}


# the functions that a file was given, by adapter; if it is not in the table, <adapter>_forward
GIVEN: dict[str, tuple[str, ...]] = {
    "softmax": ("softmax",),
    "unmasked": ("attention_forward",),
    "rope": ("angles", "rope_forward"),
}


def missing_functions(module: Any, adapter: str) -> list[str]:
    """The given functions that a file has no longer."""
    names = GIVEN.get(adapter, (f"{adapter}_forward",)) if ADAPTERS[adapter].expected is not None else ()
    return [name for name in names if not callable(getattr(module, name, None))]


def load(target: str, adapter: str) -> Function:
    """The function that the checker calls, from a learner's file; `ask` is "backward" or "forward"."""
    path, chosen = Path(target), ADAPTERS[adapter]
    module: ModuleType = load_file(path)
    if not callable(getattr(module, chosen.function, None)):
        raise ValueError(f"{path.name} has no function {chosen.function}; write it again, with the arguments it had")
    missing = missing_functions(module, adapter)
    if missing:
        raise ValueError(
            f"{path.name} has no function {missing[0]}, which was given; "
            f"this prints the file as it was given: onfoot learn show {path.stem}"
        )

    def function(*arguments: Any, ask: str = "backward") -> Any:
        return (chosen.forward if ask == "forward" else chosen.backward)(module, *arguments)

    function.__name__ = function.__qualname__ = chosen.function
    return function
