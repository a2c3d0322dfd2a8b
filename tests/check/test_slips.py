"""Slips of whole kinds are named: overflow, other widths, integers, indices, steps, sequences that run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.report import LayerReport

Array = np.ndarray


def t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def check(layer: str, function: Callable[..., Any], **options: Any) -> LayerReport:
    return check_layer(LAYERS[layer], function, **{"dtypes": ["float64"], **options})


def names(report: LayerReport) -> list[str]:
    assert not report.passed and report.diagnosis is not None, str(report)
    assert report.diagnosis.complete and report.diagnosis.residual < 1e-9
    return [f.name for f in report.diagnosis.findings]


def attention(q: Array, k: Array, v: Array, dout: Array, scale: float, mask: Array) -> tuple[Array, ...]:
    s = np.where(mask, q @ t(k) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ t(v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return ds @ k, t(ds) @ q, t(p) @ dout


# overflow


def loss_without_the_maximum(logits, targets, dout=1.0):
    p = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    return dout * (p - np.eye(logits.shape[-1])[targets]) / targets.size


def test_overflow_is_a_note_that_names_it() -> None:
    report = check("softmax_cross_entropy", loss_without_the_maximum)
    assert report.passed
    assert "“large logits”: exp overflows above 709" in " ".join(str(report).split())
    assert "log Σ exp(logits) without subtracting the maximum" in " ".join(str(report).split())


def softmax_without_the_maximum(x, dout):
    y = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    return y * (dout - (y * dout).sum(-1, keepdims=True))


def test_overflow_is_a_failure_if_strict() -> None:
    assert check("softmax", softmax_without_the_maximum).passed
    report = check("softmax", softmax_without_the_maximum, strict=True)
    assert names(report) == ["softmax without subtracting the maximum"]


def test_overflow_does_not_hide_another_mistake() -> None:
    def backward(logits, targets, dout=1.0):
        return loss_without_the_maximum(logits, targets, dout) * len(targets)

    assert names(check("softmax_cross_entropy", backward)) == [
        "a mean loss whose gradient is divided by the tokens of one sequence"
    ]


# values of another width


def test_a_scale_by_the_width_of_the_values_is_named() -> None:
    def backward(q, k, v, dout):
        return attention(q, k, v, dout, v.shape[-1] ** -0.5, np.tri(q.shape[-2]) > 0)

    def square(q, k, v, dout):
        if q.shape[-2] != k.shape[-2]:
            raise ValueError("as many keys as queries")
        return backward(q, k, v, dout)

    assert names(check("attention", square)) == ["√d_v in place of √d_k, in both passes"]


def test_a_function_for_equal_widths_alone_is_right() -> None:
    def backward(q, k, v, dout):
        if not q.shape == k.shape == v.shape:
            raise ValueError("q, k and v must have the same shape")
        return attention(q, k, v, dout, q.shape[-1] ** -0.5, np.tri(q.shape[-2]) > 0)

    assert check("attention", backward).passed


# one function per slip


def in_an_integer_array(ids, weight, dout):
    out = np.zeros(weight.shape, dtype=ids.dtype)
    for place in np.ndindex(ids.shape):
        out[ids[place]] = out[ids[place]] + dout[place]
    return out.astype(float)


def returned_as_integers(ids, weight, dout):
    return in_an_integer_array(ids, weight, dout).astype(int)


def reshaped(x, weight, bias, dout):
    dweight = np.einsum("bti,bto->io", x, dout)
    return dout @ weight.reshape(weight.shape[::-1]), dweight, dout.sum(axis=(0, 1))


def summed_before(x, weight, bias, dout):
    return dout @ weight.T, np.outer(x.sum(axis=(0, 1)), dout.sum(axis=(0, 1))), dout.sum(axis=(0, 1))


def by_the_input_width(x, weight, down, up, alpha, dout):
    scale, low = alpha / len(down), dout @ up.T
    return (
        dout @ weight.T + scale * low @ down.T,
        scale * np.einsum("bti,btr->ir", x, low),
        scale * np.einsum("btr,bto->ro", x @ down, dout),
    )


def as_one_sequence(logits, ids, dout=1.0):
    z, y = logits.reshape(-1, logits.shape[-1])[:-1], ids.reshape(-1)[1:]
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return (np.vstack([p, 0 * p[:1]]) * dout / len(y)).reshape(logits.shape)


def one_long_sequence(q, k, v, dout):
    if q.shape != k.shape:
        raise ValueError("as many keys as queries")
    b, h, n, d = q.shape
    joined = [x.swapaxes(0, 1).reshape(1, h, b * n, d) for x in (q, k, v, dout)]
    found = attention(*joined, d**-0.5, np.tri(b * n) > 0)
    return tuple(g[0].reshape(h, b, n, d).swapaxes(0, 1) for g in found)


def indices_not_paired(logits, targets, dout=1.0):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[:, :, targets.ravel()] -= 1
    return p * dout / targets.size


def from_step_0(param, grad, m, v, step):
    t = max(step - 1, 1)
    m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
    step_size = 0.01 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return param * (1 - 0.01 * 0.1) - step_size, m, v


def angles_in_integers(x, positions, dout):
    half = x.shape[-1] // 2
    angles = positions[:, None] // (10000.0 ** (np.arange(half) / half)).astype(int)
    z = (dout[..., :half] + 1j * dout[..., half:]) * np.exp(-1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize(
    ("layer", "function", "name"),
    [
        ("embedding", in_an_integer_array, "the rows are added in an integer array, which cuts off the fractions"),
        ("linear", reshaped, "weight is reshaped where it must be transposed"),
        ("linear", summed_before, "x and dout are each summed over all tokens before they are multiplied"),
        ("lora", by_the_input_width, "d_in in place of rank in the scale"),
        (
            "next_token_loss",
            as_one_sequence,
            "the batch is flattened before the shift: the last token of a sequence predicts the first of the next one",
        ),
        (
            "attention",
            one_long_sequence,
            "the batch is treated as one long sequence: tokens attend to tokens of other sequences",
        ),
        (
            "softmax_cross_entropy",
            indices_not_paired,
            "in every row, the 1 is subtracted at the targets of all rows (indices not paired)",
        ),
        ("adamw", from_step_0, "the bias corrections count the steps from 0: max(t − 1, 1) in place of t"),
        ("rope", angles_in_integers, "positions // powers, both in integers"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_slip_is_named(layer: str, function: Callable[..., Any], name: str) -> None:
    assert names(check(layer, function)) == [name]


def test_an_integer_result_is_named() -> None:
    report = check("embedding", returned_as_integers)
    assert names(report) == ["dweight: an integer array, which cuts off the fractions"]


def test_one_finite_case_among_many_with_nan_says_nothing() -> None:
    def backward(q, k, v, dout):  # a softmax over the heads: nan wherever a key is masked
        s = np.where(np.tri(q.shape[-2], k.shape[-2]) > 0, q @ t(k) * q.shape[-1] ** -0.5, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        dp = dout @ t(v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
        return ds @ k, t(ds) @ q, t(p) @ dout

    with np.errstate(all="ignore"):
        report = check("attention", backward)
    assert not report.passed and report.diagnosis is not None and not report.diagnosis.complete


@pytest.mark.parametrize("eps", [1e-12, 3e-12, 1e-5])
def test_another_eps_is_named_before_a_squared_one(eps: float) -> None:
    """1e-12 is also the square of the contract's 1e-6."""

    def backward(x, weight, dout):
        rstd = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
        z, g = x * rstd, dout * weight
        return (g - z * (g * z).mean(axis=-1, keepdims=True)) * rstd, (dout * z).sum(axis=(0, 1))

    report = check("rms_norm", backward)
    assert report.verdict == f"wrong: dx, dweight; right with another eps, eps = {eps:g}"


def gelu_with(root: float, cubic: float = 0.044715):
    def backward(x, dout):
        tanh = np.tanh(root * (x + cubic * x**3))
        return dout * ((1 + tanh) / 2 + x / 2 * (1 - tanh * tanh) * root * (1 + 3 * cubic * x * x))

    return backward


def test_a_constant_that_is_right_to_9_digits_is_a_note() -> None:
    report = check("gelu", gelu_with(0.7978845608))  # as in transformers' FastGELUActivation
    assert report.passed and report.diagnosis is None
    assert report.warnings == ["another constant in place of √(2/π), constant = 0.7978845608: right to 11 digits"]
    right = gelu_with(0.7978845608)
    assert not check("gelu", lambda x, dout: right(x, dout) * (1 + 1e-4 * (x.shape[1] > 100))).passed


@pytest.mark.parametrize("root", [0.7978845, 0.797885])
def test_a_constant_with_fewer_digits_is_named_with_all_of_them(root: float) -> None:
    report = check("gelu", gelu_with(root))
    assert report.verdict == f"wrong: dx; another constant in place of √(2/π), constant = {root}"


def test_what_is_as_accurate_as_float32_need_not_compute_in_it() -> None:
    def backward(x, dout):  # the constants of llama.c
        tanh = np.tanh(0.0356774 * x**3 + 0.797885 * x)
        return dout * (0.5 * tanh + (0.0535161 * x**3 + 0.398942 * x) * (1 - tanh * tanh) + 0.5)

    report = check("gelu", backward)
    assert report.passed and "or a constant is written with few digits" in report.warnings[0]


def layer_norm_with(term, mean, outside=False, output=False):
    """The sums of dx are divided by the number of features, less `term` and `mean`."""

    def backward(x, weight, bias, dout):
        d, var = x.shape[-1], x.var(-1, keepdims=True)
        r = 1 / np.sqrt(var + 1e-5)
        h, g = (x - x.mean(-1, keepdims=True)) * r, dout * weight
        sums = (g * h).sum(-1, keepdims=True) / (d - term), g.sum(-1, keepdims=True) / (d - mean)
        dx = (g - h * sums[0] - sums[1]) / (np.sqrt(var) + 1e-5) if outside else r * (g - h * sums[0] - sums[1])
        return dx, (dout * (h * weight + bias if output else h)).sum((0, 1)), dout.sum((0, 1))

    return backward


def rms_norm_with(square):
    def backward(x, weight, dout):
        r = 1 / np.sqrt(square(x) + 1e-6)
        h, g = x * r, dout * weight
        dx = r * (g - h * (g * h).mean(-1, keepdims=True))
        return dx, (dout * h).sum((0, 1))

    return backward


SLIPS = {
    "mean(g ∘ ā) is divided by d − 1 in place of d, in dx": ("layer_norm", layer_norm_with(term=1, mean=0)),
    "mean(g) is divided by d − 1 in place of d, in dx": ("layer_norm", layer_norm_with(term=0, mean=1)),
    "eps outside the root, in the last factor of dx alone": ("layer_norm", layer_norm_with(0, 0, outside=True)),
    "dweight from the output in place of the normalised features": ("layer_norm", layer_norm_with(0, 0, output=True)),
    "the variance in place of the mean of squares": ("rms_norm", rms_norm_with(lambda x: x.var(-1, keepdims=True))),
    "silu' as σ + x σ (1 − x)": ("silu", lambda x, g: g * sigmoid(x) * (1 + x * (1 - x))),
    "the derivative of a leaky ReLU": ("relu", lambda x, g: np.where(x > 0, g, 0.03 * g)),
}


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_of_one_sum_or_one_slope_is_named(name: str) -> None:
    layer, backward = SLIPS[name]
    assert names(check(layer, backward, dtypes=["float64"])) == [name]
