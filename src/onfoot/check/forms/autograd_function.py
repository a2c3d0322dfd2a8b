"""A subclass of torch.autograd.Function: its `apply`, differentiated by autograd, which calls its backward."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from onfoot.check.forms.differentiable import Differentiable, autograd, differentiable, leaves_of
from onfoot.check.forms.form import Expected, FormError
from onfoot.check.forms.function import parameters_of


def is_autograd_function(held: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(held, type) and issubclass(held, torch.autograd.Function)


class AutogradFunction(Differentiable):
    """`class Mine(torch.autograd.Function)` with forward and backward."""

    def __init__(self, held: Any, expected: Expected) -> None:
        forward = _positional(held)
        form = differentiable(forward, expected)
        if form is None:
            names = ", ".join(parameters_of(forward) or ())
            raise FormError(
                f"{held.__name__}.forward takes ({names}); which of them are the layer's {', '.join(expected.inputs)}?"
            )
        super().__init__(forward, expected, form.call, "a torch.autograd.Function")
        self.kinds = ("torch",)

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        leaves = leaves_of(inputs, self.expected)
        return autograd(self.output({**inputs, **leaves}, options), leaves, upstream, self.expected)


def _positional(held: Any) -> Any:
    """`apply` with the parameters of `forward`, by position or keyword."""
    parameters = list(inspect.signature(held.forward).parameters.values())
    if getattr(held, "setup_context", None) is None or not _has_own_setup(held):
        parameters = parameters[1:]  # without ctx
    signature = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters if p.kind not in (2, 4)])

    @functools.wraps(held.forward)
    def apply(*given: Any, **more: Any) -> Any:
        bound = signature.bind(*given, **more)
        bound.apply_defaults()
        return held.apply(*bound.args)

    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


def _has_own_setup(held: Any) -> bool:
    """Whether forward has no ctx, because setup_context gets it."""
    import torch

    return held.setup_context is not torch.autograd.Function.setup_context
