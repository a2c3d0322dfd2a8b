"""Exercise 4: the embedding. The page is e04_embedding.md; check with: onfoot learn check 4"""

import numpy as np


def embedding_forward(ids, weight):
    """y = weight[ids]: the row of the table for each id. Given: ids (...), weight (V, C), y (..., C)."""
    return weight[ids], (ids, weight.shape[0])


def embedding_backward(dy, saved):
    """The gradient of weight, from dy (..., C), the gradient of y. The ids have none. To write."""
    ids, n_rows = saved  # (...), V
    dweight = None  # shape (V, C)
    return dweight
