"""Softmax cross-entropy with given targets and with next-token targets; targets of −100 are ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from campaigns.right_functions.attention import softmax
from campaigns.right_functions.author import Author, Function, Maker, autograd, tensor

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


LOSSES: dict[str, Maker] = {"softmax_cross_entropy": softmax_cross_entropy, "next_token_loss": next_token_loss}
