"""The forward pass of attention, which a layer around it has to compute again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from campaigns.right_functions.attention import hidden, softmax
from campaigns.right_functions.author import Author, Function, t


def mixing(author: Author) -> Function:
    """(q, k, v, causal) → softmax(q kᵗ/√d_k) v."""
    weights, xp, dot = softmax(author), author.xp, author.dot

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        s = dot(q, t(k)) / math.sqrt(q.shape[-1])
        unseen = author.like(hidden(q.shape[-2], k.shape[-2], causal), s)
        return dot(weights(xp.where(unseen, author.like(np.array(-math.inf), s), s)), v)

    return forward
