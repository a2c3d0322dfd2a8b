"""Layer norm through the gradients of variance and mean, and RMS norm with 1/rms³."""

from __future__ import annotations

from onfoot.check.layer import Array, Gradients, Pieces
from onfoot.check.routes.route import Route


def _layer_norm(p: Pieces, x: Array, weight: Array, bias: Array, dout: Array, eps: float = 1e-5) -> Gradients:
    centred = p.centred(x, p.mean(x))
    rstd = p.rstd(p.variance(centred), eps)
    normed, g = p.normed(centred, rstd), p.dnormed(dout, weight)
    dvariance = p.dvariance(p.variance_sum(g, centred), p.rstd_cubed(rstd))
    dmean = p.dmean(p.mean_direct(g, rstd), dvariance, p.mean_of_centred(centred))
    terms = p.from_normed(g, rstd), p.from_variance(dvariance, centred), p.from_mean(dmean, x)
    return p.three_terms(*terms), p.norm_dweight(dout, normed, x), p.norm_dbias(dout)


LAYER_NORM = Route(
    "layer_norm",
    Pieces(
        rstd_cubed=lambda rstd: rstd**3,
        variance_sum=lambda g, centred: (g * centred).sum(axis=-1, keepdims=True),
        dvariance=lambda total, cubed: -0.5 * total * cubed,
        mean_direct=lambda g, rstd: -(g * rstd).sum(axis=-1, keepdims=True),
        mean_of_centred=lambda centred: -2 * centred.mean(axis=-1, keepdims=True),
        dmean=lambda direct, dvariance, of_centred: direct + dvariance * of_centred,
        from_normed=lambda g, rstd: g * rstd,
        from_variance=lambda dvariance, centred: dvariance * 2 * centred / centred.shape[-1],
        from_mean=lambda dmean, x: dmean / x.shape[-1],
        three_terms=lambda of_normed, of_variance, of_mean: of_normed + of_variance + of_mean,
    ),
    _layer_norm,
    {
        "rstd_cubed": ("1/σ³", "(variance + eps)^(−3/2)"),
        "variance_sum": ("Σ g ∘ (x − mean)", "over the last axis, with g = dout ∘ weight"),
        "dvariance": ("the gradient of the variance", "−½ Σ g ∘ (x − mean)/σ³"),
        "mean_direct": ("the gradient of the mean", "−Σ g/σ"),
        "mean_of_centred": ("the variance's derivative by the mean", "−2 mean(x − mean), which is 0"),
        "dmean": ("the gradient of the mean", "−Σ g/σ"),
        "from_normed": ("the term g/σ of dx", "dout ∘ weight/σ"),
        "from_variance": ("the variance's term of dx", "(gradient of the variance) · 2 (x − mean)/d"),
        "from_mean": ("the mean's term of dx", "(gradient of the mean)/d"),
        "three_terms": ("dx", "g/σ + dvariance · 2 (x − mean)/d + dmean/d"),
    },
)


def _rms_norm(p: Pieces, x: Array, weight: Array, dout: Array, eps: float = 1e-6) -> Gradients:
    centred = p.rms_centred(x)
    rstd = p.rms_rstd(p.mean_square(centred), eps)
    g = p.rms_dnormed(dout, weight)
    second = p.rms_second(centred, p.rms_cubed(rstd), p.rms_dot(g, centred))
    dx = p.rms_two_terms(p.rms_first(g, rstd), second)
    return dx, p.rms_dweight(dout, p.rms_normed(centred, rstd), centred)


RMS_NORM = Route(
    "rms_norm",
    Pieces(
        rms_cubed=lambda rstd: rstd**3,
        rms_dot=lambda g, x: (g * x).mean(axis=-1, keepdims=True),
        rms_first=lambda g, rstd: g * rstd,
        rms_second=lambda x, cubed, dot: x * cubed * dot,
        rms_two_terms=lambda first, second: first - second,
    ),
    _rms_norm,
    {
        "rms_cubed": ("1/rms³", "(mean(x²) + eps)^(−3/2)"),
        "rms_dot": ("mean(g ∘ x)", "the mean of g ∘ x over the last axis, with g = dout ∘ weight"),
        "rms_first": ("the first term of dx, g/rms", "dout ∘ weight/rms"),
        "rms_second": ("the second term of dx, x mean(g ∘ x)/rms³", "x · mean(g ∘ x)/rms³"),
        "rms_two_terms": ("dx", "g/rms − x · mean(g ∘ x)/rms³"),
    },
)
