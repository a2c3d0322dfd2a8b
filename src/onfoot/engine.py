"""Engines: tables of forward/backward pairs that the models are written against.

`"numpy"` and `"torch"` are the formulas of `ops/` on NumPy arrays and on PyTorch tensors; `"numba"` replaces them by
the kernels of `kernels/` where there are any. An engine is passed explicitly; no function is replaced globally.
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
# Functions that are not pairs: they have no gradient, or are their own.
UPDATES: Mapping[str, Callable[..., Any]] = {
    "adamw_updates": ops.adamw_updates,
    "add": ops.add,
    "add_noise": ops.add_noise,
    "sum_first": ops.sum_first,
    "sum_of_squares": ops.sum_of_squares,
    "weight_gradient": ops.weight_gradient,
}


class Engine:
    """A table of forward/backward pairs, available as attributes (`eng.linear_forward`), and their array type."""

    theirs: frozenset[str] = frozenset()  # the names of the pairs that are a user's own

    def __init__(
        self,
        name: str,
        table: Mapping[str, Callable[..., Any]],
        asarray: Callable[..., Array],
        copy: Callable[..., np.ndarray] = np.array,
        reason: str = "chosen by name",
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
        """Whether norms and activations are cheap enough to recompute in the backward pass instead of keeping them."""
        return self.name == "numba"

    @property
    def records(self) -> bool:
        """Whether steps on this engine are recorded once and then replayed."""
        return self.name == "numba"

    def require_formulas(self, what: str) -> None:
        """Raises ValueError on an engine whose pairs are not all ours: `what` reads what they save."""

    def has(self, name: str) -> bool:
        """Whether this engine has an optional fused function, such as `logits_loss_forward`."""
        return name in self.table

    def floats(self, x: Any, dtype: str) -> Array:
        """`x` as this engine's array of that dtype, in C order, so that results do not depend on its layout."""
        return self._asarray(np.asarray(to_numpy(x), dtype=dtype, order="C"))

    def copy_in(self, x: Any, dtype: str) -> Array:
        """A copy of `x` in this engine's memory for parameters, in C order."""
        return self._asarray(self._copy(np.ascontiguousarray(to_numpy(x)), dtype))

    def copy_quantized(self, weight: Any) -> Any:
        """`copy_in` for a quantized weight."""
        return weight.map(lambda x: self._copy(np.ascontiguousarray(x), x.dtype))

    def integers(self, x: Any) -> Array:
        """`x` as this engine's array of 64-bit integers."""
        return self._asarray(to_numpy(x).astype(np.int64, copy=False))

    def __repr__(self) -> str:
        return f"Engine({self.name!r}, {self.reason!r})"


def get_engine(name: str = "auto", dtype: str = "float32") -> Engine:
    """The engine of that name, or a ValueError; "auto" is "numba" for float32 if kernels are faster, otherwise "numpy".

    `engine.reason` is why it was chosen.
    """
    if name == "numpy":
        return Engine("numpy", OPS, np.asarray)
    if name == "auto" and dtype != "float32":
        return Engine("numpy", OPS, np.asarray, reason=f"auto: NumPy formulas for {dtype}")
    if name in ("auto", "numba"):
        from onfoot import kernels

        table, missing, slower = kernels.found()
        if name == "numba" and missing:
            raise ValueError(f'the engine "numba" has no kernels here ({missing}); engine="auto" falls back to NumPy')
        if name == "auto" and missing:
            _say_once(f"no kernels available ({missing}); falling back to the slower NumPy engine")
            return Engine("numpy", OPS, np.asarray, reason=f"auto: no kernels available ({missing})")
        if name == "auto" and slower > 1:
            reason = f"auto: kernels take {slower:.1f} times as long as NumPy on this CPU"
            return Engine("numpy", OPS, np.asarray, reason=reason)
        from onfoot.kernels import buffers

        reason = "auto: kernels for this CPU" if name == "auto" else "chosen by name"
        return Engine("numba", {**OPS, **table}, np.asarray, buffers.copy, reason)
    if name == "torch":
        try:
            import torch
        except ImportError:
            raise ValueError('the engine "torch" needs PyTorch: pip install "onfoot[torch]"') from None
        return Engine("torch", OPS, torch.from_numpy)
    raise ValueError(
        f"unknown engine {name!r}; choose from auto, {', '.join(ENGINES)}, or give a file of your own pairs (my_ops.py)"
    )


@lru_cache
def _say_once(message: str) -> None:
    from onfoot.kernels import say

    say(message)


def check_dtype(dtype: str) -> str:
    """`dtype` if it is supported, or a ValueError."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    return name
