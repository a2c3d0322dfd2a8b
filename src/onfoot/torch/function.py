"""From a forward/backward pair to a function that PyTorch's autograd can differentiate.

One factory serves every pair. Autograd sees only tensors that are arguments by themselves, and frees or guards only
tensors that went through `save_for_backward`; the pairs' arguments and what they save are nested (a `Head`, a list of
heads, a scale beside a tensor). So both are taken apart into a list of tensors and the tree they came from.
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
    """The place of a tensor in the list that it was moved to."""

    index: int


def take_apart(tree: Any, tensors: list[Tensor]) -> Any:
    """Moves the tensors of nested tuples and lists to the end of `tensors`, and leaves a `Slot` for each."""
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
    """(index of a tensor, its gradient) for an argument and the gradients of it, which are nested alike."""
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
    """A context in which autocast is on or off as it is now."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], wrt: Sequence[str]
) -> Callable[..., Tensor]:
    """The forward of a pair as a function of tensors whose gradients come from the backward of the pair.

    `wrt` names the arguments whose gradients `backward` returns, in its order. Second derivatives are refused: what a
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
        if torch.is_grad_enabled():  # PyTorch's once_differentiable lets some second derivatives pass as 0
            raise RuntimeError(f"{name}: its gradient is a formula, not a graph; create_graph=True cannot be had here")
        with ctx.autocast:  # the products of the two passes must be of the same dtypes
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
                    f"{name}: {argument} requires a gradient, but only {', '.join(wrt)} can have one here; "
                    f"pass {argument}.detach()"
                )
        return node.apply(tuple(tree), *tensors)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "onfoot.torch"
    call.__signature__ = signature.replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return call
