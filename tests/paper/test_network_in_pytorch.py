"""The listing of docs/equations/pytorch.md: with other sizes, against onfoot, and with mistakes in its lines."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.models.model import Model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "equations" / "pytorch.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
LISTING = "\n".join(BLOCKS)
SIZES = "T, d, V, context, heads, rank, alpha, eps = 7, 12, 13, 9, 3, 2, 0.5, 1e-5"


def listing(text: str = LISTING, sizes: str = SIZES, seed: int = 0) -> dict[str, Any]:
    """The names that the listing defines, with other sizes and another seed."""
    assert SIZES in text and "torch.manual_seed(0)" in text
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(text.replace(SIZES, sizes).replace("manual_seed(0)", f"manual_seed({seed})"), names)
    return names


@pytest.mark.parametrize(
    "sizes", ["5, 6, 7, 5, 1, 1, 2.0, 1e-3", "2, 4, 5, 3, 2, 3, -1.0, 1e-5", "11, 10, 3, 12, 5, 4, 0.1, 1e-5"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_listing_agrees_with_autograd_for_other_sizes_and_seeds(sizes: str, seed: int) -> None:
    names = listing(sizes=SIZES[: SIZES.index("=") + 2] + sizes, seed=seed)  # its own assertion has passed
    torch.manual_seed(seed)
    tokens = torch.randint(0, names["V"], (names["T"],))
    assert names["compare"](names["parameters"](), tokens) < 1e-12


def test_the_listing_agrees_with_onfoot() -> None:
    names = listing()
    p, tokens = names["parameters"](), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    p["u_11"] = torch.zeros_like(p["u_11"])  # no LoRA
    config = onfoot.GPT2Config(
        n_layer=1, n_head=3, n_embd=12, n_positions=9, vocab_size=13, activation_function="gelu",
        tie_word_embeddings=False, lm_head_bias=True,
    )  # fmt: skip
    ours = {"transformer.wte.weight": "w_tok", "transformer.wpe.weight": "w_pos", "lm_head.bias": "b_11"}
    layers = {"h.0.ln_1": 1, "h.0.attn.c_proj": 3, "h.0.ln_2": 5, "h.0.mlp.c_fc": 6, "h.0.mlp.c_proj": 8, "ln_f": 10}
    for layer, i in layers.items():
        ours |= {f"transformer.{layer}.weight": f"w_{i}", f"transformer.{layer}.bias": f"b_{i}"}

    def in_our_names(x: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        out = {name: x[theirs].numpy() for name, theirs in ours.items()}
        out["lm_head.weight"] = x["w_11"].T.numpy()
        for kind, part in (("weight", "w"), ("bias", "b")):
            columns = [torch.cat(list(x[f"{part}_{one}"]), dim=-1) for one in "qkv"]
            out[f"transformer.h.0.attn.c_attn.{kind}"] = torch.cat(columns, dim=-1).squeeze(0).numpy()
        return out

    model = Model(config, {k: v.copy() for k, v in in_our_names(p).items()}, "float64", "numpy")
    loss, grads = model.loss_and_grads(tokens.numpy()[None], divisor=1)
    a, keep, y_pred = names["forward"](p, tokens)
    assert loss == pytest.approx(float(names["loss_of"](y_pred, tokens)), rel=1e-12)
    deltas, by_hand = names["backward"](p, a, keep, y_pred)
    expected = in_our_names(by_hand)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    trace = model.trace(tokens.numpy()[None])
    for i in (1, 2, 3, 5, 6, 7, 8, 10):
        np.testing.assert_allclose(trace[f"a_{i}", 0][0], a[i].numpy(), atol=1e-12)
        np.testing.assert_allclose(trace[f"Δ_{i}", 0][0] * 6, deltas[i].numpy(), atol=1e-12)


MISTAKES = [
    ("masked_fill(future, -math.inf)", "masked_fill(future, 0)"),
    ("D[12][-1] = 0", "D[12][-1] += 0"),
    (' + alpha * D[12] @ p["u_11"].T @ p["d_11"].T', ""),
    ('D[12] @ p["w_11"].T + alpha', "alpha"),
    ("(drho * rho).sum(-1, keepdim=True)) * rho", "(drho * rho).mean(-1, keepdim=True)) * rho"),
    ("D[10] + norm_backward", "norm_backward"),
    ("D[5] + norm_backward", "norm_backward"),
    ("index_add(0, tokens, D[1])", "index_copy(0, tokens, D[1])"),
    ("a[2].T @ raw @ k,", "a[2].T @ raw.mT @ k,"),
    ("(raw @ a[2]).mT @ q", "(raw.mT @ a[2]).mT @ q"),
    ("(rho @ a[2]).mT @ d3", "(rho.mT @ a[2]).mT @ d3"),
    ("g = delta * w\n", "g = delta\n"),
    (" - normed * (normed * g).mean(-1, keepdim=True)) / sigma", ") / sigma"),
    ("torch.stack(D[3].split(d // heads, dim=-1))", "D[3].reshape(heads, T, d // heads)"),
    ("* rho / math.sqrt(d // heads)", "* rho"),
]


@pytest.mark.parametrize(("line", "mistake"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_any_line_of_the_listing_is_seen(line: str, mistake: str) -> None:
    assert LISTING.count(line) >= 1
    definitions = LISTING.replace(line, mistake).replace("assert compare(parameters()", "0 and compare(parameters()")
    names, tokens = listing(definitions), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    right = listing()
    p = right["parameters"]()
    assert right["compare"](p, tokens) < 1e-12
    assert names["compare"](p, tokens) > 1e-3


def test_the_listing_has_the_papers_number_of_parameters() -> None:
    head = LISTING[LISTING.index("    wide = {") : LISTING.index("    return {name: 0.4")]
    names: dict[str, Any] = {"d": 768, "V": 50257, "context": 1024, "heads": 12, "rank": 16}
    exec(re.sub(r"^    ", "", head, flags=re.MULTILINE), names)
    count = {name: math.prod(shape) for name, shape in names["wide"].items()}
    lora = count.pop("d_11") + count.pop("u_11")
    assert (sum(count.values()), lora) == (85_120_849, 816_400)
