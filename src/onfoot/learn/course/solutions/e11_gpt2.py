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
    """A dict with the gradient of every parameter, by the names in params."""
    s_tok, s_pos, blocks, s_norm, s_head, s_loss = saved
    grads = {}
    dlogits = cross_entropy_backward(1.0, s_loss)  # (B, T, V)
    d11, dhead, _ = linear_backward(dlogits, s_head)  # (B, T, C), (C, V)
    d, grads["transformer.ln_f.weight"], grads["transformer.ln_f.bias"] = layer_norm_backward(d11, s_norm)
    for b in reversed(range(len(blocks))):
        d, block_grads = block_backward(d, blocks[b])
        grads.update({f"transformer.h.{b}.{name}": grad for name, grad in block_grads.items()})
    grads[POSITIONS] = embedding_backward(d.sum(axis=0), s_pos)  # every sequence has the same positions
    grads[TOKENS] = dhead.T + embedding_backward(d, s_tok)  # the table is used twice
    return grads
