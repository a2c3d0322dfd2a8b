"""Six typical wrong answers to e13_kv_cache: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "The new keys and values are put before the cached ones instead of behind them.",
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    qkv, _ = linear_forward(x, weight, bias)
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))
    if cache is not None:
        old_k, old_v = cache
        k = np.concatenate([k, old_k], axis=2)
        v = np.concatenate([v, old_v], axis=2)
    heads, _ = attention_forward(q, k, v)
    y = merge_heads(heads)
    new_cache = (k, v)
    return y, new_cache
''',
    },
    {
        "mistake": (
            "The mask is dropped as soon as there is a cache, so in a chunk of several tokens each one sees the "
            "later ones."
        ),
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    parts = np.split(linear_forward(x, weight, bias)[0], 3, axis=-1)
    q, k, v = [split_heads(p, n_head) for p in parts]
    first = cache is None
    if not first:
        k = np.concatenate((cache["k"], k), axis=-2)
        v = np.concatenate((cache["v"], v), axis=-2)
    y = merge_heads(attention_forward(q, k, v, causal=first)[0])
    return y, {"k": k, "v": v}
''',
    },
    {
        "mistake": (
            "The cache returned has only the keys and values of the newest chunk; those of the earlier chunks are lost."
        ),
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    c = x.shape[-1]
    qkv, _ = linear_forward(x, weight, bias)
    q = split_heads(qkv[..., :c], n_head)
    k_new = split_heads(qkv[..., c : 2 * c], n_head)
    v_new = split_heads(qkv[..., 2 * c :], n_head)
    if cache is None:
        k_all, v_all = k_new, v_new
    else:
        k_all = np.concatenate([cache[0], k_new], axis=2)
        v_all = np.concatenate([cache[1], v_new], axis=2)
    out, _ = attention_forward(q, k_all, v_all)
    return merge_heads(out), (k_new, v_new)
''',
    },
    {
        "mistake": (
            "Keys and values are taken out of the cache in the wrong order: the old values stand among the keys "
            "and vice versa."
        ),
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    qkv, _ = linear_forward(x, weight, bias)
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))
    if cache:
        past_v, past_k = cache
        k, v = np.concatenate([past_k, k], axis=2), np.concatenate([past_v, v], axis=2)
    heads, _ = attention_forward(q, k, v)
    y, new_cache = merge_heads(heads), (k, v)
    return y, new_cache
''',
    },
    {
        "mistake": "The bias of the linear layer is forgotten.",
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    qkv, _ = linear_forward(x, weight)
    new_q, new_k, new_v = np.split(qkv, 3, axis=-1)
    # the cache is kept as (B, T, C) and split into heads afterwards
    keys = new_k if cache is None else np.concatenate([cache[0], new_k], axis=1)
    values = new_v if cache is None else np.concatenate([cache[1], new_v], axis=1)
    heads, _ = attention_forward(*(split_heads(a, n_head) for a in (new_q, keys, values)))
    y = merge_heads(heads)
    new_cache = keys, values
    return y, new_cache
''',
    },
    {
        "mistake": "The heads are merged by a reshape alone; the axes of heads and tokens are not swapped back first.",
        "gradients": ["y"],
        "code": '''\
"""Exercise 13: the KV cache. The page is e13_kv_cache.md; check with: onfoot learn check 13"""

import numpy as np
from e01_linear import linear_forward
from e07_attention import attention_forward
from e08_multi_head import merge_heads, self_attention_forward, split_heads


def cached_attention(x, weight, bias, n_head, cache):
    """Self-attention of new tokens x (B, T, C) behind those in the cache. To write.

    cache is None before the first tokens; after that it is whatever you returned the last time. Returns y (B, T, C),
    the rows of self_attention_forward for the new tokens, and the new cache. weight is (C, 3 C), bias (3 C,).
    """
    batch, n_new, width = x.shape
    projected = linear_forward(x, weight, bias)[0]
    q, k, v = map(lambda part: split_heads(part, n_head), np.split(projected, 3, axis=2))
    if cache is not None:
        k = np.concatenate([cache[0], k], axis=2)
        v = np.concatenate([cache[1], v], axis=2)
    heads = attention_forward(q, k, v)[0]
    y = heads.reshape(batch, n_new, width)
    new_cache = [k, v]
    return y, new_cache
''',
    },
]
