"""JAX code in the forms in which people hold it, right and wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _norm(x, gamma, beta):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - mean) * rstd, rstd


@jax.custom_vjp
def norm(x, gamma, beta):
    return _norm(x, gamma, beta)[0] * gamma + beta


def norm_fwd(x, gamma, beta):
    normed, rstd = _norm(x, gamma, beta)
    return normed * gamma + beta, (normed, rstd, gamma)


def norm_bwd(saved, dy):
    normed, rstd, gamma = saved
    g = dy * gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True))
    return dx, (dy * normed).sum((0, 1)), dy.sum((0, 1))


norm.defvjp(norm_fwd, norm_bwd)


@jax.custom_vjp
def norm_wrong(x, gamma, beta):
    return norm_fwd(x, gamma, beta)[0]


def norm_bwd_wrong(saved, dy):
    normed, rstd, gamma = saved
    g = dy * gamma
    return rstd * (g - normed * (g * normed).mean(-1, keepdims=True)), (dy * normed).sum((0, 1)), dy.sum((0, 1))


norm_wrong.defvjp(norm_fwd, norm_bwd_wrong)


def rms_norm(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rms_norm_wrong(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * weight


@jax.jit
def gelu(x):
    return jax.nn.gelu(x)


def swiglu_with_vjp(gate, up):
    return jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)


def swiglu_with_vjp_wrong(gate, up):
    y, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    return y, lambda dy: tuple(-g for g in pull(dy))


def embedding_backward(ids, weight, dout):
    """By hand, with .at, which NumPy arrays do not have."""
    return jnp.zeros_like(weight).at[ids].add(dout)


def embedding_backward_wrong(ids, weight, dout):
    return jnp.zeros_like(weight).at[ids].set(dout)
