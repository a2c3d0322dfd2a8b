"""One pass through a network: the engine's pairs bound to the names of parameters.

The pairs are pure; here their gradients get names and are added up. A model says `y, saved = run.linear(name, x)` on
the way down and `dx = run.linear_backward(name, dy, saved)` on the way up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from onfoot.arrays import Array, Shape
from onfoot.engine import Engine
from onfoot.ops.dropout import dropout_pattern

Note = Callable[[str, Array], None]


class Run:
    """What one pass needs: the engine, the parameters, which of them train, and where gradients go."""

    def __init__(
        self,
        engine: Engine,
        params: dict[str, Array],
        trainable: set[str],
        dtype: str,
        dropout_seed: int | None = None,
        keep_saved: bool = True,
        note: Note | None = None,
    ) -> None:
        self.engine = engine
        self.params = params
        self.trainable = trainable
        self.dtype = dtype
        self.dropout_seed = dropout_seed
        self.keep_saved = keep_saved  # False where no backward pass follows
        self.note: Note = note or (lambda name, value: None)
        self.grads: dict[str, Array] = {}

    def add(self, name: str, grad: Array | None) -> None:
        """Adds to a parameter's gradient. A parameter used twice (tied weights) gets the sum of both paths."""
        if grad is not None and name in self.trainable:
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def trains(self, prefix: str) -> bool:
        """Whether any parameter below this name trains."""
        return any(name.startswith(prefix) for name in self.trainable)

    def linear(self, name: str, x: Array) -> tuple[Array, Any]:
        weight, bias = self.params[f"{name}.weight"], self.params.get(f"{name}.bias")
        if self.trains(f"{name}."):
            return self.engine.linear_forward(x, weight, bias)
        return self.engine.frozen_linear_forward(x, weight, bias)

    def linear_backward(self, name: str, dy: Array, saved: Any, dead: slice | None = None) -> Array:
        """The gradient of x. `dead` names the columns of the bias that cannot act: their gradient is written as 0."""
        if not self.trains(f"{name}."):
            return self.engine.frozen_linear_backward(dy, saved)
        dx, dweight, dbias = self.engine.linear_backward(dy, saved)
        if dead is not None and dbias is not None:
            dbias[dead] = 0
        self.add(f"{name}.weight", dweight)
        self.add(f"{name}.bias", dbias)
        return dx

    def layer_norm(self, name: str, x: Array, eps: float) -> tuple[Array, Any]:
        return self.engine.layer_norm_forward(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"], eps)

    def layer_norm_backward(self, name: str, dy: Array, saved: Any) -> Array:
        dx, dweight, dbias = self.engine.layer_norm_backward(dy, saved)
        self.add(f"{name}.weight", dweight)
        self.add(f"{name}.bias", dbias)
        return dx

    def dropout_keep(self, name: str, shape: Shape, p: float) -> Array | None:
        """The dropout pattern of this place in this pass, or None where nothing is dropped."""
        if self.dropout_seed is None or p == 0:
            return None
        seed = (self.dropout_seed, zlib.crc32(name.encode()))  # another pattern at every place
        return self.engine.floats(dropout_pattern(shape, p, seed, self.dtype), self.dtype)

    def dropout(self, name: str, x: Array, p: float) -> tuple[Array, Any]:
        keep = self.dropout_keep(name, tuple(x.shape), p)
        return (x, None) if keep is None else self.engine.dropout_forward(x, keep)

    def dropout_backward(self, dy: Array, saved: Any) -> Array:
        return dy if saved is None else self.engine.dropout_backward(dy, saved)
