"""Typical wrong answers to e04_embedding, one mistake each."""

WRONG = [
    {
        "mistake": "dweight[ids] += dy loses repeated ids: only the last write for an id survives.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved  # (...), V
    dweight = np.zeros((n_rows, dy.shape[-1]), dtype=dy.dtype)
    dweight[ids] += dy
    return dweight
''',
    },
    {
        "mistake": "The sum for each id is divided by how often it occurs: a mean instead of a sum.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved
    flat_ids, flat_dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    dweight = np.zeros((n_rows, flat_dy.shape[1]), dtype=dy.dtype)
    for v in range(n_rows):
        if (flat_ids == v).any():
            dweight[v] = flat_dy[flat_ids == v].mean(axis=0)
    return dweight
''',
    },
    {
        "mistake": "Only the first occurrence of an id is counted; later ones are skipped.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved
    dweight = np.zeros((n_rows, dy.shape[-1]), dtype=dy.dtype)
    seen = set()
    for i, g in zip(ids.ravel().tolist(), dy.reshape(-1, dy.shape[-1])):
        if i not in seen:
            dweight[i] += g
            seen.add(i)
    return dweight
''',
    },
    {
        "mistake": (
            "The ids are flattened in another order (columns first) than the rows of dy, so the gradients go to "
            "the wrong tokens."
        ),
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved
    order = ids.T.reshape(-1)
    dweight = np.zeros((n_rows, dy.shape[-1]), dtype=dy.dtype)
    np.add.at(dweight, order, dy.reshape(len(order), -1))
    return dweight
''',
    },
    {
        "mistake": "Row 0 is left out, as if id 0 were padding and had no gradient.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved
    c = dy.shape[-1]
    one_hot = np.zeros((ids.size, n_rows), dtype=dy.dtype)
    one_hot[np.arange(ids.size), ids.reshape(-1)] = 1
    dweight = one_hot.T @ dy.reshape(-1, c)
    dweight[0] = 0
    return dweight
''',
    },
    {
        "mistake": "dweight is made anew for each sequence of the batch, so only the last sequence counts.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved
    t, c = ids.shape[-1], dy.shape[-1]
    for seq, dseq in zip(ids.reshape(-1, t), dy.reshape(-1, t, c)):
        dweight = np.zeros((n_rows, c), dtype=dy.dtype)
        for i, g in zip(seq, dseq):
            dweight[i] += g
    return dweight
''',
    },
]
