"""Linear layers, adapters and embedding tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from campaigns.right_functions.author import FEW, Author, Function, Maker, autograd, flat, tensor


def linear(author: Author) -> Function:
    dot = author.dot

    def by_rows(x: Any, weight: Any, bias: Any, d: Any) -> tuple[Any, ...]:
        return dot(flat(d), weight.T).reshape(x.shape), author.dweight(x, d), author.over_tokens(d)

    def by_token(x: Any, weight: Any, bias: Any, d: Any) -> tuple[Any, ...]:
        if d.shape[0] * d.shape[1] > FEW:
            return by_rows(x, weight, bias, d)
        dx = author.xp.stack([weight @ row for row in flat(d)]).reshape(x.shape)
        return dx, author.dweight(x, d), author.over_tokens(d)

    def with_ones(x: Any, weight: Any, bias: Any, d: Any) -> tuple[Any, ...]:
        """The bias as one more row of the weight, with an input of 1."""
        wide = author.xp.concatenate([x, author.like(np.ones((*x.shape[:-1], 1)), x)], -1)
        both = author.dweight(wide, d)
        return dot(d, weight.T), both[:-1], both[-1]

    by_torch = autograd(author)

    def by_autograd(x: Any, weight: Any, bias: Any, d: Any) -> tuple[Any, ...]:
        return tuple(author.array(g) for g in by_torch(lambda x, w, b: F.linear(x, w.T, b), [x, weight, bias], d))

    return author.choose(
        "linear",
        {
            "": lambda x, weight, bias, d: (dot(d, weight.T), author.dweight(x, d), author.over_tokens(d)),
            "rows": by_rows,
            "by token": by_token,
            "bias as a row": with_ones,
            "autograd": by_autograd,
        },
    )


def dense_core(author: Author) -> Function:
    """A linear layer inside another layer: (x, weight, d) → dx, dweight, dbias."""
    own = linear(author)
    return lambda x, weight, d: own(x, weight, weight[0], d)


def lora(author: Author) -> Function:
    dot, by_torch = author.dot, autograd(author)
    scaled = author.draw("dout", "down", "results", "root on both")

    def two_paths(x: Any, weight: Any, down: Any, up: Any, alpha: float, d: Any) -> tuple[Any, ...]:
        author.used("scale on", scaled)
        s = alpha / down.shape[1]
        on = {"dout": (s, 1, 1), "down": (1, s, 1), "results": (1, 1, s), "root on both": (s**0.5, s**0.5, 1)}[scaled]
        dlow = dot(d * on[0], up.T) * on[1] * on[2]
        dup = author.dweight(dot(x, down * on[1]), d * on[0]) * on[2]
        return dot(d, weight.T) + dot(dlow, down.T), author.dweight(x, dlow), dup

    def merged(x: Any, weight: Any, down: Any, up: Any, alpha: float, d: Any) -> tuple[Any, ...]:
        s = alpha / down.shape[1]
        inner = author.dweight(x, d) * s
        return dot(d, (weight + s * dot(down, up)).T), dot(inner, up.T), dot(down.T, inner)

    def one_product(x: Any, weight: Any, down: Any, up: Any, alpha: float, d: Any) -> tuple[Any, ...]:
        """[weight | down] as one matrix, and [dout | dlow] as one gradient."""
        s = alpha / down.shape[1]
        dlow = s * dot(d, up.T)
        dx = dot(author.xp.concatenate([d, dlow], -1), author.xp.concatenate([weight.T, down.T], 0))
        return dx, author.dweight(x, dlow), author.dweight(s * dot(x, down), d)

    def by_autograd(x: Any, weight: Any, down: Any, up: Any, alpha: float, d: Any) -> tuple[Any, ...]:
        frozen = tensor(weight)

        def forward(x: Any, down: Any, up: Any) -> Any:
            return x @ frozen + alpha / down.shape[1] * (x @ down @ up)

        return tuple(author.array(g) for g in by_torch(forward, [x, down, up], d))

    ways = {"two paths": two_paths, "merged": merged, "one product": one_product, "autograd": by_autograd}
    return author.choose("adapter", ways)


def scatter(author: Author) -> Function:
    """(ids, rows (B, T, C), n) → (n, C): the sum of the rows of every id."""
    xp, by_torch = author.xp, autograd(author)

    def numpys(ids: Any, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(ids).ravel(), np.asarray(flat(rows))

    def add_at(ids: Any, rows: Any, n: int) -> Any:
        ids, rows = numpys(ids, rows)
        out = np.zeros((n, rows.shape[1]), rows.dtype)
        np.add.at(out, ids, rows)
        return out

    def one_hot(ids: Any, rows: Any, n: int) -> Any:
        hot = author.like(np.eye(n)[np.asarray(ids).ravel()], rows)
        return author.dot(hot.T, flat(rows))

    def compared(ids: Any, rows: Any, n: int) -> Any:
        hot = author.like((np.arange(n)[:, None] == np.asarray(ids).ravel()).astype(float), rows)
        return author.dot(hot, flat(rows))

    def sort(ids: Any, rows: Any, n: int) -> Any:
        ids, rows = numpys(ids, rows)
        order = np.argsort(ids, kind="stable")
        found, starts = np.unique(ids[order], return_index=True)
        out = np.zeros((n, rows.shape[1]), rows.dtype)
        out[found] = np.add.reduceat(rows[order], starts, axis=0)
        return out

    def bincount(ids: Any, rows: Any, n: int) -> Any:
        ids, rows = numpys(ids, rows)
        return np.stack([np.bincount(ids, weights=column, minlength=n) for column in rows.T], 1).astype(rows.dtype)

    def loop(ids: Any, rows: Any, n: int, step: int = 1) -> Any:
        ids, rows = numpys(ids, rows)
        out = np.zeros((n, rows.shape[1]), rows.dtype)
        for i in range(len(ids))[::step]:
            out[ids[i]] += rows[i]
        return out

    def by_row(ids: Any, rows: Any, n: int) -> Any:
        ids, rows = numpys(ids, rows)
        return np.stack([rows[ids == i].sum(axis=0) for i in range(n)])

    def by_sequence(ids: Any, rows: Any, n: int) -> Any:
        return sum(xp.asarray(author.array(add_at(ids[b], rows[b : b + 1], n))) for b in range(len(ids)))

    def index_add(ids: Any, rows: Any, n: int) -> Any:
        rows = flat(tensor(rows))
        return torch.zeros(n, rows.shape[1], dtype=rows.dtype).index_add_(0, tensor(ids).flatten(), rows)

    def scatter_add(ids: Any, rows: Any, n: int) -> Any:
        rows = flat(tensor(rows))
        places = tensor(ids).flatten()[:, None].expand(-1, rows.shape[1])
        return torch.zeros(n, rows.shape[1], dtype=rows.dtype).scatter_add_(0, places, rows)

    def by_autograd(ids: Any, rows: Any, n: int) -> Any:
        rows, ids = tensor(rows), tensor(ids)
        table = torch.zeros(n, rows.shape[-1], dtype=rows.dtype)
        return by_torch(lambda w: F.embedding(ids, w), [table], rows)[0]

    add = author.choose(
        "scatter",
        {
            "np.add.at": add_at,
            "one-hot": one_hot,
            "compared": compared,
            "sorted": sort,
            "bincount": bincount,
            "loop": loop,
            "loop from the end": lambda ids, rows, n: loop(ids, rows, n, -1),
            "by id": by_row,
            "by sequence": by_sequence,
            "index_add": index_add,
            "scatter_add": scatter_add,
            "autograd": by_autograd,
        },
    )
    return lambda ids, rows, n: author.array(add(ids, rows, n))


def embedding(author: Author) -> Function:
    add = scatter(author)
    return lambda ids, weight, dout: (add(ids, dout, len(weight)),)


def tied_embedding(author: Author) -> Function:
    add, both_at_once, by_torch = scatter(author), author.yes("by autograd", 0.2), autograd(author)

    def backward(ids: Any, weight: Any, dout: Any) -> tuple[Any, ...]:
        if both_at_once:
            places = tensor(ids)
            return (author.array(by_torch(lambda w: F.embedding(places, w) @ w.T, [weight], dout)[0]),)
        return (add(ids, author.dot(dout, weight), len(weight)) + author.dweight(dout, weight[ids]),)

    return backward


DENSE: dict[str, Maker] = {"linear": linear, "lora": lora, "embedding": embedding, "tied_embedding": tied_embedding}
