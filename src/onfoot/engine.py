"""Engines: tables of forward/backward pairs that the models are written against.

`"numpy"` and `"torch"` are the formulas of `ops/` on NumPy arrays and on PyTorch tensors; `"numba"` lays the kernels of
`kernels/` over them. An engine is passed explicitly; nothing is swapped behind anyone's back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from onfoot import ops
from onfoot.arrays import Array, to_numpy

ENGINES = ("numpy", "torch", "numba")
DTYPES = ("float32", "float64")

OPS: Mapping[str, Callable[..., Any]] = {
    name: getattr(ops, name) for name in ops.__all__ if name.endswith(("_forward", "_backward"))
}
# What is no pair: it has no gradient, or is its own.
UPDATES: Mapping[str, Callable[..., Any]] = {
    "adamw_updates": ops.adamw_updates,
    "add": ops.add,
    "sum_first": ops.sum_first,
    "sum_of_squares": ops.sum_of_squares,
}


class Engine:
    """A table of pairs, reached as attributes (`eng.linear_forward`), and the arrays they work on."""

    def __init__(
        self,
        name: str,
        table: Mapping[str, Callable[..., Any]],
        asarray: Callable[..., Array],
        copy: Callable[..., np.ndarray] = np.array,
        reason: str = "asked for by name",
    ) -> None:
        self.name, self.reason = name, reason  # "numba", "auto: kernels for this CPU"
        self.table = {**UPDATES, **table}
        self._asarray, self._copy = asarray, copy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(f"the engine {self.__dict__.get('name')!r} has no pair {name!r}") from None

    @property
    def recomputes_inputs(self) -> bool:
        """Whether norms and activations are computed so fast that they need not be kept for the backward pass."""
        return self.name == "numba"

    @property
    def records(self) -> bool:
        """Whether a step on this engine is recorded once, and replayed from then on."""
        return self.name == "numba"

    def has(self, name: str) -> bool:
        """Whether this engine does in one what others do in several pairs (`logits_loss_forward`)."""
        return name in self.table

    def floats(self, x: Any, dtype: str) -> Array:
        """`x` as this engine's array of that dtype, in C order: how it lay before must not show in results."""
        return self._asarray(np.asarray(to_numpy(x), dtype=dtype, order="C"))

    def copy_in(self, x: Any, dtype: str) -> Array:
        """A copy of `x` where this engine likes its parameters to lie, in C order."""
        return self._asarray(self._copy(np.ascontiguousarray(to_numpy(x)), dtype))

    def copy_quantized(self, weight: Any) -> Any:
        """The same for a weight in blocks."""
        return weight.map(lambda x: self._copy(np.ascontiguousarray(x), x.dtype))

    def integers(self, x: Any) -> Array:
        """`x` as this engine's array of 64-bit integers."""
        return self._asarray(to_numpy(x).astype(np.int64, copy=False))

    def __repr__(self) -> str:
        return f"Engine({self.name!r}, {self.reason!r})"


def get_engine(name: str = "auto", dtype: str = "float32") -> Engine:
    """The engine of that name, or a ValueError; "auto" is "numba" for float32 where kernels gain, otherwise "numpy".

    `engine.reason` tells why it is the one it is.
    """
    if name == "numpy":
        return Engine("numpy", OPS, np.asarray)
    if name == "auto" and dtype != "float32":
        return Engine("numpy", OPS, np.asarray, reason=f"auto: the formulas for {dtype}")
    if name in ("auto", "numba"):
        from onfoot import kernels

        table, missing, slower = kernels.found()
        if name == "numba" and missing:
            raise ValueError(f'no kernels for the engine "numba" ({missing}); engine="auto" takes NumPy instead')
        if name == "auto" and missing:
            _say_once(f"no kernels here ({missing}): the slower NumPy engine takes over")
            return Engine("numpy", OPS, np.asarray, reason=f"auto: no kernels here ({missing})")
        if name == "auto" and slower > 1:
            reason = f"auto: kernels take {slower:.1f} times as long as NumPy on this CPU"
            return Engine("numpy", OPS, np.asarray, reason=reason)
        from onfoot.kernels import buffers

        reason = "auto: kernels for this CPU" if name == "auto" else "asked for by name"
        return Engine("numba", {**OPS, **table}, np.asarray, buffers.copy, reason)
    if name == "torch":
        try:
            import torch
        except ImportError:
            raise ValueError('the engine "torch" needs PyTorch: pip install "onfoot[torch]"') from None
        return Engine("torch", OPS, torch.from_numpy)
    raise ValueError(f"unknown engine {name!r}; known are auto, {', '.join(ENGINES)}")


@lru_cache
def _say_once(message: str) -> None:
    from onfoot.kernels import say

    say(message)


def check_dtype(dtype: str) -> str:
    """`dtype` as a name, or a ValueError."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return name
