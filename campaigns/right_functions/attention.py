"""Attention: whole matrices, loops over queries, Jacobians written out, tiles with a running softmax, autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from campaigns.right_functions.author import FEW, Author, Function, Maker, autograd, t, tensor

SCALES = {"": (0.0, 0.0), "q": (0.5, 0.0), "k": (0.0, 0.5), "q and k": (0.25, 0.25), "q and scores": (0.25, 0.0)}
LOG2_E = math.log2(math.e)


def hidden(n: int, m: int, causal: bool, there: Any = None) -> np.ndarray:
    """Which keys a query does not see; the last query is aligned with the last key."""
    keys = np.arange(m) if there is None else there
    return (keys[None, :] > np.arange(n)[:, None] + (m - n)) & causal


def softmax(author: Author) -> Function:
    """Rows of weights, one of several equal ways; a row without any key is 0."""
    xp = author.xp

    def top(s: Any) -> Any:
        found = xp.amax(s, -1)[..., None]
        return xp.where(xp.isfinite(found), found, author.like(np.zeros(()), s))

    def nonzero(total: Any) -> Any:
        return xp.where(total == 0, author.like(np.ones(()), total), total)

    def plain(s: Any) -> Any:
        e = xp.exp(s - top(s))
        return e / nonzero(author.total(e))

    def reciprocal(s: Any) -> Any:
        e = xp.exp(s - top(s))
        return e * (1 / nonzero(author.total(e)))

    def base_two(s: Any) -> Any:
        e = xp.exp2((s - top(s)) * LOG2_E)
        return e / nonzero(author.total(e))

    def by_logarithm(s: Any) -> Any:
        shifted = s - top(s)
        return xp.exp(shifted - xp.log(nonzero(author.total(xp.exp(shifted)))))

    def from_lse(s: Any) -> Any:
        """exp(s − log Σ exp s), as fused kernels save only the logarithm."""
        most = top(s)
        return xp.exp(s - (most + xp.log(nonzero(author.total(xp.exp(s - most))))))

    return author.choose(
        "softmax",
        {"": plain, "reciprocal": reciprocal, "exp2": base_two, "by logarithm": by_logarithm, "from lse": from_lse},
    )


def whole(author: Author) -> Function:
    """All scores at once: scales, masks and orders as drawn."""
    xp, dot, weights = author.xp, author.dot, softmax(author)
    on_q, on_k = SCALES[author.one_of("scale on", *SCALES)]  # as powers of d_k
    hide = author.one_of("masked", -math.inf, -math.inf, -1e30)
    from_output, factored, shuffled = author.yes("D from out"), author.yes("factored"), author.yes("shuffled keys", 0.3)

    def core(q: Any, k: Any, v: Any, do: Any, causal: bool = True, keep: Any = None) -> list[Any]:
        n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
        there, back = author.order(m) if shuffled else (np.arange(m), np.arange(m))
        k, v = k[..., there, :], v[..., there, :]
        s = dot(q / d**on_q, t(k / d**on_k)) / d ** (0.5 - on_q - on_k)
        unseen = author.like(hidden(n, m, causal, there), s)
        s = xp.where(unseen, author.like(np.array(hide), s), s)
        rho, drho = xp.where(unseen, author.like(np.zeros(()), s), weights(s)), dot(do, t(v))
        drho, kept = (drho, rho) if keep is None else (drho * keep[..., there], rho * keep[..., there])
        dots = author.total(do * dot(kept, v)) if from_output else author.total(rho * drho)
        ds = rho * (drho - dots) if factored else rho * drho - rho * dots
        dk, dv = dot(t(ds), q) / math.sqrt(d), dot(t(kept), do)
        return [dot(ds, k) / math.sqrt(d), dk[..., back, :], dv[..., back, :]]

    return core


def by_query(author: Author) -> Function:
    """One query after the other, keys cut off behind it; the softmax's Jacobian written out or not."""
    xp, jacobian = author.xp, author.yes("Jacobian", 0.4)

    def core(q: Any, k: Any, v: Any, do: Any, causal: bool = True, keep: Any = None) -> list[Any]:
        n, m, root = q.shape[-2], k.shape[-2], math.sqrt(q.shape[-1])
        dq, dk, dv = (xp.zeros_like(x) for x in (q, k, v))
        for i in range(n):
            last = min(m, i + 1 + m - n) if causal else m
            if last <= 0:
                continue
            keys, values = k[..., :last, :], v[..., :last, :]
            s = xp.einsum("...d,...jd->...j", q[..., i, :], keys) / root
            e = xp.exp(s - xp.amax(s, -1)[..., None])
            p = e / author.total(e)
            dp = xp.einsum("...d,...jd->...j", do[..., i, :], values)
            factor = 1 if keep is None else keep[..., i, :last]
            dp = dp * factor
            if jacobian:
                wide = p[..., :, None] * author.like(np.eye(last), p) - p[..., :, None] * p[..., None, :]
                ds = xp.einsum("...ij,...j->...i", wide, dp)
            else:
                ds = p * (dp - author.total(p * dp))
            dq[..., i, :] = xp.einsum("...j,...jd->...d", ds, keys) / root
            dk[..., :last, :] += ds[..., None] * q[..., i, None, :] / root
            dv[..., :last, :] += (p * factor)[..., None] * do[..., i, None, :]
        return [dq, dk, dv]

    return core


def tiles(author: Author) -> Function:
    """Flash attention: tiles of queries and keys, a running maximum and sum forward, recomputed weights backward."""
    xp, rows, columns = author.xp, author.number("tile of queries", 1, 40), author.number("tile of keys", 1, 40)
    keys_outside, base_two = author.yes("keys outside"), author.yes("exp2", 0.3)

    def exp(x: Any) -> Any:
        return xp.exp2(x * LOG2_E) if base_two else xp.exp(x)

    def core(q: Any, k: Any, v: Any, do: Any, causal: bool = True, keep: Any = None) -> list[Any]:
        n, m, scale = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5
        unseen = hidden(n, m, causal)
        nothing = author.like(np.array(-math.inf), q)

        def factor(i: slice, j: slice) -> Any:
            return 1 if keep is None else keep[..., i, j]

        def scores(i: slice, j: slice) -> Any:
            s = q[..., i, :] @ t(k[..., j, :]) * scale
            return xp.where(author.like(unseen[i, j], s), nothing, s)

        query_tiles = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
        key_tiles = [slice(j, min(j + columns, m)) for j in range(0, m, columns)]
        out, lse = xp.zeros_like(do), xp.zeros_like(do[..., :1])
        for i in query_tiles:
            total, running = 0 * do[..., i, :1], 0 * do[..., i, :]
            most = total + nothing
            for j in key_tiles:
                if unseen[i, j].all():
                    continue
                s = scores(i, j)
                new = xp.maximum(most, xp.amax(s, -1)[..., None])
                safe = xp.where(xp.isfinite(new), new, author.like(np.zeros(()), s))
                p, rescale = exp(s - safe), exp(most - safe)
                total, most = total * rescale + author.total(p), new
                running = running * rescale + (p * factor(i, j)) @ v[..., j, :]
            empty = total == 0
            total = xp.where(empty, author.like(np.ones(()), total), total)
            out[..., i, :] = running / total
            lse[..., i, :] = xp.where(empty, author.like(np.zeros(()), total), most + xp.log(total))
        dots = author.total(do * out)
        dq, dk, dv = (xp.zeros_like(x) for x in (q, k, v))
        pairs = [(i, j) for j in key_tiles for i in query_tiles] if keys_outside else [
            (i, j) for i in query_tiles for j in key_tiles
        ]  # fmt: skip
        for i, j in pairs:
            if unseen[i, j].all():
                continue
            p = exp(scores(i, j) - lse[..., i, :])
            dp = do[..., i, :] @ t(v[..., j, :]) * factor(i, j)
            ds = p * (dp - dots[..., i, :]) * scale
            dq[..., i, :] += ds @ k[..., j, :]
            dk[..., j, :] += t(ds) @ q[..., i, :]
            dv[..., j, :] += t(p * factor(i, j)) @ do[..., i, :]
        return [dq, dk, dv]

    return core


def by_autograd(author: Author) -> Function:
    """A forward pass in PyTorch, its gradients by autograd."""
    gradients, by_hand = autograd(author), author.yes("softmax by hand")

    def core(q: Any, k: Any, v: Any, do: Any, causal: bool = True, keep: Any = None) -> list[Any]:
        q, k, v, do, keep = map(tensor, (q, k, v, do, keep))
        n, m = q.shape[-2], k.shape[-2]
        unseen = torch.from_numpy(hidden(n, m, causal))

        def forward(q: Any, k: Any, v: Any) -> Any:
            s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(unseen, -torch.inf)
            if by_hand:
                e = (s - s.amax(-1, keepdim=True).detach().clamp(min=torch.finfo(s.dtype).min)).exp()
                total = e.sum(-1, keepdim=True)
                rho = e / torch.where(total == 0, torch.ones_like(total), total)
            else:
                rho = s.masked_fill(unseen.all(-1, keepdim=True), 0.0).softmax(-1)
                rho = rho.masked_fill(unseen.all(-1, keepdim=True), 0.0)
            return (rho if keep is None else rho * keep) @ v

        return [author.array(g.detach()) for g in gradients(forward, [q, k, v], do)]

    return core


def by_torchs_own(author: Author) -> Function:
    """scaled_dot_product_attention; dropout patterns and fewer queries than keys go another way."""
    gradients, other = autograd(author), whole(author)

    def core(q: Any, k: Any, v: Any, do: Any, causal: bool = True, keep: Any = None) -> list[Any]:
        if keep is not None or q.shape[-2] != k.shape[-2]:
            return other(q, k, v, do, causal, keep)

        def forward(*qkv: Any) -> Any:
            return F.scaled_dot_product_attention(*qkv, is_causal=causal)

        return [author.array(g.detach()) for g in gradients(forward, [q, k, v], do)]

    return core


CORES: dict[str, Maker] = {
    "whole": whole,
    "one query at a time": by_query,
    "tiles": tiles,
    "autograd": by_autograd,
    "PyTorch's own": by_torchs_own,
}


def attention_core(author: Author) -> Function:
    """(q, k, v, dout, causal, keep) → [dq, dk, dv] over any leading axes."""
    core = CORES[author.one_of("attention", "whole", "whole", "tiles", "tiles", *CORES)](author)
    held = author.one_of("as", "", "", "", "heads one by one", "heads last", "one long batch")

    def by_head(*arrays: Any, **more: Any) -> list[Any]:
        lead = arrays[0].shape[:-2]
        keep = more.pop("keep", None)
        places = list(np.ndindex(*lead))
        found = [core(*(x[i] for x in arrays), keep=None if keep is None else keep[i], **more) for i in places]
        return [author.xp.stack([one[g] for one in found]).reshape(arrays[g].shape) for g in range(3)]

    def heads_last(*arrays: Any, **more: Any) -> list[Any]:
        """Kept as (B, T, H, D): the core sees strided views, and so does the caller."""
        if arrays[0].ndim != 4:
            return core(*arrays, **more)
        turned = [author.array(x.swapaxes(1, 2)) for x in arrays]
        found = core(*(x.swapaxes(1, 2) for x in turned), **more)
        return [author.array(g.swapaxes(1, 2)).swapaxes(1, 2) for g in found]

    def long_batch(*arrays: Any, **more: Any) -> list[Any]:
        if arrays[0].ndim != 4 or more.get("keep") is not None:
            return core(*arrays, **more)
        found = core(*(x.reshape(-1, *x.shape[-2:]) for x in arrays), **more)
        return [g.reshape(x.shape) for g, x in zip(found, arrays, strict=False)]

    return {"": core, "heads one by one": by_head, "heads last": heads_last, "one long batch": long_batch}[held]


def attention(author: Author) -> Function:
    core = attention_core(author)
    return lambda q, k, v, dout, causal=True: core(q, k, v, dout, causal=causal)


def softmax_backward(author: Author) -> Function:
    """dx = ρ ∘ (dout − Σ ρ dout) of a softmax over the last axis."""
    weights, by_torch = softmax(author), autograd(author)
    form = author.one_of("dx by", "factored", "terms", "Jacobian", "autograd")

    def backward(x: Any, d: Any) -> tuple[Any, ...]:
        if form == "autograd":
            return (author.array(by_torch(lambda x: x.softmax(-1), [x], d)[0]),)
        p = weights(x)
        if form == "Jacobian" and x.shape[-1] <= FEW:
            wide = p[..., :, None] * (author.like(np.eye(x.shape[-1]), p) - p[..., None, :])
            return (author.dot(d[..., None, :], t(wide))[..., 0, :],)
        return (p * (d - author.total(p * d)) if form == "factored" else p * d - p * author.total(d * p),)

    return backward


ATTENTION: dict[str, Maker] = {"attention": attention, "softmax": softmax_backward}
