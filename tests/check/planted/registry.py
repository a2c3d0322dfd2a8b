"""Functions with one mistake each, by layer and expected diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]
PLANTED: dict[tuple[str, str], Function] = {}
CHANGES: dict[
    tuple[str, str], tuple[Function, dict[str, Any]]
] = {}  # a correct function, and the keyword arguments that make it wrong
NEEDS: dict[tuple[str, str], dict[str, Any]] = {}  # options under which the mistake can be made


def plant(layer: str, name: str, **options: Any) -> Callable[[Function], Function]:
    """Registers the function below it."""

    def register(function: Function) -> Function:
        PLANTED[layer, name] = function
        NEEDS[layer, name] = options
        return function

    return register


def plant_change(layer: str, name: str, function: Function, **changes: Any) -> None:
    """Registers a correct function with keyword arguments that make it wrong; these can be combined."""
    CHANGES[layer, name] = function, changes
    PLANTED[layer, name], NEEDS[layer, name] = spoilt(function, changes), {}


def spoilt(function: Function, changes: dict[str, Any]) -> Function:
    def backward(*arguments: Any) -> Any:
        return function(*arguments, **changes)

    return backward


def autograd(forward: Callable[..., torch.Tensor], arrays: list[torch.Tensor], dout: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of some forward pass, right or wrong, by PyTorch's autograd."""
    leaves = [torch.as_tensor(a).detach().clone().requires_grad_() for a in arrays]
    y = forward(*leaves)
    upstream = torch.as_tensor(dout, dtype=y.dtype)
    return torch.autograd.grad(y, leaves, upstream, allow_unused=True)
