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
from onfoot.arrays import Array, namespace, rows, to_numpy
from onfoot.engine import OPS, UPDATES, Engine
from onfoot.ops import tangents

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
        return _add(self, other)

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

    With "gauss-newton", the backward functions pass the tangent of the logits' gradient through the network as it is:
    terms in second derivatives of the network are left out.
    """

    def __init__(self, base: Engine, kind: str) -> None:
        table: dict[str, Callable[..., Any]] = {}
        for pair, where in DIFFERENTIABLE.items():
            table[f"{pair}_forward"] = _forward(pair, where)
            table[f"{pair}_backward"] = _backward(pair) if kind == "hessian" else _first_order_backward(pair)
        super().__init__(f"{base.name}, dual", {**UPDATES, **table}, base._asarray)
        self.base, self.kind = base, kind
        self.token_dots: list[np.ndarray] = []
        own = self._logits_loss if kind == "hessian" else self._logits_loss_gauss_newton
        self.table |= {
            "add": _add,
            "cross_entropy_forward": self._cross_entropy_forward,
            "frozen_linear_forward": _frozen_linear_forward,
            "frozen_logits_loss_backward": lambda dloss, saved: saved.dx,
            "frozen_logits_loss_forward": lambda *args: own(*args, trains=False),
            "logits_loss_backward": lambda dloss, saved: saved,
            "logits_loss_forward": lambda *args: own(*args, trains=True),
            "logits_loss_value": lambda *args: self._logits_loss_value(*args),
            "side_by_side": _side_by_side,
            "sum_first": lambda x: _each(ops.sum_first, x),
        }

    def _cross_entropy_forward(self, logits: Dual, targets: Array, divisor: float) -> tuple[Array, DualSaved]:
        loss, saved = ops.cross_entropy_forward(logits.value, targets, divisor)
        self.token_dots.append(to_numpy(tangents.token_tangents(logits.tangent, saved)))
        return loss, DualSaved(saved, logits.tangent)

    def _parts(self, x: Dual, weight: Dual, bias: Dual | None, targets: Array, divisor: float) -> Any:
        """Some tokens at a time: their features, the head, and the cross-entropy of their logits, all with tangents."""
        flat, target = _each(rows, x), targets.reshape(-1)
        size = max(1, PART // weight.shape[0])
        for a in range(0, flat.shape[0], size):
            part = flat[a : a + size]
            logits, s_head = _forward("linear", DIFFERENTIABLE["linear"])(part, weight.T, bias)
            loss, s_loss = self._cross_entropy_forward(logits, target[a : a + size], divisor)
            yield loss, s_head, s_loss

    def _logits_loss_value(self, *args: Any) -> Array:
        return sum(loss for loss, _, _ in self._parts(*args))

    def _logits_loss(self, *args: Any, trains: bool) -> tuple[Array, Any]:
        """The fused head and loss: the gradients and their tangents, summed over the parts."""
        return self._gradients(args, lambda s_loss: _backward("cross_entropy")(1.0, s_loss), _backward("linear"))

    def _logits_loss_gauss_newton(self, *args: Any, trains: bool) -> tuple[Array, Any]:
        backward = _first_order_backward("linear")
        return self._gradients(args, lambda s_loss: _first_order_backward("cross_entropy")(1.0, s_loss), backward)

    def _gradients(self, args: Any, loss_backward: Any, head_backward: Any) -> tuple[Array, Any]:
        loss, dxs, dweight, dbias = 0.0, [], None, None
        for part_loss, s_head, s_loss in self._parts(*args):
            dx, dw, db = head_backward(loss_backward(s_loss), s_head)
            loss = loss + part_loss
            dxs.append(dx)
            dweight = dw if dweight is None else _add(dweight, dw)
            dbias = db if dbias is None else _add(dbias, db)
        assert dweight is not None
        dx = dxs[0] if len(dxs) == 1 else _each(lambda *x: namespace(x[0]).concatenate(x, axis=0), *dxs)
        return loss, LogitsLossDual(dx.reshape(*args[0].shape), dweight.T, dbias)


class LogitsLossDual(NamedTuple):
    """The gradients of the fused head and loss, with their tangents."""

    dx: Any
    dweight: Any
    dbias: Any


def _forward(pair: str, where: tuple[int, ...]) -> Callable[..., Any]:
    forward, along = OPS[f"{pair}_forward"], getattr(tangents, f"{pair}_tangent")

    def dual_forward(*args: Any) -> tuple[Dual, DualSaved]:
        y, saved = forward(*map(value, args))
        dots = [tangent(args[i]) if i < len(args) else None for i in where]
        if pair == "embedding" and dots[0] is None:
            return Dual(y, namespace(y).zeros_like(y)), DualSaved(saved, None)
        y_dot, saved_dot = along(*dots, saved)
        return Dual(y, y_dot), DualSaved(saved, saved_dot)

    return dual_forward


def _frozen_linear_forward(x: Dual, weight: Dual, bias: Dual | None = None) -> tuple[Dual, DualSaved]:
    """Without a backward pass, the model calls this for layers whose weights move, too."""
    pair = "frozen_linear" if tangent(weight) is None and tangent(bias) is None else "linear"
    return _forward(pair, DIFFERENTIABLE[pair])(x, weight, bias)


def _backward(pair: str) -> Callable[..., Any]:
    backward, along = OPS[f"{pair}_backward"], getattr(tangents, f"{pair}_backward_tangent")

    def dual_backward(dy: Any, saved: DualSaved) -> Any:
        grads = backward(value(dy), saved.saved)
        dots = along(value(dy), tangent(dy), saved.saved, saved.tangent)
        if not isinstance(grads, tuple):
            return Dual(grads, dots)
        return tuple(None if g is None else Dual(g, g_dot) for g, g_dot in zip(grads, dots, strict=True))

    return dual_backward


def _first_order_backward(pair: str) -> Callable[..., Any]:
    """The ordinary backward function; that of the loss starts with the tangent of the logits' gradient."""
    backward, along = OPS[f"{pair}_backward"], getattr(tangents, f"{pair}_backward_tangent")
    if pair == "cross_entropy":
        return lambda dloss, saved: along(dloss, None, *saved)
    return lambda dy, saved: backward(dy, saved.saved)


def _each(f: Callable[..., Array], *xs: Any) -> Any:
    """f of the values and f of the tangents."""
    if not isinstance(xs[0], Dual):
        return f(*xs)
    return Dual(f(*(x.value for x in xs)), f(*(x.tangent for x in xs)))


def _add(a: Any, b: Any) -> Any:
    return _each(ops.add, a, b)


def _side_by_side(parts: Any) -> Any:
    return _each(lambda *xs: namespace(xs[0]).concatenate(xs, axis=-1), *parts)
