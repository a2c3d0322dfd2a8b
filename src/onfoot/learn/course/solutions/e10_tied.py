"""Exercise 10: the tied head. The page is e10_tied.md; check with: onfoot learn check 10"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e04_embedding import embedding_backward, embedding_forward


def tied_forward(ids, weight):
    """logits = weight[ids] weightᵗ: one table for embedding and logits. Given: ids (B, T), weight (V, C)."""
    features, s_embedding = embedding_forward(ids, weight)  # (B, T, C)
    logits, s_head = linear_forward(features, weight.T)  # (B, T, V); the weight of the head is (C, V)
    return logits, (s_embedding, s_head)


def tied_backward(dlogits, saved):
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits."""
    s_embedding, s_head = saved
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)  # (B, T, C), (C, V)
    return dhead.T + embedding_backward(dfeatures, s_embedding)  # (V, C): the sum of both uses
