"""Exercise 9: a block with skip connections. The page is e09_block.md; check with: onfoot learn check 9"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e02_activation import gelu_tanh_backward, gelu_tanh_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e08_multi_head import self_attention_backward, self_attention_forward

NAMES = (
    *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"),
    *("ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
)


def block_forward(x, params, n_head, eps=1e-5):
    """GPT-2's block: attention, then an MLP, each after a layer norm and added to what came in. Given: x (B, T, C).

    params has an array for each of NAMES; names are GPT-2's, and weights are (in, out).
    """

    def of(layer):
        return params[f"{layer}.weight"], params[f"{layer}.bias"]

    a2, s_norm1 = layer_norm_forward(x, *of("ln_1"), eps)
    a3, s_attention = self_attention_forward(a2, *of("attn.c_attn"), n_head)
    a4, s_proj = linear_forward(a3, *of("attn.c_proj"))
    a5 = x + a4  # the first skip connection
    a6, s_norm2 = layer_norm_forward(a5, *of("ln_2"), eps)
    a7, s_fc = linear_forward(a6, *of("mlp.c_fc"))
    a8, s_gelu = gelu_tanh_forward(a7)
    a9, s_out = linear_forward(a8, *of("mlp.c_proj"))
    a10 = a5 + a9  # the second skip connection
    return a10, (s_norm1, s_attention, s_proj, s_norm2, s_fc, s_gelu, s_out)


def block_backward(d10, saved):
    """The gradient of x, and a dict with that of every parameter, from d10 (B, T, C), that of the output. To write."""
    s_norm1, s_attention, s_proj, s_norm2, s_fc, s_gelu, s_out = saved
    dx = None  # shape (B, T, C)
    grads = dict.fromkeys(NAMES)  # None for each name: fill them in
    return dx, grads
