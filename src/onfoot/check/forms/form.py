"""A form: an object as people hold it, made into a function of a layer's inputs that returns its gradients.

Every form has a sentence that says what was recognised. Forms run in the process that has the object, which is another
one when the check is isolated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.check.forms.names import UPSTREAM

KINDS = ("numpy", "torch", "jax")


class FormError(Exception):
    """The object cannot be used in this way: a sentence without the name of an exception."""


@dataclass(frozen=True)
class Expected:
    """What a form must know of the layer; plain values, which can be sent to another process."""

    layer: str
    arguments: tuple[str, ...]  # with the upstream gradient last, if there is one
    gradients: tuple[str, ...]
    options: Mapping[str, Any]
    upstream_optional: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments of the forward pass."""
        return tuple(name for name in self.arguments if name != UPSTREAM)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The inputs that have a gradient."""
        return tuple(name for name in self.inputs if self.gradient_of(name) is not None)

    def gradient_of(self, argument: str) -> str | None:
        """The name of an argument's gradient."""
        return next((g for g in (f"d{argument}", argument) if g in self.gradients), None)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Expected:
        arguments, gradients = tuple(given["arguments"]), tuple(given["gradients"])
        return cls(given["layer"], arguments, gradients, given["options"], given["upstream_optional"])


class Form:
    """The common interface; `gradients` is what each form defines."""

    sentence = ""  # what was recognised; may become more precise after the first call
    takes_upstream = True  # whether the upstream gradient is used; else it is 1
    own_sizes: dict[str, Any] | None = None  # the sizes that the object has, if it may not work with others
    takes: list[str] | None = None  # the inputs that it takes, once that is known
    kinds: Sequence[str] = KINDS  # of arrays, in the order in which they are tried

    def __init__(self, expected: Expected) -> None:
        self.expected = expected

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        """Returns the gradients: in the layer's order, or a dict by name."""
        raise NotImplementedError

    def run(self, given: Sequence[Any], options: Mapping[str, Any], arrays: str, dtype: str = "") -> Any:
        """Calls the object with NumPy arrays, or tensors that share their memory."""
        with precision(dtype, arrays):
            values = [converted(x, arrays, dtype) for x in given]
            inputs = dict(zip(self.expected.arguments, values, strict=False))
            upstream = inputs.pop(UPSTREAM, None)
            return self.gradients(inputs, upstream, options, arrays)

    @property
    def loaded(self) -> list[str]:
        """The kinds of arrays whose package is imported."""
        return [kind for kind in self.kinds if kind in sys.modules]

    def usable_kinds(self) -> list[str]:
        """The kinds of arrays that can be tried in this process."""
        return [kind for kind in self.kinds if available(kind)]

    def describe(self) -> dict[str, Any]:
        """What another process must know of this form."""
        return {
            "sentence": self.sentence,
            "takes_upstream": self.takes_upstream,
            "own_sizes": self.own_sizes,
            "takes": self.takes,
            "kinds": list(self.kinds),
            "loaded": self.loaded,
        }


def converted(x: Any, arrays: str, dtype: str) -> Any:
    """An array of the wanted kind; what is not an array is returned unchanged."""
    if not isinstance(x, np.ndarray):
        return x
    narrow = dtype == "bfloat16" and x.dtype.kind == "f"
    if arrays == "torch":
        import torch

        tensor = torch.from_numpy(x)
        return tensor.to(torch.bfloat16) if narrow else tensor
    if arrays == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x, dtype=jnp.bfloat16) if narrow else jnp.asarray(x)
    return x


def precision(dtype: str, arrays: str) -> contextlib.AbstractContextManager[Any]:
    """JAX computes in float64 only where it is told to."""
    if ("jax" not in sys.modules and arrays != "jax") or dtype not in ("", "float64"):
        return contextlib.nullcontext()
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


def available(kind: str) -> bool:
    """Whether arrays of this kind may be what the object takes: JAX only if its file has imported it."""
    if kind == "jax":
        return "jax" in sys.modules
    if kind == "torch":
        import importlib.util

        return importlib.util.find_spec("torch") is not None
    return True
