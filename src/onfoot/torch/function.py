"""From a forward/backward pair to a function that PyTorch's autograd can differentiate.

One factory works for every pair. Autograd sees only tensors that are direct arguments, and frees or guards only tensors
from `save_for_backward`; the pairs' arguments and what they save are nested (a `Head`, a list of heads, a tensor and a
scale). So both are flattened into a list of tensors and a tree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slot:
    """The index of a tensor in the list that it was moved to."""

    index: int


def take_apart(tree: Any, tensors: list[Tensor]) -> Any:
    """Appends the tensors of nested tuples and lists to `tensors`, and returns the tree with a `Slot` for each."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return Slot(len(tensors) - 1)
    return _rebuild(tree, [take_apart(part, tensors) for part in tree]) if _is_node(tree) else tree


def put_together(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(tree, Slot):
        return tensors[tree.index]
    return _rebuild(tree, [put_together(part, tensors) for part in tree]) if _is_node(tree) else tree


def gradient_slots(tree: Any, grads: Any) -> Iterator[tuple[int, Any]]:
    """(index of a tensor, its gradient) for an argument and its gradients, which are nested the same way."""
    if isinstance(tree, Slot):
        yield tree.index, grads
    elif _is_node(tree):
        for part, grad in zip(tree, grads, strict=True):
            yield from gradient_slots(part, grad)


def _is_node(tree: Any) -> bool:
    return isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size)


def _rebuild(tree: Any, parts: list[Any]) -> Any:
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)  # a NamedTuple takes them one by one


def _current_autocast(device: str) -> AbstractContextManager[Any]:
    """A context manager with the current autocast state."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], wrt: Sequence[str]
) -> Callable[..., Tensor]:
    """The forward of a pair as a function of tensors whose gradients come from the backward of the pair.

    `wrt` are the arguments whose gradients `backward` returns, in that order. Second derivatives raise an error: what a
    pair saves is a constant to autograd, so they would be wrong.
    """
    name = forward.__name__.removesuffix("_forward")
    signature = inspect.signature(forward)
    parameters = list(signature.parameters)
    places = [parameters.index(argument) for argument in wrt]

    def apply_forward(ctx: Any, tree: Any, *tensors: Tensor) -> Tensor:
        y, saved = forward(*put_together(tree, tensors))
        kept: list[Tensor] = []
        ctx.arguments, ctx.saved_tree = tree, take_apart(saved, kept)
        ctx.save_for_backward(*kept)
        ctx.autocast = _current_autocast(y.device.type)
        return y

    def apply_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # PyTorch's once_differentiable silently returns 0 for some second derivatives
            raise RuntimeError(f"{name}: its gradient is a formula, not a graph; create_graph=True is not supported")
        with ctx.autocast:  # both passes must use the same dtypes
            grads = backward(dy, put_together(ctx.saved_tree, ctx.saved_tensors))
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, grad in zip(places, grads if len(places) > 1 else (grads,), strict=True):
            for index, part in gradient_slots(ctx.arguments[place], grad):
                if ctx.needs_input_grad[1 + index]:  # the first argument is the tree
                    out[1 + index] = part
        return tuple(out)

    node: Any = type(
        name.title().replace("_", ""),  # y.grad_fn then reads, for example, LayerNormBackward
        (torch.autograd.Function,),
        {"forward": staticmethod(apply_forward), "backward": staticmethod(apply_backward)},
    )

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tensors: list[Tensor] = []
        tree = []
        for argument, value in bound.arguments.items():
            first = len(tensors)
            tree.append(take_apart(value, tensors))
            if argument not in wrt and torch.is_grad_enabled() and any(t.requires_grad for t in tensors[first:]):
                raise ValueError(
                    f"{name}: {argument} requires a gradient, but only {', '.join(wrt)} can have one; "
                    f"pass {argument}.detach()"
                )
        return node.apply(tuple(tree), *tensors)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "onfoot.torch"
    call.__signature__ = signature.replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return call
