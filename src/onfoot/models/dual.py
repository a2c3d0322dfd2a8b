"""Arrays with their tangents, and an engine for them: the readable model, differentiated along a direction.

A model runs on this engine as on any other. Every forward function also computes the tangent of its result, every
backward function the tangents of its gradients (`ops/tangents`); so the gradients of a pass come with their derivative
along the direction, which is H u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.arrays import Array, namespace, rows
from onfoot.engine import OPS, Engine
from onfoot.ops import tangents
from onfoot.ops.linear import LinearSaved, input_gradient
from onfoot.recording.recorded_array import active

# pair -> which arguments of its forward function have a tangent
DIFFERENTIABLE = {
    "attention": (0, 1, 2),
    "cross_entropy": (0,),
    "dropout": (0,),
    "embedding": (1,),
    "frozen_linear": (0, 1, 2),
    "gelu_erf": (0,),
    "gelu_tanh": (0,),
    "grouped_query": (0, 1, 2),
    "layer_norm": (0, 1, 2),
    "linear": (0, 1, 2),
    "lora": (0, 1, 2),
    "lora_linear": (0, 1, 2, 3, 4),
    "relu": (0,),
    "rms_norm": (0, 1),
    "rope": (0,),
    "swiglu": (0, 1),
}
KINDS = ("hessian", "gauss-newton")
PART = 1 << 22  # logits at a time


class Dual:
    """An array and its tangent; a parameter that does not move has the tangent None."""

    def __init__(self, value: Array, tangent: Array | None) -> None:
        self.value, self.tangent = value, tangent

    @property
    def shape(self) -> Any:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return len(self.value.shape)

    @property
    def T(self) -> Dual:  # noqa: N802
        return self._map(lambda x: x.T)

    def reshape(self, *shape: int) -> Dual:
        return self._map(lambda x: x.reshape(*shape))

    def swapaxes(self, a: int, b: int) -> Dual:
        return self._map(lambda x: x.swapaxes(a, b))

    def __getitem__(self, where: Any) -> Dual:
        return self._map(lambda x: x[where])

    def __setitem__(self, where: Any, other: Any) -> None:
        self.value[where] = value(other)
        if self.tangent is not None:
            self.tangent[where] = other.tangent if isinstance(other, Dual) else 0

    def __add__(self, other: Dual) -> Dual:
        return _each(lambda a, b: a + b, self, other)

    def __mul__(self, constant: Array) -> Dual:
        return self._map(lambda x: x * constant)

    def _map(self, f: Callable[[Array], Array]) -> Dual:
        return Dual(f(self.value), None if self.tangent is None else f(self.tangent))


class DualSaved(NamedTuple):
    """What a pair's backward function needs, and its tangent."""

    saved: Any
    tangent: Any

    @property
    def ids(self) -> Array:
        """The ids of an embedding."""
        return self.saved.ids


def value(x: Any) -> Any:
    """The array of a dual number; anything else is a constant."""
    return x.value if isinstance(x, Dual) else x


def tangent(x: Any) -> Any:
    return x.tangent if isinstance(x, Dual) else None


class DualEngine(Engine):
    """The pairs of an engine on duals. `token_dots` collects the tangents of the tokens' losses.

    Without `gradients`, those of large weights are not computed, only their tangents, which are then plain arrays. With
    "gauss-newton", the backward functions pass the tangent of the logits' gradient through the network as it is:
    terms in second derivatives of the network are left out.
    """

    def __init__(self, base: Engine, kind: str, gradients: bool = True) -> None:
        super().__init__(f"{base.name}, dual", {}, base._asarray)
        self.base, self.kind, self.gradients = base, kind, gradients
        self.token_dots: list[Array] = []
        for pair, where in DIFFERENTIABLE.items():
            self.table[f"{pair}_forward"] = self._forward(pair, where)
            self.table[f"{pair}_backward"] = self._backward(pair)
        self.table |= {
            "add": self._add,
            "cross_entropy_forward": self._cross_entropy_forward,
            "frozen_linear_forward": self._frozen_linear_forward,
            "linear_backward": self._linear_backward(),
            "frozen_logits_loss_backward": lambda dloss, saved: saved[0],
            "frozen_logits_loss_forward": lambda *args: self._logits_loss(False, *args),
            "logits_loss_backward": lambda dloss, saved: saved,
            "logits_loss_forward": lambda *args: self._logits_loss(True, *args),
            "logits_loss_value": lambda *args: self._logits_loss(False, *args)[0],
            "side_by_side": self._side_by_side,
            "sum_first": lambda x: _each(base.sum_first, x),
        }

    def _functions(self, pair: str, half: str, along: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """A half of a pair and its tangent: both the engine's own, or both the formulas."""
        if f"{pair}_tangent" in self.base.table:
            return self.base.table[f"{pair}_{half}"], self.base.table[f"{pair}_{along}"]
        return OPS[f"{pair}_{half}"], getattr(tangents, f"{pair}_{along}")

    def _forward(self, pair: str, where: tuple[int, ...]) -> Callable[..., Any]:
        forward, along = self._functions(pair, "forward", "tangent")

        def dual_forward(*args: Any) -> tuple[Any, Any]:
            y, saved = forward(*map(value, args))
            dots = [tangent(args[i]) if i < len(args) else None for i in where]
            if pair == "embedding" and not isinstance(args[1], Dual):  # a constant table, such as RoPE's angles
                return y, saved
            if pair == "embedding" and dots[0] is None:
                return Dual(y, self._zeros(y)), DualSaved(saved, None)
            y_dot, saved_dot = along(*dots, saved)
            return Dual(y, y_dot), DualSaved(saved, saved_dot)

        return dual_forward

    def _backward(self, pair: str) -> Callable[..., Any]:
        backward, along = self._functions(pair, "backward", "backward_tangent")
        if self.kind == "gauss-newton" and pair == "cross_entropy":
            return lambda dloss, saved: along(dloss, None, *saved)
        if self.kind == "gauss-newton":
            return lambda dy, saved: backward(dy, saved.saved)

        def dual_backward(dy: Any, saved: DualSaved) -> Any:
            grads = backward(value(dy), saved.saved)
            dots = along(value(dy), tangent(dy), saved.saved, saved.tangent)
            if not isinstance(grads, tuple):
                return Dual(grads, dots)
            return tuple(None if g is None else Dual(g, g_dot) for g, g_dot in zip(grads, dots, strict=True))

        return dual_backward

    def _linear_backward(self) -> Callable[..., Any]:
        if self.gradients or self.kind == "gauss-newton":
            return self._backward("linear")
        _, along = self._functions("linear", "backward", "backward_tangent")

        def tangents_only(dy: Dual, saved: DualSaved) -> tuple[Dual, Array, Array | None]:
            dx_dot, dweight_dot, dbias_dot = along(dy.value, dy.tangent, saved.saved, saved.tangent)
            return Dual(self._input_gradient(dy.value, saved.saved), dx_dot), dweight_dot, dbias_dot

        return tangents_only

    def _input_gradient(self, dy: Array, saved: Any) -> Array:
        if isinstance(saved, LinearSaved):
            return input_gradient(dy, saved.weight)
        from onfoot.kernels import linear

        return linear.input_gradient(dy, saved.weight)

    def _add(self, a: Any, b: Any) -> Any:
        if isinstance(a, Dual) and isinstance(b, Dual):
            return _each(self.base.add, a, b)
        return self.base.add(*(x.tangent if isinstance(x, Dual) else x for x in (a, b)))  # one is a tangent alone

    def _zeros(self, x: Array) -> Array:
        if active.recorder is None:
            return namespace(x).zeros_like(x)
        from onfoot.kernels.buffers import empty
        from onfoot.kernels.shapes import filled

        made = empty(x.shape)
        filled(made, 0.0)
        return made

    def _frozen_linear_forward(self, x: Dual, weight: Dual, bias: Dual | None = None) -> tuple[Dual, DualSaved]:
        """Without a backward pass, the model calls this for layers whose weights move, too."""
        moves = tangent(weight) is not None or tangent(bias) is not None
        return self._forward("linear" if moves else "frozen_linear", DIFFERENTIABLE["linear"])(x, weight, bias)

    def _cross_entropy_forward(self, logits: Dual, targets: Array, divisor: float) -> tuple[Array, DualSaved]:
        loss, saved = ops.cross_entropy_forward(logits.value, targets, divisor)
        self.token_dots.append(tangents.token_tangents(logits.tangent, saved))
        return loss, DualSaved(saved, logits.tangent)

    def _logits_loss(self, trains: bool, x: Dual, weight: Dual, bias: Dual | None, targets: Array, divisor: Any) -> Any:
        """The fused head and loss, part by part: no T × V tangent is kept. Returns the loss and the gradients."""
        both = [(value(a), tangent(a)) for a in (x, weight, bias)]
        if "logits_loss_tangents" in self.base.table and all(a.dtype == np.float32 for a in both[0]):
            loss, dots, *made = self.base.logits_loss_tangents(
                *both, targets, divisor, trains, self.kind, self.gradients
            )
            self.token_dots.append(dots)
            return loss, tuple(self._gradient(*grad) for grad in made)
        loss = 0.0
        grads: list[Any] = []
        flat, target = _each(rows, x), targets.reshape(-1)
        size = max(1, PART // weight.shape[0])
        for a in range(0, flat.shape[0], size):
            logits, s_head = self.table["linear_forward"](flat[a : a + size], weight.T, bias)
            part_loss, s_loss = self._cross_entropy_forward(logits, target[a : a + size], divisor)
            part = self.table["linear_backward"](self.table["cross_entropy_backward"](1.0, s_loss), s_head)
            loss = loss + part_loss
            grads = [part] if not grads else [(_joined(grads[0][0], part[0]), *map(self._plus, grads[0][1:], part[1:]))]
        dx, dweight, dbias = grads[0]
        return loss, (dx.reshape(*x.shape), dweight.T, dbias)

    def _gradient(self, grad: Any, dot: Any) -> Any:
        if dot is None:
            return None
        return dot if grad is None else Dual(grad, dot)

    def _plus(self, a: Any, b: Any) -> Any:
        return None if a is None else self.add(a, b)

    def _side_by_side(self, parts: Any) -> Any:
        if self.base.has("side_by_side"):
            return _each(lambda *xs: self.base.side_by_side(xs), *parts)
        return _each(lambda *xs: namespace(xs[0]).concatenate(xs, axis=-1), *parts)


def _joined(a: Any, b: Any) -> Any:
    return _each(lambda *xs: namespace(xs[0]).concatenate(xs, axis=0), a, b)


def _each(f: Callable[..., Array], *xs: Any) -> Any:
    """f of the values and f of the tangents."""
    if not isinstance(xs[0], Dual):
        return f(*xs)
    return Dual(f(*(x.value for x in xs)), f(*(x.tangent for x in xs)))
