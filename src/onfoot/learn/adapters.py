"""How a learner's functions are called: the arguments of the checker's layer in, its gradients out.

The checker calls `f(x, weight, bias, dout)` and expects the gradients; a learner's file has the pair `y, saved =
linear_forward(x, weight, bias)` and `linear_backward(dy, saved)`. An adapter joins the two, in the process that has
loaded the learner's file. It passes on what the learner returned, None included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from onfoot import ops
from onfoot.check.load import load_file
from onfoot.learn import references
from onfoot.ops.cross_entropy import IGNORE

Function = Callable[..., Any]


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


def _count(targets: Any) -> float:
    return float((targets != IGNORE).sum())


def _loss(module: Any, logits: Any, targets: Any, dout: Any) -> Any:
    return module.cross_entropy_forward(logits, targets, _count(targets))[0]


def _loss_backward(module: Any, logits: Any, targets: Any, dout: Any) -> Any:
    return module.cross_entropy_backward(dout, module.cross_entropy_forward(logits, targets, _count(targets))[1])


ADAPTERS: dict[str, Adapter] = {
    "linear": pair("linear"),
    "relu": pair("relu"),
    "gelu_tanh": pair("gelu_tanh"),
    "softmax": Adapter(
        "softmax_gradient",
        lambda module, scores, dout: module.softmax(scores),
        lambda module, scores, dout: module.softmax_gradient(dout, module.softmax(scores)),
        lambda scores, dout: references.softmax(scores),
    ),
    "cross_entropy": Adapter(
        "cross_entropy_backward", _loss, _loss_backward, lambda *arguments: _loss(ops, *arguments)
    ),
}


def load(target: str, adapter: str) -> Function:
    """The function that the checker calls, from a learner's file; `ask` is "backward" or "forward"."""
    path, chosen = Path(target), ADAPTERS[adapter]
    module: ModuleType = load_file(path)
    if not callable(getattr(module, chosen.function, None)):
        raise ValueError(f"{path.name} has no function {chosen.function}; write it again, with the arguments it had")

    def function(*arguments: Any, ask: str = "backward") -> Any:
        return (chosen.forward if ask == "forward" else chosen.backward)(module, *arguments)

    function.__name__ = function.__qualname__ = chosen.function
    return function
