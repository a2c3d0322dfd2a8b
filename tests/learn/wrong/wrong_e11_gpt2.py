"""Six typical wrong answers to e11_gpt2: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": (
            "The token table is used twice; its gradient from the head is overwritten by that from the embedding "
            "(= instead of +=)."
        ),
        "gradients": ["transformer.wte.weight"],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    grads = {}
    dlogits = cross_entropy_backward(1.0, s_loss)
    da11, dhead, _ = linear_backward(dlogits, s_head)
    grads[TOKENS] = dhead.T
    dx, grads["transformer.ln_f.weight"], grads["transformer.ln_f.bias"] = layer_norm_backward(da11, s_norm)
    for b in reversed(range(len(blocks))):
        dx, block_grads = block_backward(dx, blocks[b])
        for name in NAMES:
            grads[f"transformer.h.{b}.{name}"] = block_grads[name]
    grads[POSITIONS] = embedding_backward(dx.sum(axis=0), s_pos)
    grads[TOKENS] = embedding_backward(dx, s_tok)
    return grads
''',
    },
    {
        "mistake": (
            "The token table gets only the gradient of the tied head; its use as embedding at the bottom is forgotten."
        ),
        "gradients": ["transformer.wte.weight"],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    d_logits = cross_entropy_backward(1.0, s_loss)
    d_a11, d_head, _ = linear_backward(d_logits, s_head)
    d_x, d_gamma, d_beta = layer_norm_backward(d_a11, s_norm)
    grads = {"transformer.ln_f.weight": d_gamma, "transformer.ln_f.bias": d_beta}
    for b in range(len(blocks) - 1, -1, -1):
        d_x, d_params = block_backward(d_x, blocks[b])
        grads.update({f"transformer.h.{b}.{key}": value for key, value in d_params.items()})
    grads[POSITIONS] = embedding_backward(np.sum(d_x, axis=0), s_pos)
    grads[TOKENS] = np.transpose(d_head)
    return grads
''',
    },
    {
        "mistake": (
            "The blocks are gone through in the order of the forward pass, the first block first, instead of backwards."
        ),
        "gradients": [
            "transformer.wte.weight",
            "transformer.wpe.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.ln_1.bias",
            "transformer.h.0.ln_2.weight",
            "transformer.h.0.ln_2.bias",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.0.attn.c_attn.bias",
            "transformer.h.0.attn.c_proj.weight",
            "transformer.h.0.attn.c_proj.bias",
            "transformer.h.0.mlp.c_fc.weight",
            "transformer.h.0.mlp.c_fc.bias",
            "transformer.h.0.mlp.c_proj.weight",
            "transformer.h.0.mlp.c_proj.bias",
            "transformer.h.1.ln_1.weight",
            "transformer.h.1.ln_1.bias",
            "transformer.h.1.ln_2.weight",
            "transformer.h.1.ln_2.bias",
            "transformer.h.1.attn.c_attn.weight",
            "transformer.h.1.attn.c_attn.bias",
            "transformer.h.1.attn.c_proj.weight",
            "transformer.h.1.attn.c_proj.bias",
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.h.1.mlp.c_fc.bias",
            "transformer.h.1.mlp.c_proj.weight",
            "transformer.h.1.mlp.c_proj.bias",
        ],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    out = {}
    dl = cross_entropy_backward(1.0, s_loss)
    d, dw_head, _ = linear_backward(dl, s_head)
    d, out["transformer.ln_f.weight"], out["transformer.ln_f.bias"] = layer_norm_backward(d, s_norm)
    for i, s_block in enumerate(blocks):
        d, g = block_backward(d, s_block)
        for n in NAMES:
            out["transformer.h." + str(i) + "." + n] = g[n]
    out[TOKENS] = embedding_backward(d, s_tok) + dw_head.T
    out[POSITIONS] = embedding_backward(d.sum(0), s_pos)
    return out
''',
    },
    {
        "mistake": "The gradient of the positions is averaged over the sequences of the batch instead of summed.",
        "gradients": ["transformer.wpe.weight"],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    # top: loss, tied head, last norm
    dlogits = cross_entropy_backward(1.0, s_loss)
    dx, dtable, _ = linear_backward(dlogits, s_head)
    dx, dnorm_weight, dnorm_bias = layer_norm_backward(dx, s_norm)
    grads = {"transformer.ln_f.weight": dnorm_weight, "transformer.ln_f.bias": dnorm_bias}
    # the blocks, last one first
    b = len(blocks)
    while b > 0:
        b -= 1
        dx, g = block_backward(dx, blocks[b])
        grads |= {f"transformer.h.{b}.{name}": g[name] for name in NAMES}
    # bottom: the two tables
    grads[POSITIONS] = embedding_backward(dx.mean(axis=0), s_pos)
    grads[TOKENS] = embedding_backward(dx, s_tok) + dtable.T
    return grads
''',
    },
    {
        "mistake": (
            "The blocks are gone through backwards, but counted forwards: their gradients are stored under the "
            "wrong block's name."
        ),
        "gradients": [
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.ln_1.bias",
            "transformer.h.0.ln_2.weight",
            "transformer.h.0.ln_2.bias",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.0.attn.c_attn.bias",
            "transformer.h.0.attn.c_proj.weight",
            "transformer.h.0.attn.c_proj.bias",
            "transformer.h.0.mlp.c_fc.weight",
            "transformer.h.0.mlp.c_fc.bias",
            "transformer.h.0.mlp.c_proj.weight",
            "transformer.h.0.mlp.c_proj.bias",
            "transformer.h.1.ln_1.weight",
            "transformer.h.1.ln_1.bias",
            "transformer.h.1.ln_2.weight",
            "transformer.h.1.ln_2.bias",
            "transformer.h.1.attn.c_attn.weight",
            "transformer.h.1.attn.c_attn.bias",
            "transformer.h.1.attn.c_proj.weight",
            "transformer.h.1.attn.c_proj.bias",
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.h.1.mlp.c_fc.bias",
            "transformer.h.1.mlp.c_proj.weight",
            "transformer.h.1.mlp.c_proj.bias",
        ],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    dlogits = cross_entropy_backward(1.0, s_loss)
    d11, dhead, _ = linear_backward(dlogits, s_head)
    dx, dln_weight, dln_bias = layer_norm_backward(d11, s_norm)
    grads = {}
    for b, s_block in enumerate(blocks[::-1]):
        dx, g = block_backward(dx, s_block)
        for name in NAMES:
            grads[f"transformer.h.{b}.{name}"] = g[name]
    grads["transformer.ln_f.weight"] = dln_weight
    grads["transformer.ln_f.bias"] = dln_bias
    grads[POSITIONS] = embedding_backward(dx.sum(axis=0), s_pos)
    grads[TOKENS] = embedding_backward(dx, s_tok)
    grads[TOKENS] += dhead.T
    return grads
''',
    },
    {
        "mistake": (
            "The last layer norm gives its weight and bias their gradients, but the gradient for the blocks does "
            "not go through it."
        ),
        "gradients": [
            "transformer.wte.weight",
            "transformer.wpe.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.ln_1.bias",
            "transformer.h.0.ln_2.weight",
            "transformer.h.0.ln_2.bias",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.0.attn.c_attn.bias",
            "transformer.h.0.attn.c_proj.weight",
            "transformer.h.0.attn.c_proj.bias",
            "transformer.h.0.mlp.c_fc.weight",
            "transformer.h.0.mlp.c_fc.bias",
            "transformer.h.0.mlp.c_proj.weight",
            "transformer.h.0.mlp.c_proj.bias",
            "transformer.h.1.ln_1.weight",
            "transformer.h.1.ln_1.bias",
            "transformer.h.1.ln_2.weight",
            "transformer.h.1.ln_2.bias",
            "transformer.h.1.attn.c_attn.weight",
            "transformer.h.1.attn.c_attn.bias",
            "transformer.h.1.attn.c_proj.weight",
            "transformer.h.1.attn.c_proj.bias",
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.h.1.mlp.c_fc.bias",
            "transformer.h.1.mlp.c_proj.weight",
            "transformer.h.1.mlp.c_proj.bias",
        ],
        "code": '''\
"""Exercise 11: the whole GPT-2. The page is e11_gpt2.md; check with: onfoot learn check 11"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e03_cross_entropy import IGNORE, cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e09_block import NAMES, block_backward, block_forward

TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"  # the two tables: (V, C), (positions, C)


def gpt2_forward(params, tokens, targets, config):
    """The mean loss of predicting the targets (−100: none). Given: tokens, targets (B, T).

    params has every parameter by its Hugging Face name; config has n_layer, n_head and layer_norm_epsilon.
    """
    a_tok, s_tok = embedding_forward(tokens, params[TOKENS])  # (B, T, C)
    a_pos, s_pos = embedding_forward(np.arange(tokens.shape[1]), params[POSITIONS])  # (T, C)
    x = a_tok + a_pos  # the same positions for every sequence
    blocks = []
    for b in range(config.n_layer):
        block_params = {name: params[f"transformer.h.{b}.{name}"] for name in NAMES}
        x, s_block = block_forward(x, block_params, config.n_head, config.layer_norm_epsilon)
        blocks.append(s_block)
    norm = params["transformer.ln_f.weight"], params["transformer.ln_f.bias"]
    a11, s_norm = layer_norm_forward(x, *norm, config.layer_norm_epsilon)
    logits, s_head = linear_forward(a11, params[TOKENS].T)  # (B, T, V): the tied head
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != IGNORE).sum()))
    return loss, (s_tok, s_pos, blocks, s_norm, s_head, s_loss)


def gpt2_backward(saved):
    """A dict with the gradient of every parameter, by the names in params. To write."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    grads = {}
    d_features, d_head, _ = linear_backward(cross_entropy_backward(1.0, s_loss), s_head)
    d_norm, *of_norm = layer_norm_backward(d_features, s_norm)
    grads["transformer.ln_f.weight"], grads["transformer.ln_f.bias"] = of_norm
    d = d_features
    for b in reversed(range(len(blocks))):
        d, of_block = block_backward(d, blocks[b])
        grads.update((f"transformer.h.{b}.{name}", of_block[name]) for name in NAMES)
    grads.update({TOKENS: d_head.T + embedding_backward(d, s_tok), POSITIONS: embedding_backward(d.sum(axis=0), s_pos)})
    return grads
''',
    },
]
