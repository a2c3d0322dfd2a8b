"""Independent oracles: PyTorch's own layers under autograd, and finite differences; none of onfoot's formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onfoot import GPT2Config


def relative_error(got: Any, expected: Any) -> float:
    """The norm of the difference over the norm of what is expected."""
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def assert_close(got: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Within a relative tolerance; where 0 is expected, within the tolerance absolutely."""
    if not np.any(expected):
        assert np.max(np.abs(got), initial=0) <= tolerance, f"{what}: {np.max(np.abs(got))}, expected 0"
        return
    error = relative_error(got, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def autograd(function: Callable[..., torch.Tensor], arrays: Sequence[np.ndarray], dy: np.ndarray) -> list[np.ndarray]:
    """The gradients of ⟨dy, function(*arrays)⟩ by PyTorch's autograd, in float64."""
    leaves = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    function(*leaves).backward(torch.tensor(dy, dtype=torch.float64))
    return [np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]


def directional_difference(
    function: Callable[..., np.ndarray],
    arrays: Sequence[np.ndarray],
    directions: Sequence[np.ndarray],
    dy: Any,
    h: float,
) -> float:
    """d/dε ⟨dy, function(arrays + ε directions)⟩ at 0, by a four-point difference."""

    def at(step: float) -> float:
        moved = [a + step * d for a, d in zip(arrays, directions, strict=True)]
        return float(np.sum(np.asarray(dy) * function(*moved)))

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


def gpt2_logits(params: dict[str, torch.Tensor], config: GPT2Config, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's forward pass out of PyTorch's own layers."""
    n, activation = config.n_head, {"gelu_new": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}
    dk, dv = config.key_width, config.value_width
    t = tokens.shape[1]
    x = F.embedding(tokens, params["transformer.wte.weight"]) + params["transformer.wpe.weight"][:t]
    for i in range(config.n_layer):
        p = {k.removeprefix(f"transformer.h.{i}."): v for k, v in params.items() if f".h.{i}." in k}
        normed = F.layer_norm(x, x.shape[-1:], p["ln_1.weight"], p["ln_1.bias"], config.layer_norm_epsilon)
        qkv = F.linear(normed, p["attn.c_attn.weight"].T, p["attn.c_attn.bias"])
        q, k, v = qkv.split([n * dk, n * dk, n * dv], dim=-1)
        q, k, v = (z.unflatten(-1, (n, -1)).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=config.causal)
        x = x + F.linear(y.transpose(1, 2).flatten(2), p["attn.c_proj.weight"].T, p["attn.c_proj.bias"])
        normed = F.layer_norm(x, x.shape[-1:], p["ln_2.weight"], p["ln_2.bias"], config.layer_norm_epsilon)
        hidden = activation[config.activation_function](F.linear(normed, p["mlp.c_fc.weight"].T, p["mlp.c_fc.bias"]))
        x = x + F.linear(hidden, p["mlp.c_proj.weight"].T, p["mlp.c_proj.bias"])
    x = F.layer_norm(
        x, x.shape[-1:], params["transformer.ln_f.weight"], params["transformer.ln_f.bias"], config.layer_norm_epsilon
    )
    head = params["transformer.wte.weight"] if config.tie_word_embeddings else params["lm_head.weight"]
    return F.linear(x, head, params.get("lm_head.bias"))


def gpt2_loss_and_grads(
    params: dict[str, np.ndarray], config: GPT2Config, tokens: np.ndarray, targets: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss and every gradient, by autograd in float64."""
    leaves = {k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for k, v in params.items()}
    logits = gpt2_logits(leaves, config, torch.tensor(tokens))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {k: v.grad.numpy() for k, v in leaves.items()}


def scrambled(params: dict[str, np.ndarray], seed: int, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Parameters away from their initial values: norms not 1, biases not 0, nothing symmetric."""
    rng = np.random.default_rng(seed)
    return {
        k: rng.normal(1.0 if ".ln_" in k and k.endswith("weight") else 0.0, scale, np.shape(v))
        for k, v in params.items()
    }
