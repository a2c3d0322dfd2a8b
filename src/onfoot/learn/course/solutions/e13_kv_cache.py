"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    qkv, _ = linear_forward(x, weight, bias)  # (B, T, 3 C)
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))  # each (B, H, T, C/H)
    if cache is not None:
        k = np.concatenate([cache[0], k], axis=2)  # (B, H, tokens so far, C/H)
        v = np.concatenate([cache[1], v], axis=2)
    heads, _ = attention_forward(q, k, v)
    return merge_heads(heads), (k, v)
