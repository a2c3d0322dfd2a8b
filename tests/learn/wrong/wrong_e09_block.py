"""Typical wrong answers to e09_block, one mistake each."""

WRONG = [
    {
        "mistake": "The second skip connection is forgotten: a5 gets only the gradient from the MLP, not d10 as well.",
        "gradients": [
            "dx",
            "ln_1.weight",
            "ln_1.bias",
            "attn.c_attn.weight",
            "attn.c_attn.bias",
            "attn.c_proj.weight",
            "attn.c_proj.bias",
        ],
        "code": '''\
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
    grads = dict.fromkeys(NAMES)
    d8, grads["mlp.c_proj.weight"], grads["mlp.c_proj.bias"] = linear_backward(d10, s_out)
    d7 = gelu_tanh_backward(d8, s_gelu)
    d6, grads["mlp.c_fc.weight"], grads["mlp.c_fc.bias"] = linear_backward(d7, s_fc)
    d5, grads["ln_2.weight"], grads["ln_2.bias"] = layer_norm_backward(d6, s_norm2)
    d3, grads["attn.c_proj.weight"], grads["attn.c_proj.bias"] = linear_backward(d5, s_proj)
    d2, grads["attn.c_attn.weight"], grads["attn.c_attn.bias"] = self_attention_backward(d3, s_attention)
    d, grads["ln_1.weight"], grads["ln_1.bias"] = layer_norm_backward(d2, s_norm1)
    dx = d5 + d
    return dx, grads
''',
    },
    {
        "mistake": "The first skip connection is forgotten: dx is only what comes through the attention, without d5.",
        "gradients": ["dx"],
        "code": '''\
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
    d8, dw_out, db_out = linear_backward(d10, s_out)
    d7 = gelu_tanh_backward(d8, s_gelu)
    d6, dw_fc, db_fc = linear_backward(d7, s_fc)
    d5, dw_ln2, db_ln2 = layer_norm_backward(d6, s_norm2)
    d5 = d5 + d10
    d3, dw_proj, db_proj = linear_backward(d5, s_proj)
    d2, dw_attn, db_attn = self_attention_backward(d3, s_attention)
    dx, dw_ln1, db_ln1 = layer_norm_backward(d2, s_norm1)
    first = [dw_ln1, db_ln1, dw_attn, db_attn, dw_proj, db_proj]
    second = [dw_ln2, db_ln2, dw_fc, db_fc, dw_out, db_out]
    grads = dict(zip(NAMES, first + second))
    return dx, grads
''',
    },
    {
        "mistake": "The attention branch gets d10 instead of d5, so what comes back from the MLP does not reach it.",
        "gradients": [
            "dx",
            "ln_1.weight",
            "ln_1.bias",
            "attn.c_attn.weight",
            "attn.c_attn.bias",
            "attn.c_proj.weight",
            "attn.c_proj.bias",
        ],
        "code": '''\
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
    grads = dict.fromkeys(NAMES)  # None for each name: fill them in

    def back(layer, function, d, s):
        d, grads[layer + ".weight"], grads[layer + ".bias"] = function(d, s)
        return d

    d8 = back("mlp.c_proj", linear_backward, d10, s_out)
    d7 = gelu_tanh_backward(d8, s_gelu)
    d6 = back("mlp.c_fc", linear_backward, d7, s_fc)
    d5 = d10 + back("ln_2", layer_norm_backward, d6, s_norm2)
    d3 = back("attn.c_proj", linear_backward, d10, s_proj)
    d2 = back("attn.c_attn", self_attention_backward, d3, s_attention)
    dx = d5 + back("ln_1", layer_norm_backward, d2, s_norm1)
    return dx, grads
''',
    },
    {
        "mistake": "The first skip connection passes on d10 instead of d5.",
        "gradients": ["dx"],
        "code": '''\
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
    grads = dict.fromkeys(NAMES)
    d8, grads["mlp.c_proj.weight"], grads["mlp.c_proj.bias"] = linear_backward(d10, s_out)
    d7 = gelu_tanh_backward(d8, s_gelu)
    d6, grads["mlp.c_fc.weight"], grads["mlp.c_fc.bias"] = linear_backward(d7, s_fc)
    d, grads["ln_2.weight"], grads["ln_2.bias"] = layer_norm_backward(d6, s_norm2)
    d5 = d10 + d
    d3, grads["attn.c_proj.weight"], grads["attn.c_proj.bias"] = linear_backward(d5, s_proj)
    d2, grads["attn.c_attn.weight"], grads["attn.c_attn.bias"] = self_attention_backward(d3, s_attention)
    d, grads["ln_1.weight"], grads["ln_1.bias"] = layer_norm_backward(d2, s_norm1)
    dx = d10 + d
    return dx, grads
''',
    },
    {
        "mistake": "The backward pass of gelu is left out: the gradient of a8 is used as that of a7.",
        "gradients": [
            "dx",
            "ln_1.weight",
            "ln_1.bias",
            "attn.c_attn.weight",
            "attn.c_attn.bias",
            "attn.c_proj.weight",
            "attn.c_proj.bias",
            "ln_2.weight",
            "ln_2.bias",
            "mlp.c_fc.weight",
            "mlp.c_fc.bias",
        ],
        "code": '''\
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
    d8, dw_out, db_out = linear_backward(d10, s_out)
    d6, dw_fc, db_fc = linear_backward(d8, s_fc)
    d5, dw_ln2, db_ln2 = layer_norm_backward(d6, s_norm2)
    d5 = d5 + d10
    d3, dw_proj, db_proj = linear_backward(d5, s_proj)
    d2, dw_attn, db_attn = self_attention_backward(d3, s_attention)
    dx, dw_ln1, db_ln1 = layer_norm_backward(d2, s_norm1)
    dx = dx + d5
    first = [dw_ln1, db_ln1, dw_attn, db_attn, dw_proj, db_proj]
    second = [dw_ln2, db_ln2, dw_fc, db_fc, dw_out, db_out]
    grads = dict(zip(NAMES, first + second))
    return dx, grads
''',
    },
    {
        "mistake": "The second skip connection is added before the layer norm: d10 also goes backwards through ln_2.",
        "gradients": [
            "dx",
            "ln_1.weight",
            "ln_1.bias",
            "attn.c_attn.weight",
            "attn.c_attn.bias",
            "attn.c_proj.weight",
            "attn.c_proj.bias",
            "ln_2.weight",
            "ln_2.bias",
        ],
        "code": '''\
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
    grads = dict.fromkeys(NAMES)  # None for each name: fill them in

    def back(layer, function, d, s):
        d, grads[layer + ".weight"], grads[layer + ".bias"] = function(d, s)
        return d

    d8 = back("mlp.c_proj", linear_backward, d10, s_out)
    d7 = gelu_tanh_backward(d8, s_gelu)
    d6 = back("mlp.c_fc", linear_backward, d7, s_fc)
    d5 = back("ln_2", layer_norm_backward, d6 + d10, s_norm2)
    d3 = back("attn.c_proj", linear_backward, d5, s_proj)
    d2 = back("attn.c_attn", self_attention_backward, d3, s_attention)
    dx = d5 + back("ln_1", layer_norm_backward, d2, s_norm1)
    return dx, grads
''',
    },
]
