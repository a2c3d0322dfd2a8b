"""A forward pass that can be differentiated: by PyTorch's autograd, by jax.vjp, or by the function that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onfoot.arrays import is_torch
from onfoot.check.forms.compiled import Compiled, uses_jax
from onfoot.check.forms.form import Expected, Form, FormError
from onfoot.check.forms.function import Call, parameters_of, required, takes_any
from onfoot.check.forms.results import named


class Differentiable(Form):
    """`f(x, weight, bias)`, without an upstream gradient."""

    def __init__(self, function: Callable[..., Any], expected: Expected, call: Call | None, what: str = "") -> None:
        super().__init__(expected)
        self.function, self.call, self.what = function, call, what
        self.compiled: Compiled | None = None
        self.own_vjp = False
        self.takes = list(call.matching.arguments.values()) if call else None
        if uses_jax(function):
            self.kinds = ("jax", "numpy")
        self._say("a forward pass")

    def _say(self, how: str) -> None:
        by_name = self.call is not None and self.call.matching.sentence
        plain = ", ".join(self.expected.inputs)
        self.sentence = (self.what or how) + (f"; arguments by name: {by_name}" if by_name and by_name != plain else "")

    def output(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        if self.call is not None:
            return self.call(inputs, options)
        return self.function(*(inputs[name] for name in self.expected.inputs))

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        if arrays == "torch":
            return self._by_autograd(inputs, upstream, options)
        if arrays == "jax":
            return self._by_vjp(inputs, upstream, options)
        y = self.output(inputs, options)
        if not has_vjp(y):
            raise FormError(
                "it takes no upstream gradient, and its result on NumPy arrays cannot be differentiated; tried "
                "PyTorch's autograd, jax.vjp and (y, vjp_fn)"
            )
        self._say("a function that returns (y, vjp_fn)")
        return self._named(y[1](upstream))

    def _named(self, returned: Any) -> Any:
        """Gradients in the order of the function's own arguments."""
        names = list(self.call.matching.arguments.values()) if self.call is not None else list(self.expected.inputs)
        if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
            return named(returned, self.expected)
        found = zip((self.expected.gradient_of(name) for name in names), returned, strict=True)
        return {gradient: value for gradient, value in found if gradient is not None}

    def _by_autograd(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        leaves = leaves_of(inputs, self.expected)
        y = self.output({**inputs, **leaves}, options)
        if has_vjp(y):
            self._say("a function that returns (y, vjp_fn)")
            return self._named(y[1](upstream))
        found = autograd(y, leaves, upstream, self.expected)
        self._say("a forward pass, differentiated by PyTorch's autograd")
        return found

    def _by_vjp(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        if self.compiled is None:
            self.compiled = Compiled(lambda inputs, upstream: self._pulled(dict(inputs), upstream, options))
        found = self.compiled(inputs, upstream)
        custom = "a JAX custom_vjp function" if is_custom_vjp(self.function) else "a forward pass"
        self._say("a function that returns (y, vjp_fn)" if self.own_vjp else f"{custom}, differentiated by jax.vjp")
        return found

    def _pulled(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp

        names = [n for n in self.expected.parameters if n in inputs]
        if self.call is not None:
            used = set(self.call.matching.arguments.values())
            names = [n for n in names if n in used]

        def forward(*values: Any) -> Any:
            y = self.output({**inputs, **dict(zip(names, values, strict=True))}, options)
            return chosen_output(y, jnp.shape(upstream))

        own = self.output(inputs, options)
        self.own_vjp = has_vjp(own)
        if self.own_vjp:
            return self._named(own[1](upstream))
        y, pull = jax.vjp(forward, *(inputs[n] for n in names))
        _same_shape(y.shape, jnp.shape(upstream))
        found = pull(jnp.asarray(upstream, dtype=y.dtype).reshape(y.shape))
        return {str(self.expected.gradient_of(n)): g for n, g in zip(names, found, strict=True)}


def is_custom_vjp(function: Any) -> bool:
    return type(function).__name__ in ("custom_vjp", "custom_jvp") and type(function).__module__.startswith("jax")


def has_vjp(y: Any) -> bool:
    """Whether the result is (y, vjp_fn)."""
    return isinstance(y, tuple) and len(y) == 2 and callable(y[1]) and not is_torch(y[1])


def chosen_output(y: Any, shape: Sequence[int]) -> Any:
    """The output, of several the first in the shape of the upstream gradient."""
    if not isinstance(y, (tuple, list)):
        return y
    same = [part for part in y if hasattr(part, "shape") and tuple(part.shape) == tuple(shape)]
    if not same:
        raise FormError(f"it returns {len(y)} values, and none has the shape of the upstream gradient, {tuple(shape)}")
    return same[0]


def _same_shape(got: Sequence[int], wanted: Sequence[int]) -> None:
    one = all(n == 1 for n in (*got, *wanted))
    if tuple(got) != tuple(wanted) and not one:
        raise FormError(f"its output has shape {tuple(got)}; expected {tuple(wanted)}")


def leaves_of(inputs: Mapping[str, Any], expected: Expected) -> dict[str, Any]:
    """The inputs that have a gradient, as leaves of autograd's graph, in the same memory."""
    return {name: inputs[name].detach().requires_grad_() for name in expected.parameters if name in inputs}


def autograd(y: Any, leaves: Mapping[str, Any], upstream: Any, expected: Expected) -> dict[str, Any]:
    """The gradients of the leaves by PyTorch's autograd."""
    import torch

    wanted = tuple(upstream.shape) if is_torch(upstream) else ()
    y = chosen_output(y, wanted)
    if not is_torch(y) or not y.requires_grad:
        raise FormError("its output does not depend on its inputs in a way that autograd can follow")
    _same_shape(y.shape, wanted)
    dout = torch.as_tensor(upstream, dtype=y.dtype).reshape(y.shape)
    found = torch.autograd.grad(y, list(leaves.values()), dout, allow_unused=True)
    gradients = {expected.gradient_of(name): g for name, g in zip(leaves, found, strict=True)}
    return {str(name): g for name, g in gradients.items() if g is not None}


def differentiable(function: Callable[..., Any], expected: Expected, what: str = "") -> Differentiable | None:
    """The form of a forward pass; None if its arguments do not fit."""
    parameters = parameters_of(function)
    if parameters is None or takes_any(function):
        return Differentiable(function, expected, None, what)
    call = Call(function, expected.inputs, expected.options)
    if call.complete and call.matching.arguments:
        return Differentiable(function, expected, call, what)
    n = len(expected.inputs)
    if len(required(parameters)) <= n <= len(parameters):
        return Differentiable(function, expected, None, what)
    return None
