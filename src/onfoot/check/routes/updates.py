"""AdamW, RoPE and LoRA with every factor as a step of its own."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows
from onfoot.check.layer import Array, Gradients, Pieces
from onfoot.check.routes.route import Route


def _adamw(p: Pieces, param: Array, grad: Array, m: Array, v: Array, step: int, **options: float) -> Gradients:
    lr, eps, decay = options["lr"], options["eps"], options["weight_decay"]
    beta1, beta2 = options["beta1"], options["beta2"]
    g = p.effective_gradient(grad, param, decay)
    m_new = p.m_sum(p.m_kept(m, beta1), p.m_added(g, p.m_share(beta1)))
    v_new = p.v_sum(p.v_kept(v, beta2), p.v_added(p.g_square(g), p.v_share(beta2)))
    m_hat = p.m_hat(m_new, p.m_correction(p.m_power(beta1, step)))
    v_hat = p.v_hat(v_new, p.v_correction(p.v_power(beta2, step)))
    ratio = p.ratio(m_hat, p.sum_with_eps(p.root_v(v_hat), eps))
    decayed = p.decayed_weight(param, p.decay_rate(lr, decay))
    return p.stepped(decayed, p.step_size(lr, ratio)), m_new, v_new


ADAMW = Route(
    "adamw",
    Pieces(
        m_share=lambda beta1: 1 - beta1,
        m_kept=lambda m, beta1: beta1 * m,
        m_added=lambda g, share: share * g,
        m_sum=lambda kept, added: kept + added,
        g_square=lambda g: g * g,
        v_share=lambda beta2: 1 - beta2,
        v_kept=lambda v, beta2: beta2 * v,
        v_added=lambda g_square, share: share * g_square,
        v_sum=lambda kept, added: kept + added,
        m_power=lambda beta1, t: beta1**t,
        v_power=lambda beta2, t: beta2**t,
        m_correction=lambda power: 1 - power,
        v_correction=lambda power: 1 - power,
        m_hat=lambda m, correction: m / correction,
        v_hat=lambda v, correction: v / correction,
        root_v=lambda v_hat: np.sqrt(v_hat),
        sum_with_eps=lambda root, eps: root + eps,
        ratio=lambda m_hat, denominator: m_hat / denominator,
        step_size=lambda lr, ratio: lr * ratio,
        decay_rate=lambda lr, decay: lr * decay,
        decayed_weight=lambda param, rate: param - rate * param,
        stepped=lambda decayed, step_size: decayed - step_size,
    ),
    _adamw,
    {
        "m_share": ("the factor 1 − β₁ of the gradient in m", "m = β₁ m + (1 − β₁) g"),
        "m_kept": ("the term β₁ m of m", "m = β₁ m + (1 − β₁) g"),
        "m_added": ("the term (1 − β₁) g of m", "m = β₁ m + (1 − β₁) g"),
        "m_sum": ("the first moment m", "β₁ m + (1 − β₁) g"),
        "g_square": ("g² in v", "v = β₂ v + (1 − β₂) g²"),
        "v_share": ("the factor 1 − β₂ of g² in v", "v = β₂ v + (1 − β₂) g²"),
        "v_kept": ("the term β₂ v of v", "v = β₂ v + (1 − β₂) g²"),
        "v_added": ("the term (1 − β₂) g² of v", "v = β₂ v + (1 − β₂) g²"),
        "v_sum": ("the second moment v", "β₂ v + (1 − β₂) g²"),
        "m_power": ("β₁ᵗ in the bias correction of m", "m̂ = m/(1 − β₁ᵗ)"),
        "v_power": ("β₂ᵗ in the bias correction of v", "v̂ = v/(1 − β₂ᵗ)"),
        "m_correction": ("the bias correction 1 − β₁ᵗ of m", "m̂ = m/(1 − β₁ᵗ)"),
        "v_correction": ("the bias correction 1 − β₂ᵗ of v", "v̂ = v/(1 − β₂ᵗ)"),
        "m_hat": ("m̂", "m/(1 − β₁ᵗ)"),
        "v_hat": ("v̂", "v/(1 − β₂ᵗ)"),
        "root_v": ("√v̂", "the square root of v̂"),
        "sum_with_eps": ("√v̂ + eps", "eps is added to the root"),
        "ratio": ("m̂/(√v̂ + eps)", "the step without the learning rate"),
        "step_size": ("the step lr m̂/(√v̂ + eps)", "param − lr m̂/(√v̂ + eps)"),
        "decay_rate": ("lr · weight_decay", "param ← param (1 − lr · weight_decay)"),
        "decayed_weight": ("the decayed weight", "param (1 − lr · weight_decay)"),
        "stepped": ("the updated weight", "param (1 − lr · weight_decay) − lr m̂/(√v̂ + eps)"),
    },
)


def _rope(p: Pieces, x: Array, positions: Array, dout: Array, theta: float = 10000.0) -> Gradients:
    angles = p.angles(positions, p.powers(p.exponents(x.shape[-1]), theta))
    first, second = np.split(dout, 2, axis=-1)
    cos, sin = p.cosines(angles), p.sines(angles)
    one = p.first_half(p.first_cos(first, cos), p.second_sin(second, sin))
    two = p.second_half(p.second_cos(second, cos), p.first_sin(first, sin))
    return (p.both_halves(one, two),)


ROPE = Route(
    "rope",
    Pieces(
        exponents=lambda width: np.arange(0, width, 2) / width,
        powers=lambda exponents, theta: theta**-exponents,
        cosines=lambda angles: np.cos(angles),
        sines=lambda angles: np.sin(angles),
        first_cos=lambda first, cos: first * cos,
        second_sin=lambda second, sin: second * sin,
        second_cos=lambda second, cos: second * cos,
        first_sin=lambda first, sin: first * sin,
        first_half=lambda first_cos, second_sin: first_cos + second_sin,
        second_half=lambda second_cos, first_sin: second_cos - first_sin,
        both_halves=lambda one, two: np.concatenate([one, two], axis=-1),
    ),
    _rope,
    {
        "exponents": ("the exponent 2i/D of the frequencies", "θ^(−2i/D), i = 0 … D/2 − 1"),
        "powers": ("the frequencies", "θ^(−2i/D), i = 0 … D/2 − 1"),
        "cosines": ("cos", "the cosine of the angle"),
        "sines": ("sin", "the sine of the angle"),
        "first_cos": ("first · cos", "first · cos + second · sin, second · cos − first · sin"),
        "second_sin": ("second · sin", "first · cos + second · sin, second · cos − first · sin"),
        "second_cos": ("second · cos", "first · cos + second · sin, second · cos − first · sin"),
        "first_sin": ("first · sin", "first · cos + second · sin, second · cos − first · sin"),
        "first_half": ("the first half of dx", "first · cos + second · sin"),
        "second_half": ("the second half of dx", "second · cos − first · sin"),
        "both_halves": ("dx", "first · cos + second · sin, second · cos − first · sin"),
    },
)


def _lora(p: Pieces, x: Array, weight: Array, down: Array, up: Array, alpha: float, dout: Array) -> Gradients:
    scale = p.scale(alpha, down.shape[1])
    dlow = p.scaled_dlow(p.through_up(dout, up), scale)
    dx = p.both_dx(p.frozen_path(dout, weight), p.adapter_path(dlow, down, scale))
    return dx, p.ddown(x, dlow, scale), p.scaled_dup(p.low_dout(p.low(x, down), dout), scale)


LORA = Route(
    "lora",
    Pieces(
        through_up=lambda dy, up: dy @ up.T,
        scaled_dlow=lambda through, scale: scale * through,
        low_dout=lambda low, dy: rows(low).T @ rows(dy),
        scaled_dup=lambda product, scale: scale * product,
    ),
    _lora,
    {
        "through_up": ("dout upᵗ", "the gradient goes back through up"),
        "scaled_dlow": ("the gradient of x down", "α/r · dout upᵗ"),
        "low_dout": ("(x down)ᵗ dout", "summed over all tokens"),
        "scaled_dup": ("dup", "α/r · (x down)ᵗ dout"),
    },
)


def _merged(p: Pieces, x: Array, weight: Array, down: Array, up: Array, alpha: float, dout: Array) -> Gradients:
    scale = p.scale(alpha, down.shape[1])
    dx = p.through_merged(dout, p.merged(weight, p.down_up(down, up), scale))
    return dx, p.ddown(x, p.dlow(dout, up, scale), scale), p.dup(p.low(x, down), dout, scale)


MERGED = Route(
    "lora",
    Pieces(
        down_up=lambda down, up: down @ up,
        merged=lambda weight, product, scale: weight + scale * product,
        through_merged=lambda dy, merged: dy @ merged.T,
    ),
    _merged,
    {
        "down_up": ("down up", "the product of the adapter's matrices"),
        "merged": ("the merged weight", "weight + α/r · down up"),
        "through_merged": ("dx", "dout (weight + α/r · down up)ᵗ"),
    },
)
