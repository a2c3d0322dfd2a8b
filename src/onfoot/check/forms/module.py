"""An nn.Module, as a class or an instance: its parameters are the layer's inputs, by name and then by shape."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from onfoot.check.forms.construct import construct
from onfoot.check.forms.differentiable import autograd, leaves_of
from onfoot.check.forms.form import Expected, Form, FormError
from onfoot.check.forms.function import Call
from onfoot.check.forms.names import match

Places = dict[str, tuple[str, bool]]  # argument -> the module's parameter, and whether it is its transpose


def is_module(held: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return issubclass(held, torch.nn.Module) if isinstance(held, type) else isinstance(held, torch.nn.Module)


class Module(Form):
    """`class Mine(nn.Module)` or an instance of it."""

    kinds = ("torch",)

    def __init__(self, held: Any, expected: Expected) -> None:
        super().__init__(expected)
        self.held, self.is_class = held, isinstance(held, type)
        self.name = held.__name__ if self.is_class else type(held).__name__
        self.places: Places | None = None
        self.sentence = f"an nn.Module, {self.name}"
        if not self.is_class:
            vectors = {p.shape[0] for p in held.parameters() if p.ndim == 1}
            widths = sorted(vectors or {n for p in held.parameters() for n in p.shape})
            self.own_sizes = {"width": [int(n) for n in widths]} if widths else None

    def gradients(self, inputs: dict[str, Any], upstream: Any, options: Mapping[str, Any], arrays: str) -> Any:
        import torch

        leaves = leaves_of(inputs, self.expected)
        values = {**inputs, **leaves}
        if self.is_class:
            module, how, _ = construct(self.held, self.expected, {n: _constant(x) for n, x in inputs.items()}, options)
        else:
            module, how = copy.deepcopy(self.held), self.name
        dtype = next((x.dtype for x in leaves.values()), None)
        module = (module.to(dtype) if dtype is not None else module).eval()
        call = Call(module.forward, self.expected.inputs, self.expected.options)
        if not call.complete:
            missing = ", ".join(call.matching.unknown)
            raise FormError(
                f"{self.name}.forward needs {missing}, which is no input of the layer {self.expected.layer}"
            )
        passed = set(call.matching.arguments.values())
        if self.places is None:
            self.places = _places(module, {n: x for n, x in values.items() if n not in passed}, self.name)
            self.takes = [*passed, *self.places]
            self._say(how, call)
        parameters = {
            name: values[argument].T if transposed else values[argument]
            for argument, (name, transposed) in self.places.items()
        }

        def forward(*given: Any, **more: Any) -> Any:
            return torch.func.functional_call(module, parameters, given, more)

        call.function = forward
        return autograd(call(values, options), leaves, upstream, self.expected)

    def _say(self, how: str, call: Call) -> None:
        assert self.places is not None
        renamed = [f"{name} = {argument}" for argument, (name, _) in self.places.items() if name != argument]
        turned = [name for _, (name, transposed) in self.places.items() if transposed]
        passed = [f"{n} = {a}" for n, a in call.matching.arguments.items() if n != a]
        said = [f"an nn.Module, {how}" if self.is_class else f"an nn.Module, an instance of {how}"]
        said += [f"by name and shape: {', '.join(passed + renamed)}"] if passed or renamed else []
        said += [f"{', '.join(turned)} is (out, in), the transpose of the layer's"] if turned else []
        self.sentence = "; ".join(said)


def _constant(x: Any) -> Any:
    return x.detach() if hasattr(x, "detach") else x


def _places(module: Any, inputs: Mapping[str, Any], name: str) -> Places:
    """Which of the layer's inputs each parameter of a module is: by name, then by shape, in order.

    A frozen one, such as the weight beside an adapter, is an input as well, but need not be one.
    """
    every = dict(module.named_parameters())
    own = dict(sorted(every.items(), key=lambda one: not one[1].requires_grad))
    arrays = {n: x for n, x in inputs.items() if getattr(x, "ndim", 0)}
    last = [n.rsplit(".", 1)[-1] for n in own]
    short = dict(zip(own, last, strict=True)) if len(set(last)) == len(last) else {n: n for n in own}
    by_name = match(list(short.values()), tuple(arrays))
    long = {s: n for n, s in short.items()}
    places: Places = {}
    for s, argument in by_name.arguments.items():
        turned = _transposed(module, long[s], own[long[s]], arrays[argument])
        if turned is not None:
            places[argument] = long[s], turned
    used = {n for n, _ in places.values()}
    for argument, x in arrays.items():  # by shape
        if argument in places:
            continue
        for n, p in own.items():
            turned = _transposed(module, n, p, x) if n not in used and p.ndim == x.ndim else None
            if turned is not None and tuple(p.shape) == tuple(x.shape[::-1] if turned else x.shape):
                places[argument] = n, turned
                used.add(n)
                break
    left = [n for n in own if n not in used and own[n].requires_grad]
    if left:
        raise FormError(
            f"{name} has parameters that are no inputs of the layer, by name or by shape: "
            + ", ".join(f"{n} {tuple(own[n].shape)}" for n in left)
        )
    return places


def _transposed(module: Any, name: str, parameter: Any, x: Any) -> bool | None:
    """Whether the parameter is the transpose of the input: always in nn.Linear, else as the shapes say; or None."""
    import torch

    owner = module.get_submodule(name.rpartition(".")[0])
    if parameter.ndim == 2 and x.ndim == 2 and isinstance(owner, torch.nn.Linear):
        return True
    if parameter.ndim != x.ndim:
        return None
    if tuple(parameter.shape) == tuple(x.shape):
        return False
    if parameter.ndim == 2 and tuple(parameter.shape) == tuple(x.shape)[::-1]:
        return True
    return False if parameter.ndim <= 2 else None  # an instance in its own sizes: the parameter is replaced
