"""Layer norm and RMS norm: one, two or running passes over the features, and several equal forms of dx."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from campaigns.right_functions.author import Author, Function, Maker, autograd


def moments(author: Author) -> Function:
    """(x, whether to centre) → x − mean and its mean square, each token's own."""
    xp, mean = author.xp, author.mean

    def two_passes(x: Any, centre: bool) -> tuple[Any, Any]:
        centred = x - mean(x) if centre else x
        return centred, mean(centred * centred)

    def corrected(x: Any, centre: bool) -> tuple[Any, Any]:
        """What rounding left in the mean is taken out of the squares."""
        centred, square = two_passes(x, centre)
        return (centred, square - mean(centred) ** 2) if centre else (centred, square)

    def shifted(x: Any, centre: bool) -> tuple[Any, Any]:
        """About the first feature: mean of squares minus squared mean, where both are small."""
        if not centre:
            return two_passes(x, centre)
        moved = x - x[..., :1]
        average = mean(moved)
        return moved - average, mean((moved - average) ** 2)

    def welford(x: Any, centre: bool) -> tuple[Any, Any]:
        if not centre:
            return two_passes(x, centre)
        average, square = 0 * x[..., :1], 0 * x[..., :1]
        for i in range(x.shape[-1]):
            column = x[..., i : i + 1]
            before = column - average
            average = average + before / (i + 1)
            square = square + before * (column - average)
        return x - average, square / x.shape[-1]

    def joined(x: Any, centre: bool) -> tuple[Any, Any]:
        """Tiles of features, whose counts, means and squares are joined (Chan)."""
        if not centre:
            return two_passes(x, centre)
        n, average, square = 0, 0 * x[..., :1], 0 * x[..., :1]
        for i in range(0, x.shape[-1], author.tile):
            part = x[..., i : i + author.tile]
            m, own = part.shape[-1], mean(part)
            gap = own - average
            square = square + author.total((part - own) ** 2) + gap * gap * (n * m / (n + m))
            average, n = average + gap * (m / (n + m)), n + m
        return x - average, square / n

    def in_float64(x: Any, centre: bool) -> tuple[Any, Any]:
        wide = author.cast(x, "float64")
        centred = wide - wide.mean(axis=-1, keepdims=True) if centre else wide
        square = (centred * centred).mean(axis=-1, keepdims=True)
        return author.cast(centred, author.dtype(x)), author.cast(square, author.dtype(x))

    def norm_of(x: Any, centre: bool) -> tuple[Any, Any]:
        centred = x - mean(x) if centre else x
        return centred, xp.linalg.norm(centred, axis=-1, keepdims=True) ** 2 / x.shape[-1]

    return author.choose(
        "moments",
        {
            "two passes": two_passes,
            "corrected": corrected,
            "shifted": shifted,
            "Welford": welford,
            "joined tiles": joined,
            "float64": in_float64,
            "norm": norm_of if xp is np else two_passes,
        },
    )


def norm_core(author: Author) -> Function:
    """(x, weight, dout, eps, whether to centre) → ā and dx."""
    xp, dot, measured = author.xp, author.dot, moments(author)
    form = author.draw("means", "sums", "steps", "Jacobian", "projections", "x and r³")
    root = author.choose(
        "root",
        {
            "1/√": lambda v: 1 / xp.sqrt(v),
            "power": lambda v: v**-0.5,
            "two powers": lambda v: 1 / v**0.5,
            "logarithm": lambda v: xp.exp(-0.5 * xp.log(v)),
            "√ of 1/": lambda v: xp.sqrt(1 / v),
        },
    )

    def core(x: Any, weight: Any, dout: Any, eps: float, centre: bool) -> tuple[Any, Any]:
        author.used("dx by", form)
        d, g = x.shape[-1], dout * weight
        c, square = measured(x, centre)
        r = root(square + eps)
        z = c * r
        total = author.total(g) if centre else 0
        if form == "means":
            return z, (g - total / d - z * author.mean(g * z)) * r
        if form == "sums":
            return z, (d * g - total - z * author.total(g * z)) * (r / d)
        if form == "steps":
            dsquare = -0.5 * author.total(g * c) * r**3
            dmean = -r * total if centre else 0
            return z, g * r + 2 * dsquare * c / d + dmean / d
        if form == "projections":
            across = g - total / d
            return z, r * (across - c * (author.total(across * c) * (r * r / d)))
        if form == "x and r³":
            return z, r * (g - total / d) - c * (r**3 * author.mean(c * g))
        wide = author.like(np.eye(d) - (1 / d if centre else 0), x) - z[..., :, None] * z[..., None, :] / d
        return z, dot(g[..., None, :], wide)[..., 0, :] * r

    return core


def layer_norm(author: Author) -> Function:
    core, by_torch = norm_core(author), autograd(author)
    way = author.one_of("norm", "", "", "", "", "autograd", "by token")

    def by_hand(x: Any, weight: Any, bias: Any, dout: Any, eps: float = 1e-5) -> tuple[Any, ...]:
        z, dx = core(x, weight, dout, eps, True)
        return dx, author.over_tokens(dout * z), author.over_tokens(dout)

    def by_autograd(x: Any, weight: Any, bias: Any, dout: Any, eps: float = 1e-5) -> tuple[Any, ...]:
        def forward(x: Any, weight: Any, bias: Any) -> Any:
            centred = x - x.mean(-1, keepdim=True)
            return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias

        return tuple(author.array(g) for g in by_torch(forward, [x, weight, bias], dout))

    def by_token(x: Any, weight: Any, bias: Any, dout: Any, eps: float = 1e-5) -> tuple[Any, ...]:
        """One sequence at a time, its gradients added to those before it."""
        dx, dweight, dbias = author.xp.zeros_like(x), 0 * weight, 0 * weight
        for b in range(len(x)):
            z, dx[b] = core(x[b], weight, dout[b], eps, True)
            dweight, dbias = dweight + author.total(dout[b] * z, 0)[0], dbias + author.total(dout[b], 0)[0]
        return dx, dweight, dbias

    return {"": by_hand, "autograd": by_autograd, "by token": by_token}[way]


def rms_norm(author: Author) -> Function:
    core, by_torch, with_autograd = norm_core(author), autograd(author), author.yes("by autograd", 0.15)

    def backward(x: Any, weight: Any, dout: Any, eps: float = 1e-6) -> tuple[Any, ...]:
        if with_autograd:

            def forward(x: Any, weight: Any) -> Any:
                return weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps))

            return tuple(author.array(g) for g in by_torch(forward, [x, weight], dout))
        z, dx = core(x, weight, dout, eps, False)
        return dx, author.over_tokens(dout * z)

    return backward


NORMS: dict[str, Maker] = {"layer_norm": layer_norm, "rms_norm": rms_norm}
