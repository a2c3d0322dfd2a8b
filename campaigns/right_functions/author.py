"""An author of backward passes: draws NumPy or PyTorch, the precision inside, and how to compute products and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]
SMALL = 200_000  # entries of an intermediate array; above it, a choice that needs more memory falls back to a product
FEW = 96  # turns of a loop over tokens; above it, the same in one expression


def t(x: Any) -> Any:
    """xᵗ over the last two axes."""
    return x.swapaxes(-1, -2)


def flat(x: Any) -> Any:
    """(B, T, C) as rows (B·T, C)."""
    return x.reshape(-1, x.shape[-1])


class Author:
    """Random choices, recorded when they are used; the list of them says which implementation it is."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.chosen: dict[str, None] = {}
        self.xp: Any = {"numpy": np, "torch": torch}[self.one_of("arrays", "numpy", "torch")]
        self.inside: str = self.one_of("inside", *[""] * 13, "float32", *["float64"] * 2)
        self.tile = int(rng.integers(1, 25))
        self.dot: Function = self.choose("product", self._products())  # of matrices
        self._total: Function = self.choose("sum", self._sums())
        self.dweight: Function = self.choose("dweight", self._weight_gradients())
        self.over_tokens: Function = self.choose("dbias", self._token_sums())

    # Choices

    def draw(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def used(self, what: str, option: Any = True) -> None:
        """Records a choice; the usual ones ("", False) have no name."""
        if option not in ("", False):
            self.chosen[what if option is True else f"{what}: {option}"] = None

    def one_of(self, what: str, *options: Any) -> Any:
        found = self.draw(*options)
        self.used(what, found)
        return found

    def yes(self, what: str, chance: float = 0.5) -> bool:
        found = bool(self.rng.random() < chance)
        self.used(what, found)
        return found

    def number(self, what: str, low: int, high: int) -> int:
        return int(self.one_of(what, *range(low, high + 1)))

    def choose(self, what: str, table: dict[str, Function]) -> Function:
        """One of the functions, recorded when it is called."""
        name = self.draw(*table)

        def function(*arguments: Any, **options: Any) -> Any:
            self.used(what, name)
            return table[name](*arguments, **options)

        return function

    @property
    def description(self) -> str:
        return ", ".join(self.chosen)

    # Arrays

    def array(self, x: Any) -> Any:
        """An argument in this author's kind of array and precision."""
        if not hasattr(x, "shape"):
            return x
        x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        if x.dtype.kind == "f" and self.inside:
            x = x.astype(self.inside)
        return x if self.xp is np else torch.from_numpy(np.ascontiguousarray(x).copy())

    def like(self, values: np.ndarray, x: Any) -> Any:
        """Constants, such as a mask or an identity, in the kind of array and the dtype of x."""
        if self.xp is np:
            return values if values.dtype.kind == "b" else values.astype(x.dtype)
        found = torch.from_numpy(np.ascontiguousarray(values))
        return found if values.dtype.kind == "b" else found.to(x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype) if self.xp is np else x.to(getattr(torch, dtype))

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    # Products and sums

    def _products(self) -> dict[str, Function]:
        xp = self.xp

        def einsum(a: Any, b: Any) -> Any:
            return xp.einsum("...ij,...jk->...ik", a, b)

        def in_tiles(a: Any, b: Any) -> Any:
            starts = range(0, a.shape[-1], self.tile)
            return sum(a[..., i : i + self.tile] @ b[..., i : i + self.tile, :] for i in starts)

        def row_tiles(a: Any, b: Any) -> Any:
            return xp.concatenate([a[..., i : i + self.tile, :] @ b for i in range(0, a.shape[-2], self.tile)], -2)

        def column_tiles(a: Any, b: Any) -> Any:
            return xp.concatenate([a @ b[..., i : i + self.tile] for i in range(0, b.shape[-1], self.tile)], -1)

        def outer_products(a: Any, b: Any) -> Any:
            if a.shape[-1] > FEW:
                return in_tiles(a, b)
            return sum(a[..., i, None] * b[..., i, None, :] for i in range(a.shape[-1]))

        def backwards(a: Any, b: Any) -> Any:
            return xp.flip(a, (-1,)) @ xp.flip(b, (-2,))

        def in_float64(a: Any, b: Any) -> Any:
            return self.cast(self.cast(a, "float64") @ self.cast(b, "float64"), self.dtype(a))

        def broadcast(a: Any, b: Any) -> Any:
            if max(np.prod(a.shape), 1) * b.shape[-1] > SMALL:
                return a @ b
            return (a[..., :, :, None] * b[..., None, :, :]).sum(axis=-2)

        def padded(a: Any, b: Any) -> Any:
            more = -a.shape[-1] % 8
            wide = xp.concatenate([a, xp.zeros((*a.shape[:-1], more), dtype=a.dtype)], -1)
            tall = xp.concatenate([b, xp.zeros((*b.shape[:-2], more, b.shape[-1]), dtype=b.dtype)], -2)
            return wide @ tall

        return {
            "@": lambda a, b: a @ b,
            "einsum": einsum,
            "transposed": lambda a, b: t(t(b) @ t(a)),
            f"sums of {self.tile}": in_tiles,
            f"{self.tile} rows at a time": row_tiles,
            f"{self.tile} columns at a time": column_tiles,
            "outer products": outer_products,
            "in reverse order": backwards,
            "float64 accumulation": in_float64,
            "broadcast": broadcast,
            "zero-padded": padded,
        }

    def total(self, x: Any, axis: int = -1) -> Any:
        """The sum over one axis, which is kept."""
        return self._total(x, axis)

    def _sums(self) -> dict[str, Function]:
        xp = self.xp

        def along(of_rows: Function) -> Function:
            return lambda x, axis: xp.moveaxis(of_rows(xp.moveaxis(x, axis, 0))[None], 0, axis)

        def in_order(rows: Any) -> Any:
            found = rows[0]
            for row in rows[1:]:
                found = found + row
            return found

        def kahan(rows: Any) -> Any:
            found, lost = 0 * rows[0], 0 * rows[0]
            for row in rows:
                more = row - lost
                new = found + more
                found, lost = new, (new - found) - more
            return found

        def pairwise(rows: Any) -> Any:
            half = len(rows) // 2
            return rows[0] if len(rows) == 1 else pairwise(rows[:half]) + pairwise(rows[half:])

        def in_tiles(rows: Any) -> Any:
            return in_order([rows[i : i + self.tile].sum(axis=0) for i in range(0, len(rows), self.tile)])

        def strided(rows: Any) -> Any:
            """Lane by lane, as vector units add."""
            return in_order([rows[i::4].sum(axis=0) for i in range(min(4, len(rows)))])

        def by_ones(x: Any, axis: int) -> Any:
            rows = xp.moveaxis(x, axis, -1)
            return xp.moveaxis(rows @ xp.ones((rows.shape[-1], 1), dtype=x.dtype), -1, axis)

        def in_float64(x: Any, axis: int) -> Any:
            return self.cast(self.cast(x, "float64").sum(axis=axis, keepdims=True), self.dtype(x))

        return {
            "plain": lambda x, axis: x.sum(axis=axis, keepdims=True),
            "one by one": along(in_order),
            "one by one from the end": along(lambda rows: in_order(xp.flip(rows, (0,)))),
            "Kahan": along(kahan),
            "pairwise": along(pairwise),
            f"{self.tile} at a time": along(in_tiles),
            "lanes": along(strided),
            "product with ones": by_ones,
            "float64 accumulation": in_float64,
            "mean times n": lambda x, axis: x.mean(axis=axis, keepdims=True) * x.shape[axis],
        }

    def mean(self, x: Any) -> Any:
        return self.total(x) / x.shape[-1]

    def _weight_gradients(self) -> dict[str, Function]:
        """xᵗ d, summed over sequences and tokens: (B, T, I), (B, T, O) → (I, O)."""
        xp = self.xp

        def by_token(x: Any, d: Any) -> Any:
            rows, gradients = flat(x), flat(d)
            if len(rows) > FEW:
                return self.dot(rows.T, gradients)
            return sum(row[:, None] * g for row, g in zip(rows, gradients, strict=True))

        def by_tiles_of_tokens(x: Any, d: Any) -> Any:
            rows, gradients = flat(x), flat(d)
            starts = range(0, len(rows), self.tile)
            return sum(rows[i : i + self.tile].T @ gradients[i : i + self.tile] for i in starts)

        return {
            "einsum": lambda x, d: xp.einsum("bti,bto->io", x, d),
            "rows": lambda x, d: self.dot(flat(x).T, flat(d)),
            "by sequence": lambda x, d: sum(self.dot(x[b].T, d[b]) for b in range(len(x))),
            "batched": lambda x, d: self.total(t(x) @ d, 0)[0],
            "by token": by_token,
            f"{self.tile} tokens at a time": by_tiles_of_tokens,
            "tensordot": lambda x, d: xp.tensordot(x, d, ([0, 1], [0, 1])),
            "transposed": lambda x, d: self.dot(flat(d).T, flat(x)).T,
        }

    def _token_sums(self) -> dict[str, Function]:
        """(B, T, C) → (C)."""
        xp = self.xp
        return {
            "both axes": lambda x: x.sum(axis=(0, 1)),
            "rows": lambda x: self.total(flat(x), 0)[0],
            "einsum": lambda x: xp.einsum("btc->c", x),
            "tokens first": lambda x: self.total(self.total(x, 1), 0)[0, 0],
            "sequences first": lambda x: self.total(self.total(x, 0), 1)[0, 0],
            "product with ones": lambda x: xp.ones(len(flat(x)), dtype=x.dtype) @ flat(x),
        }

    def order(self, n: int) -> tuple[Any, Any]:
        """A permutation, the same in every call, and its inverse."""
        there = np.random.default_rng([self.tile, n]).permutation(n)
        return there, np.argsort(there)


Maker = Callable[[Author], Function]


def tensor(x: Any) -> Any:
    """An array as a tensor; numbers stay as they are."""
    return torch.from_numpy(np.ascontiguousarray(x).copy()) if isinstance(x, np.ndarray) and x.ndim else x


def autograd(author: Author) -> Function:
    """(forward on tensors, inputs, dout) → the gradients, by one of PyTorch's ways."""
    way = author.draw(*["autograd.grad", "backward()", "grad of a sum"] * 2, "vjp")

    def gradients(forward: Function, inputs: Sequence[Any], dout: Any) -> list[Any]:
        author.used("by", way)
        given, dout = [tensor(x) for x in inputs], tensor(dout)
        if way == "vjp":
            return list(torch.func.vjp(forward, *given)[1](dout))
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out = forward(*leaves)
        if way == "backward()":
            out.backward(dout)
            return [leaf.grad for leaf in leaves]
        if way == "grad of a sum":
            return list(torch.autograd.grad((out * dout).sum(), leaves))
        return list(torch.autograd.grad(out, leaves, dout))

    return gradients
