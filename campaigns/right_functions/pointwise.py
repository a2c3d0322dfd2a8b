"""GELU in both forms, SiLU, SwiGLU, ReLU and rotary position embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from campaigns.right_functions.author import FEW, Author, Function, Maker, autograd, tensor

ROOT = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_tanh(author: Author) -> Function:
    """(x, dout) → dx of the form with tanh."""
    xp = author.xp

    def by_tanh(x: Any, dout: Any) -> Any:
        tanh, inner = xp.tanh(ROOT * (x + CUBIC * x**3)), ROOT * (1 + 3 * CUBIC * x**2)
        return dout * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner)

    def factored(x: Any, dout: Any) -> Any:
        square = x * x
        tanh = xp.tanh(ROOT * x * (1 + CUBIC * square))
        return 0.5 * dout * (1 + tanh) * (1 + x * (1 - tanh) * (ROOT + 3 * CUBIC * ROOT * square))

    def by_exponential(x: Any, dout: Any) -> Any:
        s = 1 / (1 + xp.exp(-2 * ROOT * x * (1 + CUBIC * x * x)))
        return dout * s + dout * x * s * (1 - s) * (2 * ROOT + 6 * ROOT * CUBIC * x * x)

    def by_hyperbolic_secant(x: Any, dout: Any) -> Any:
        u = xp.clip(ROOT * (x + CUBIC * x * x * x), -40, 40)
        return dout * (0.5 + 0.5 * xp.tanh(u) + x / (2 * xp.cosh(u) ** 2) * ROOT * (1 + 3 * CUBIC * x * x))

    return author.choose(
        "gelu",
        {"tanh": by_tanh, "factored": factored, "exponential": by_exponential, "secant": by_hyperbolic_secant},
    )


def gelu_erf(author: Author) -> Function:
    """(x, dout) → dx of the form with the error function."""
    xp, scale = author.xp, 1 / math.sqrt(2 * math.pi)

    def special(name: str, x: Any) -> Any:
        return author.array(getattr(torch.special, name)(tensor(x)))

    def by_erf(x: Any, dout: Any) -> Any:
        return dout * (0.5 * (1 + special("erf", x / math.sqrt(2))) + x * xp.exp(-0.5 * x * x) * scale)

    def by_erfc(x: Any, dout: Any) -> Any:
        return dout * 0.5 * special("erfc", -x * math.sqrt(0.5)) + dout * x * scale * xp.exp(-(x**2) / 2)

    def by_ndtr(x: Any, dout: Any) -> Any:
        return dout * (special("ndtr", x) + x * xp.exp(-((x / math.sqrt(2)) ** 2)) / math.sqrt(2 * math.pi))

    return author.choose("gelu", {"erf": by_erf, "erfc": by_erfc, "ndtr": by_ndtr})


def gelu(author: Author) -> Function:
    hand = {"tanh": gelu_tanh(author), "erf": gelu_erf(author)}
    with_autograd, by_torch = author.yes("by autograd", 0.15), autograd(author)

    def backward(x: Any, dout: Any, form: str = "tanh") -> tuple[Any, ...]:
        if with_autograd:
            approximate = "tanh" if form == "tanh" else "none"
            return (author.array(by_torch(lambda x: F.gelu(x, approximate=approximate), [x], dout)[0]),)
        return (hand[form](x, dout),)

    return backward


def sigmoid_and_slope(author: Author) -> tuple[Function, Function]:
    """σ(x), and the slope of x σ(x) given x and σ(x)."""
    xp = author.xp
    sigmoid = author.choose(
        "sigmoid",
        {
            "fraction": lambda x: 1 / (1 + xp.exp(-x)),
            "tanh": lambda x: 0.5 + 0.5 * xp.tanh(0.5 * x),
            "both sides": lambda x: xp.where(x >= 0, 1.0, xp.exp(-abs(x))) / (1 + xp.exp(-abs(x))),
            "logarithm": lambda x: xp.exp(-xp.logaddexp(0 * x, -x)),
        },
    )
    slope = author.choose(
        "slope",
        {
            "s + x s (1 − s)": lambda x, s: s + x * s * (1 - s),
            "s (1 + x − x s)": lambda x, s: s * (1 + x - x * s),
            "s (1 + x (1 − s))": lambda x, s: s * (1 + x * (1 - s)),
            "y + s (1 − y)": lambda x, s: x * s + s * (1 - x * s),
        },
    )
    return sigmoid, slope


def swiglu(author: Author) -> Function:
    sigmoid, slope = sigmoid_and_slope(author)
    with_autograd, by_torch = author.yes("by autograd", 0.15), autograd(author)
    early = author.yes("dout ∘ up first")

    def backward(gate: Any, up: Any, d: Any) -> tuple[Any, ...]:
        if with_autograd:
            return tuple(author.array(g) for g in by_torch(lambda g, u: F.silu(g) * u, [gate, up], d))
        s = sigmoid(gate)
        return (d * up) * slope(gate, s) if early else d * (up * slope(gate, s)), d * (gate * s)

    return backward


def silu(author: Author) -> Function:
    sigmoid, slope = sigmoid_and_slope(author)
    with_autograd, by_torch, rows = author.yes("by autograd", 0.15), autograd(author), author.yes("token by token", 0.2)

    def backward(x: Any, d: Any) -> tuple[Any, ...]:
        if with_autograd:
            return (author.array(by_torch(F.silu, [x], d)[0]),)
        if rows and x.shape[1] <= FEW:
            found = [d[:, i] * slope(x[:, i], sigmoid(x[:, i])) for i in range(x.shape[1])]
            return (author.xp.stack(found, 1),)
        return (d * slope(x, sigmoid(x)),)

    return backward


def relu_slope(author: Author) -> Function:
    """(x, dout) → dx of max(x, 0)."""
    xp = author.xp

    def in_place(x: Any, d: Any) -> Any:
        out = d * 1
        out[x <= 0] = 0
        return out

    def by_sign(x: Any, d: Any) -> Any:
        return d * (xp.sign(x) > 0)

    def from_output(x: Any, d: Any) -> Any:
        y = xp.maximum(x, 0 * x)
        return d * (y != 0)

    return author.choose(
        "relu",
        {
            "mask": lambda x, d: d * (x > 0),
            "where": lambda x, d: xp.where(x > 0, d, 0 * d),
            "in place": in_place,
            "sign": by_sign,
            "from the output": from_output,
        },
    )


def relu(author: Author) -> Function:
    slope, with_autograd, by_torch = relu_slope(author), author.yes("by autograd", 0.15), autograd(author)
    flat = author.yes("as one row", 0.2)

    def backward(x: Any, d: Any) -> tuple[Any, ...]:
        if with_autograd:
            return (author.array(by_torch(F.relu, [x], d)[0]),)
        return (slope(x.reshape(-1), d.reshape(-1)).reshape(x.shape) if flat else slope(x, d),)

    return backward


def rope(author: Author) -> Function:
    xp, by_torch = author.xp, autograd(author)

    frequencies = author.choose(
        "frequencies",
        {
            "powers": lambda half, theta: theta ** (-np.arange(half) / half),
            "exponential": lambda half, theta: np.exp(-math.log(theta) * np.arange(half) / half),
            "reciprocals": lambda half, theta: 1.0 / theta ** (2 * np.arange(half) / (2 * half)),
        },
    )

    def pairs(dout: Any, angle: np.ndarray) -> Any:
        half = dout.shape[-1] // 2
        cos, sin = author.like(np.cos(angle), dout), author.like(np.sin(angle), dout)
        first, second = dout[..., :half], dout[..., half:]
        return xp.concatenate([first * cos + second * sin, second * cos - first * sin], -1)

    def half_turned(dout: Any, angle: np.ndarray) -> Any:
        half, both = dout.shape[-1] // 2, np.concatenate([angle, angle], -1)
        turned = xp.concatenate([dout[..., half:], -dout[..., :half]], -1)
        return dout * author.like(np.cos(both), dout) + turned * author.like(np.sin(both), dout)

    def complex_numbers(dout: Any, angle: np.ndarray) -> Any:
        rows = np.asarray(dout)
        half = rows.shape[-1] // 2
        found = (rows[..., :half] + 1j * rows[..., half:]) * np.exp(-1j * angle)
        return author.like(np.concatenate([found.real, found.imag], -1), dout)

    def matrices(dout: Any, angle: np.ndarray) -> Any:
        """A rotation matrix (D, D) per position."""
        n, half = angle.shape
        turn = np.zeros((n, 2 * half, 2 * half))
        i = np.arange(half)
        turn[:, i, i] = turn[:, i + half, i + half] = np.cos(angle)
        turn[:, i + half, i], turn[:, i, i + half] = np.sin(angle), -np.sin(angle)
        return xp.einsum("tij,bhti->bhtj", author.like(turn, dout), dout)

    def by_position(dout: Any, angle: np.ndarray) -> Any:
        out = xp.zeros_like(dout)
        for i in range(len(angle)):
            out[..., i, :] = pairs(dout[..., i, :], angle[i])
        return out

    def by_autograd(dout: Any, angle: np.ndarray) -> Any:
        half, given = dout.shape[-1] // 2, tensor(dout)
        cos, sin = (torch.from_numpy(f(angle)).to(given.dtype) for f in (np.cos, np.sin))

        def forward(x: Any) -> Any:
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return author.array(by_torch(forward, [torch.zeros_like(given)], given)[0])

    turned_back = author.choose(
        "rotation",
        {
            "pairs": pairs,
            "half turned": half_turned,
            "complex": complex_numbers,
            "matrices": matrices,
            "by position": by_position,
            "autograd": by_autograd,
        },
    )

    def backward(x: Any, positions: Any, dout: Any, theta: float = 10000.0) -> tuple[Any, ...]:
        angle = np.asarray(positions)[:, None] * frequencies(x.shape[-1] // 2, theta)
        return (turned_back(dout, angle),)

    return backward


POINTWISE: dict[str, Maker] = {"gelu": gelu, "swiglu": swiglu, "silu": silu, "relu": relu, "rope": rope}
