"""Softmax cross-entropy, alone and with the logits' weights; targets of −100 are ignored. The loss of DPO."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from campaigns.right_functions.attention import softmax
from campaigns.right_functions.author import Author, Function, Maker, autograd, tensor
from campaigns.right_functions.dense import dense_core, scatter
from campaigns.right_functions.norms import moments, norm_core
from campaigns.right_functions.pointwise import sigmoid_and_slope

IGNORE = -100


def delta(author: Author) -> Function:
    """(logits, targets) → softmax − one-hot, 0 where there is no target."""
    xp, weights = author.xp, softmax(author)

    def places(targets: Any) -> tuple[np.ndarray, np.ndarray]:
        found = np.asarray(targets)
        return np.maximum(found, 0), found != IGNORE

    def identity(logits: Any, targets: Any) -> Any:
        ids, counted = places(targets)
        hot = author.like(np.eye(logits.shape[-1])[ids], logits)
        return (weights(logits) - hot) * author.like(counted[..., None].astype(float), logits)

    def compared(logits: Any, targets: Any) -> Any:
        ids, counted = places(targets)
        hot = author.like(ids[..., None] == np.arange(logits.shape[-1]), logits)
        p = weights(logits)
        found = xp.where(hot, p - 1, p)
        return xp.where(author.like(counted[..., None], logits), found, 0 * found)

    def subtracted(logits: Any, targets: Any) -> Any:
        """1 taken from the entry of the target."""
        ids, counted = places(targets)
        p = weights(logits)
        b, i = np.nonzero(counted)
        p[b, i, ids[b, i]] -= 1
        b, i = np.nonzero(~counted)
        p[b, i] = 0
        return p

    def by_token(logits: Any, targets: Any) -> Any:
        ids, counted = places(targets)
        out = xp.zeros_like(logits)
        for b, i in zip(*np.nonzero(counted), strict=True):
            row = logits[b, i]
            e = xp.exp(row - row.max())
            out[b, i] = e / e.sum()
            out[b, i, ids[b, i]] -= 1
        return out

    def running(logits: Any, targets: Any) -> Any:
        """Tiles of the vocabulary: a running maximum and sum first, then the entries."""
        ids, counted = places(targets)
        step = author.tile
        starts = range(0, logits.shape[-1], step)
        most = total = None
        for j in starts:
            part = logits[..., j : j + step]
            new = xp.amax(part, -1)[..., None] if most is None else xp.maximum(most, xp.amax(part, -1)[..., None])
            more = author.total(xp.exp(part - new))
            total = more if total is None else total * xp.exp(most - new) + more
            most = new
        lse = most + xp.log(total)
        hot = author.like(np.eye(logits.shape[-1])[ids], logits)
        parts = [xp.exp(logits[..., j : j + step] - lse) - hot[..., j : j + step] for j in starts]
        return xp.concatenate(parts, -1) * author.like(counted[..., None].astype(float), logits)

    return author.choose(
        "target",
        {
            "identity": identity,
            "compared": compared,
            "subtracted": subtracted,
            "by token": by_token,
            f"vocabulary {author.tile} at a time": running,
        },
    )


def softmax_cross_entropy(author: Author) -> Function:
    minus_hot, by_torch = delta(author), autograd(author)
    way = author.one_of("loss", "", "", "", "autograd", "log_softmax", "rows in chunks")
    divided = author.draw("dout first", "delta first", "multiplied")

    def count(targets: Any, reduction: str) -> int:
        return int((np.asarray(targets) != IGNORE).sum()) if reduction == "mean" else 1

    def by_hand(logits: Any, targets: Any, dout: float = 1.0, reduction: str = "mean") -> Any:
        author.used("divided", divided)
        n = count(targets, reduction)
        found = minus_hot(logits, targets)
        if divided == "dout first":
            return (found * (dout / n),)
        return (dout * (found / n),) if divided == "delta first" else (found * dout * (1.0 / n),)

    def by_autograd(logits: Any, targets: Any, dout: float = 1.0, reduction: str = "mean") -> Any:
        targets = tensor(targets)

        def forward(logits: Any) -> Any:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

        return (author.array(by_torch(forward, [logits], torch.tensor(dout, dtype=tensor(logits).dtype))[0]),)

    def by_log_softmax(logits: Any, targets: Any, dout: float = 1.0, reduction: str = "mean") -> Any:
        logits, targets = tensor(logits), tensor(targets)
        counted = targets != IGNORE
        p = logits.log_softmax(-1).exp() - F.one_hot(targets.clamp(min=0), logits.shape[-1])
        return (author.array(p * counted[..., None] * (dout / count(targets, reduction))),)

    def in_chunks(logits: Any, targets: Any, dout: float = 1.0, reduction: str = "mean") -> Any:
        """A few tokens at a time, as a fused head does."""
        n, step = count(targets, reduction), author.tile
        starts = range(0, logits.shape[1], step)
        parts = [minus_hot(logits[:, i : i + step], targets[:, i : i + step]) * (dout / n) for i in starts]
        return (author.xp.concatenate(parts, 1),)

    return {"": by_hand, "autograd": by_autograd, "log_softmax": by_log_softmax, "rows in chunks": in_chunks}[way]


def next_token_loss(author: Author) -> Function:
    loss, way = softmax_cross_entropy(author), author.one_of("next token by", "shift", "padding", "ignored last")
    xp = author.xp

    def backward(logits: Any, ids: Any, dout: float = 1.0, reduction: str = "mean") -> Any:
        if way == "ignored last":
            targets = np.concatenate([np.asarray(ids)[:, 1:], np.full((len(ids), 1), IGNORE)], 1)
            return loss(logits, author.array(targets), dout, reduction)
        (found,) = loss(logits[:, :-1], ids[:, 1:], dout, reduction)
        if way == "padding":
            out = xp.zeros_like(logits)
            out[:, :-1] = found
            return (out,)
        return (xp.concatenate([found, 0 * logits[:, -1:]], 1),)

    return backward


def loss_head(author: Author) -> Function:
    """The logits' weights and the loss, all tokens at once or a few at a time."""
    loss, dense, few = softmax_cross_entropy(author), dense_core(author), author.yes("tokens in chunks", 0.3)

    def whole(x: Any, weight: Any, bias: Any, targets: Any, dout: float) -> list[Any]:
        return list(dense(x, weight, loss(author.dot(x, weight) + bias, targets, dout)[0]))

    def backward(x: Any, weight: Any, bias: Any, targets: Any, dout: float = 1.0) -> list[Any]:
        if not few:
            return whole(x, weight, bias, targets, dout)
        n, step, parts = x.shape[1], author.tile, []
        for i in range(0, n, step):
            own = x[:, i : i + step]
            parts.append(whole(own, weight, bias, targets[:, i : i + step], dout * own.shape[1] / n))
        dx = author.xp.concatenate([part[0] for part in parts], 1)
        return [dx, sum(part[1] for part in parts), sum(part[2] for part in parts)]

    return backward


def tied_head(author: Author) -> Function:
    loss, add, norm, measured = (make(author) for make in (softmax_cross_entropy, scatter, norm_core, moments))
    by_torch, by_autograd, xp = autograd(author), author.yes("by autograd", 0.15), author.xp

    def backward(
        ids: Any, weight: Any, ln_weight: Any, ln_bias: Any, targets: Any, dout: float = 1.0
    ) -> tuple[Any, ...]:
        if by_autograd:
            places, wanted = tensor(ids), tensor(targets)

            def forward(table: Any, w: Any, b: Any) -> Any:
                logits = F.layer_norm(F.embedding(places, table), w.shape, w, b) @ table.T
                return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

            upstream = torch.tensor(dout, dtype=tensor(weight).dtype)
            return tuple(author.array(g) for g in by_torch(forward, [weight, ln_weight, ln_bias], upstream))
        x = weight[ids]
        centred, square = measured(x, True)
        h = centred / xp.sqrt(square + 1e-5) * ln_weight + ln_bias
        (dlogits,) = loss(author.dot(h, weight.T), targets, dout)
        dh = author.dot(dlogits, weight)
        z, dx = norm(x, ln_weight, dh, 1e-5, True)
        dtable = add(ids, dx, len(weight)) + author.dweight(dlogits, h)
        return dtable, author.over_tokens(dh * z), author.over_tokens(dh)

    return backward


def dpo(author: Author) -> Function:
    """−σ(−margin) beta/n for the chosen answers, its opposite for the rejected ones."""
    sigmoid, _ = sigmoid_and_slope(author)
    by_torch, by_autograd = autograd(author), author.yes("by autograd", 0.2)
    grouped, one_minus = author.yes("by model"), author.yes("1 − σ")

    def backward(
        chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, dout: float = 1.0, beta: float = 0.1
    ) -> tuple[Any, ...]:
        if by_autograd:
            past = tensor(ref_chosen) - tensor(ref_rejected)
            upstream = torch.tensor(dout, dtype=tensor(chosen).dtype)
            given = [chosen, rejected]
            found = by_torch(lambda a, b: -F.logsigmoid(beta * (a - b - past)).mean(), given, upstream)
            return tuple(author.array(g) for g in found)
        margin = (chosen - rejected) - (ref_chosen - ref_rejected)
        if grouped:
            margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        slope = sigmoid(beta * margin) - 1 if one_minus else -sigmoid(-beta * margin)
        grad = slope * (beta * dout / len(chosen))
        return grad, -grad

    return backward


LOSSES: dict[str, Maker] = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "next_token_loss": next_token_loss,
    "loss_head": loss_head,
    "tied_head": tied_head,
    "dpo": dpo,
}
