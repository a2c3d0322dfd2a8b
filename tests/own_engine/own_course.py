"""A folder of exercises, as `onfoot learn` makes one, with right, wrong or no answers, from `plain_pairs.py`."""

from __future__ import annotations

import re
from pathlib import Path

PLAIN = Path(__file__).with_name("plain_pairs.py").read_text(encoding="utf-8")
HEAD, *DEFINITIONS = re.split(r"(?m)^(?=def |C, CUBIC)", PLAIN)
FILES = {
    "e01_linear": ("linear",),
    "e02_activation": ("gelu_tanh",),
    "e03_cross_entropy": ("cross_entropy",),
    "e04_embedding": ("embedding",),
    "e05_layer_norm": ("layer_norm",),
    "e07_attention": ("attention",),
}
NETWORK = '''"""Exercise 11: the whole GPT-2, from the learner's own files."""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e02_activation import gelu_tanh_backward, gelu_tanh_forward
from e03_cross_entropy import cross_entropy_backward, cross_entropy_forward
from e04_embedding import embedding_backward, embedding_forward
from e05_layer_norm import layer_norm_backward, layer_norm_forward
from e07_attention import attention_backward, attention_forward


def split(x, n):
    b, t, c = x.shape
    return x.reshape(b, t, n, c // n).swapaxes(1, 2)


def merge(x):
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)


def gpt2_forward(params, tokens, targets, config):
    n, saved = config.n_head, []
    x, s_tok = embedding_forward(tokens, params["transformer.wte.weight"])
    p, s_pos = embedding_forward(np.arange(tokens.shape[1]), params["transformer.wpe.weight"])
    x = x + p
    for i in range(config.n_layer):
        w = {key.removeprefix(f"transformer.h.{i}."): value for key, value in params.items()}
        a2, s1 = layer_norm_forward(x, w["ln_1.weight"], w["ln_1.bias"])
        qkv, s2 = linear_forward(a2, w["attn.c_attn.weight"], w["attn.c_attn.bias"])
        q, k, v = (split(part, n) for part in np.split(qkv, 3, axis=-1))
        a3, s3 = attention_forward(q, k, v)
        a4, s4 = linear_forward(merge(a3), w["attn.c_proj.weight"], w["attn.c_proj.bias"])
        a5 = x + a4
        a6, s5 = layer_norm_forward(a5, w["ln_2.weight"], w["ln_2.bias"])
        a7, s6 = linear_forward(a6, w["mlp.c_fc.weight"], w["mlp.c_fc.bias"])
        a8, s7 = gelu_tanh_forward(a7)
        a9, s8 = linear_forward(a8, w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])
        x = a5 + a9
        saved.append((s1, s2, s3, s4, s5, s6, s7, s8))
    a11, s_norm = layer_norm_forward(x, params["transformer.ln_f.weight"], params["transformer.ln_f.bias"])
    logits, s_head = linear_forward(a11, params["transformer.wte.weight"].T)
    loss, s_loss = cross_entropy_forward(logits, targets, float((targets != -100).sum()))
    return loss, (s_tok, s_pos, saved, s_norm, s_head, s_loss, n)


def gpt2_backward(saved):
    s_tok, s_pos, blocks, s_norm, s_head, s_loss, n = saved
    d, dhead, _ = linear_backward(cross_entropy_backward(1.0, s_loss), s_head)
    d, dw, db = layer_norm_backward(d, s_norm)
    grads = {"transformer.ln_f.weight": dw, "transformer.ln_f.bias": db}
    for i in reversed(range(len(blocks))):
        s1, s2, s3, s4, s5, s6, s7, s8 = blocks[i]
        w = f"transformer.h.{i}."
        d8, grads[w + "mlp.c_proj.weight"], grads[w + "mlp.c_proj.bias"] = linear_backward(d, s8)
        d6, grads[w + "mlp.c_fc.weight"], grads[w + "mlp.c_fc.bias"] = linear_backward(gelu_tanh_backward(d8, s7), s6)
        d5, grads[w + "ln_2.weight"], grads[w + "ln_2.bias"] = layer_norm_backward(d6, s5)
        d5 = d + d5
        d3, grads[w + "attn.c_proj.weight"], grads[w + "attn.c_proj.bias"] = linear_backward(d5, s4)
        dqkv = np.concatenate([merge(g) for g in attention_backward(split(d3, n), s3)], axis=-1)
        d2, grads[w + "attn.c_attn.weight"], grads[w + "attn.c_attn.bias"] = linear_backward(dqkv, s2)
        d1, grads[w + "ln_1.weight"], grads[w + "ln_1.bias"] = layer_norm_backward(d2, s1)
        d = d5 + d1
    grads["transformer.wte.weight"] = dhead.T + embedding_backward(d, s_tok)
    grads["transformer.wpe.weight"] = embedding_backward(d.sum(axis=0), s_pos)
    return grads
'''


def definition(name: str) -> str:
    (found,) = [part for part in DEFINITIONS if part.startswith(f"def {name}(")]
    return found


def unwritten(pair: str) -> str:
    """The backward as the exercise has it: it returns None."""
    return f"def {pair}_backward(dy, saved):\n    return {', '.join(['None'] * (3 if pair != 'embedding' else 1))}\n"


def replaced(text: str, old: str, new: str) -> str:
    """The text with a part replaced, which it must have."""
    before, _, after = text.partition(old) if old else (text, "", "")
    assert old in text
    return before + new + after


def write_course(folder: Path, network: bool = True, without: tuple[str, ...] = (), **changes: tuple[str, str]) -> Path:
    """Writes the files. `without` are pairs whose backward is unwritten; `changes` replace text in a backward."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, pairs in FILES.items():
        text = HEAD + next(part for part in DEFINITIONS if part.startswith("C, CUBIC"))
        for pair in pairs:
            backward = replaced(definition(f"{pair}_backward"), *changes.get(pair, ("", "")))
            text += definition(f"{pair}_forward") + (unwritten(pair) if pair in without else backward)
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
    if network:
        (folder / "e11_gpt2.py").write_text(NETWORK, encoding="utf-8")
    return folder
