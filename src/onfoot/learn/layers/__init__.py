"""Layers that only the exercises need, in the checker's form: exact gradients, steps, and mistakes known by name."""

from __future__ import annotations

from dataclasses import replace

from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS
from onfoot.learn.layers.attention import MASKED_ATTENTION
from onfoot.learn.layers.gpt2 import GPT2, OF_BLOCK
from onfoot.learn.layers.grouped_query import GROUPED_QUERY
from onfoot.learn.layers.kv_cache import KV_CACHE
from onfoot.learn.layers.loss import LOSS
from onfoot.learn.layers.self_attention import SELF_ATTENTION
from onfoot.learn.layers.softmax import SOFTMAX
from onfoot.learn.layers.tangents import LAYER_NORM_TANGENT, LINEAR_TANGENT, SOFTMAX_TANGENT

BLOCK = replace(LAYERS["block"], gradients=("dx", *OF_BLOCK))  # its gradients by GPT-2's names

OWN_LAYERS: dict[str, Layer] = {
    "softmax": SOFTMAX,
    "masked_attention": MASKED_ATTENTION,
    "self_attention": SELF_ATTENTION,
    "loss_with_ignored": LOSS,
    "gpt2_block": BLOCK,
    "gpt2": GPT2,
    "kv_cache": KV_CACHE,
    "grouped_query": GROUPED_QUERY,
    "linear_tangent": LINEAR_TANGENT,
    "softmax_tangent": SOFTMAX_TANGENT,
    "layer_norm_tangent": LAYER_NORM_TANGENT,
}
