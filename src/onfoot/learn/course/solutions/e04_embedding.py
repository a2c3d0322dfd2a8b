"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none."""
    ids, n_rows = saved  # (...), V
    flat = dy.reshape(-1, dy.shape[-1])  # (N, C)
    dweight = np.zeros((n_rows, flat.shape[-1]), dtype=flat.dtype)  # (V, C)
    np.add.at(dweight, ids.reshape(-1), flat)
    return dweight
