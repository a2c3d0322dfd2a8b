"""Code as people hold it, made into a function (inputs, upstream gradient) → gradients; one file per form."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from onfoot.check.forms.autograd_function import AutogradFunction, is_autograd_function
from onfoot.check.forms.differentiable import differentiable, is_custom_vjp
from onfoot.check.forms.form import Expected, Form, FormError
from onfoot.check.forms.function import BackwardFunction, backward_function, parameters_of, required, takes_any
from onfoot.check.forms.layer_class import LayerClass, methods
from onfoot.check.forms.module import Module, is_module
from onfoot.check.forms.pair import forward_beside, needs_saved, pair, pair_in

TRIED = (
    "a backward function, a forward/backward pair, a function that autograd or jax.vjp differentiates, a "
    "torch.autograd.Function, an nn.Module, a class with forward and backward"
)


def forms_of(held: Any, expected: Expected) -> list[Form]:
    """The forms that an object may have, the likeliest first; raises a ValueError if there is none."""
    try:
        found = _forms(held, expected)
    except FormError as error:
        raise ValueError(str(error)) from None
    for form in found:
        form.kinds = form.usable_kinds()
    if not found:
        raise ValueError(f"{_described(held)} cannot be checked as {expected.layer}; tried {TRIED}")
    return found


def _forms(held: Any, expected: Expected) -> list[Form]:
    if isinstance(held, (tuple, list)):
        if len(held) != 2 or not all(callable(one) for one in held):
            raise FormError(f"a pair must be (forward, backward), two functions, got {held!r}")
        return [pair(held[0], held[1], expected)]
    if isinstance(held, ModuleType):
        return _in_file(held, expected)
    if is_autograd_function(held):
        return [AutogradFunction(held, expected)]
    if is_module(held):
        return [Module(held, expected)]
    names = methods(held) if not hasattr(held, "__code__") and not is_custom_vjp(held) else None
    if names is not None:
        return [LayerClass(held, expected, names)]
    if isinstance(held, type):
        raise FormError(
            f"{held.__name__} is a class without a forward and a backward method, and neither an nn.Module nor a "
            "torch.autograd.Function; pass one of these, a function, or a method of an instance"
        )
    return _of_function(held, expected) if callable(held) else []


def _of_function(function: Any, expected: Expected) -> list[Form]:
    names = required(parameters_of(function) or {})
    if is_custom_vjp(function):
        alone = differentiable(function, expected)
        return [] if alone is None else [alone]
    if needs_saved(names):
        forward = forward_beside(function)
        if forward is None:
            name = getattr(function, "__name__", "the function")
            raise FormError(
                f"{name}({', '.join(names)}) needs what its forward pass saved; pass the pair (forward, backward), or "
                f"put its forward function beside it, with “forward” in its name for “backward”"
            )
        return [pair(forward, function, expected)]
    backward = backward_function(function, expected)
    forms: list[Form | None] = [backward]
    unknown = parameters_of(function) is None or takes_any(function)
    takes_dout = backward is not None and backward.takes_upstream and not unknown
    says_backward = any(word in getattr(function, "__name__", "").lower() for word in ("backward", "bwd", "grad"))
    if not takes_dout and not says_backward:
        forms.append(differentiable(function, expected))
    found = [form for form in forms if form is not None]
    return found or [BackwardFunction(function, expected, None)]  # so that the report has Python's own words


def _in_file(module: ModuleType, expected: Expected) -> list[Form]:
    both = pair_in(module, expected.layer)
    if both is not None:
        return [pair(*both, expected)]
    for name in (f"{expected.layer}_backward", "backward", expected.layer):
        if hasattr(module, name):
            return _forms(getattr(module, name), expected)
    defined = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise FormError(
        f"{module.__name__} has no {expected.layer}_backward, with or without {expected.layer}_forward; it defines "
        + (", ".join(defined) or "no function")
    )


def _described(held: Any) -> str:
    return f"{held!r} of type {type(held).__name__}" if not callable(held) else getattr(held, "__name__", repr(held))


__all__ = ["Expected", "Form", "FormError", "forms_of"]
