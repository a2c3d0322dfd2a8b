"""Typical wrong answers to e10_tied, one mistake each."""

WRONG = [
    {
        "mistake": "Only the head is counted: the gradient through the embedding is forgotten.",
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)
    dweight = dhead.T
    return dweight
''',
    },
    {
        "mistake": "Only the embedding is counted: the gradient of the head's weight is forgotten.",
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    dfeatures = linear_backward(dlogits, s_head)[0]
    dweight = embedding_backward(dfeatures, s_embedding)
    return dweight
''',
    },
    {
        "mistake": "The gradient of the head's weight is reshaped to (V, C) instead of transposed.",
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)
    dweight = embedding_backward(dfeatures, s_embedding)
    dweight += dhead.reshape(dweight.shape)
    return dweight
''',
    },
    {
        "mistake": "The two gradients are averaged instead of summed.",
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)
    parts = [np.transpose(dhead), embedding_backward(dfeatures, s_embedding)]
    dweight = np.mean(parts, axis=0)
    return dweight
''',
    },
    {
        "mistake": (
            "In the rows that occur, the embedding's gradient overwrites (=) that of the head instead of being "
            "added (+=)."
        ),
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    ids, _ = s_embedding
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)
    dweight = dhead.T.copy()
    dweight[ids] = embedding_backward(dfeatures, s_embedding)[ids]
    return dweight
''',
    },
    {
        "mistake": "The embedding's part is added with dweight[ids] += dfeatures, which loses repeated ids.",
        "gradients": ["dweight"],
        "code": '''\
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
    """The gradient of weight, from dlogits (B, T, V), the gradient of the logits. To write."""
    s_embedding, s_head = saved
    ids, n_rows = s_embedding
    dfeatures, dhead, _ = linear_backward(dlogits, s_head)
    dweight = np.array(dhead.T)
    dweight[ids] += dfeatures
    return dweight
''',
    },
]
