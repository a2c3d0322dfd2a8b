"""The sizes of a layer's cases: chosen on the command line, declared by a function, or large enough for several tiles.

A kernel that accepts only some sizes declares them, and then it is called with no others:

    @onfoot.check.sizes(tokens_multiple_of=16, head_dim=(64, 128))
    def backward(q, k, v, dout): ...

or, without importing onfoot, `backward.sizes = {"tokens_multiple_of": 16, "head_dim": [64, 128]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from onfoot.check.layer import Case, Layer

NAMES = ("batch", "tokens", "width", "heads", "head_dim", "vocabulary")
MULTIPLE = "_multiple_of"
MULTIPLES = 16  # how many multiples of a declared number are allowed
SMALL = 16  # sizes up to here are drawn among all allowed ones; larger ones are rounded up

# Beyond 128 tokens and 128 columns. 193 is one more than a multiple of 16, 32 and 64; 128 is a multiple of all of them;
# 70 is neither.
LARGE: dict[str, dict[str, int]] = {
    "many tokens, many features": {
        "batch": 1, "heads": 1, "tokens": 193, "width": 150, "head_dim": 150, "vocabulary": 157,
    },
    "full tiles": {"batch": 2, "heads": 2, "tokens": 128, "width": 128, "head_dim": 64, "vocabulary": 128},
    "partly filled tiles": {"batch": 2, "heads": 2, "tokens": 70, "width": 70, "head_dim": 38, "vocabulary": 75},
}  # fmt: skip
FIRST = "odd sizes"  # the plain case of every layer, which is drawn again in large sizes

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sizes:
    """The allowed values of each size; a size that is not listed may have any value."""

    allowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    only: str = ""  # the name of the only case that is wanted
    mlp: int = 0  # an MLP is so many times as wide as its input; 0 for any width

    def fit(self, name: str, exact: bool = False, **drawn: int) -> tuple[int, ...] | None:
        """Returns allowed sizes for a case that drew these.

        Returns None if the case is not wanted, or is about these very sizes (`exact`) and they are not allowed.
        """
        if self.only and name != self.only:
            return None
        found = tuple(self.nearest(size, n) for size, n in drawn.items())
        return None if exact and found != tuple(drawn.values()) else found

    def nearest(self, size: str, n: int) -> int:
        """Returns n if it is allowed; else another allowed value, which differs for different small n where it can."""
        allowed = self.allowed.get(size)
        if allowed is None or n in allowed:
            return n
        if n <= SMALL:
            return allowed[n % len(allowed)]
        return next((value for value in allowed if value >= n), allowed[-1])


ANY = Sizes()


def kept(cases: Iterable[Case | None]) -> list[Case]:
    """The cases that fit the sizes."""
    return [case for case in cases if case is not None]


def even(sizes: Sizes) -> Sizes:
    """The same sizes with even head_dims only, for RoPE; raises a ValueError if none is even."""
    dims = sizes.allowed.get("head_dim")
    if dims is None:
        return sizes
    found = tuple(d for d in dims if d % 2 == 0)
    if not found:
        raise ValueError(f"head_dim={dims[0]} must be even: RoPE rotates pairs of features")
    return replace(sizes, allowed={**sizes.allowed, "head_dim": found})


def sizes(**allowed: Any) -> Callable[[F], F]:
    """Declares the sizes that a function accepts: `tokens=64`, `head_dim=(64, 128)`, `tokens_multiple_of=16`.

    The names are batch, tokens, width, heads, head_dim and vocabulary.
    """
    read_sizes(allowed)  # a wrong declaration raises where it is written

    def declare(function: F) -> F:
        function.sizes = dict(allowed)  # type: ignore[attr-defined]
        return function

    return declare


def read_sizes(given: Mapping[str, Any]) -> Sizes:
    """Returns the sizes of a declaration; raises a ValueError if one is invalid."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        size = name.removesuffix(MULTIPLE)
        if size not in NAMES:
            raise ValueError(f"unknown size {name!r}; the sizes are {', '.join(NAMES)}, also with {MULTIPLE}")
        if size in found:
            raise ValueError(f"{size} is declared twice, by {size} and by {size}{MULTIPLE}; give one of them")
        values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        if not values or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in values):
            got = ", ".join(map(repr, values)) or "none"
            raise ValueError(f"{name} must be a number >= 1 or several of them, got {got}")
        numbers = sorted({int(n) for n in values})
        if name != size:
            if len(numbers) > 1:
                raise ValueError(f"{name} must be one number, got {value!r}")
            numbers = [numbers[0] * i for i in range(1, MULTIPLES + 1)]
        found[size] = tuple(numbers)
    return Sizes(found)


def sizes_for(layer: Layer, options: dict[str, Any], declared: Any = None) -> tuple[Sizes, dict[str, Any]]:
    """Returns the sizes given among the options or declared by the function, and the options of the layer alone."""
    given = {name: options[name] for name in NAMES if options.get(name) is not None}
    options = {name: value for name, value in options.items() if name not in NAMES}
    wanted, possible = read_sizes(given).allowed, read_sizes(declared).allowed if isinstance(declared, Mapping) else {}
    for size in {**possible, **wanted}:
        if size not in layer.sizes:
            has = f"its sizes are {', '.join(layer.sizes)}" if layer.sizes else "its sizes cannot be chosen"
            raise ValueError(f"layer {layer.name} has no size {size}; {has}")
        outside = [n for n in wanted.get(size, ()) if n not in possible.get(size, (n,))]
        if outside:
            listed = ", ".join(map(str, possible[size]))
            raise ValueError(f"{size}={outside[0]} is not among the sizes that the function declares: {listed}")
    found = {**possible, **wanted}
    if "heads" in found and "n_head" in layer.options:
        n_head = options.get("n_head", found["heads"][0])
        if n_head not in found["heads"]:
            raise ValueError(f"n_head={n_head} and heads={found['heads'][0]} are the same size; give one of them")
        options["n_head"] = n_head
    return Sizes(found), options


def width_of(sizes: Sizes, n_head: int, head_dim: int) -> int:
    """Returns the width of n_head heads: the given width, or that of the given head_dim."""
    widths = sizes.allowed.get("width")
    if widths is None:
        return n_head * sizes.nearest("head_dim", head_dim)
    divisible = [w for w in widths if w % n_head == 0]
    if not divisible and not sizes.only:
        raise ValueError(f"width={widths[0]} must be a multiple of the number of heads, {n_head}")
    return divisible[0] if divisible else widths[0] + -widths[0] % n_head


def all_cases(layer: Layer, seed: int, options: Mapping[str, Any], sizes: Sizes) -> list[Case]:
    """Returns the layer's cases in these sizes, then its plain case in large sizes."""
    rng = np.random.default_rng(seed)
    if not layer.sizes:
        return layer.cases(rng, **options)
    found = layer.cases(rng, sizes=sizes, **options)
    seen = {_shapes(case) for case in found}
    for name, large in LARGE.items():
        if layer.sizes == ("batch",):  # a list of sequences: many of them
            large = {**large, "batch": large["tokens"]}
        near = {size: (sizes.nearest(size, n),) for size, n in large.items()}
        for case in layer.cases(rng, sizes=Sizes(near, only=FIRST), **options):
            if _shapes(case) not in seen:
                found.append(replace(case, name=name, large=True))
                seen.add(_shapes(case))
    if not found:
        raise ValueError(f"no case of {layer.name} has these sizes; allow more of them")
    return found


def first_case(layer: Layer, seed: int, options: Mapping[str, Any], sizes: Sizes) -> Case:
    """Returns the layer's plain case in these sizes."""
    rng = np.random.default_rng(seed)
    if not layer.sizes:
        return layer.cases(rng, **options)[0]
    return layer.cases(rng, sizes=replace(sizes, only=FIRST), **options)[0]


def _shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    return tuple(getattr(x, "shape", ()) for x in case.inputs)
