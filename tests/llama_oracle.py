"""transformers' own LLaMA, Mistral, Qwen2 and Qwen3 as an oracle, in float32 as they are and in a true float64.

Their modelling files raise parts to float32 by name (the norms, the angles, the softmax), which rounds a float64 model.
`in_float64` reads every such float32 as float64, and leaves the code otherwise as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

import onfoot
from onfoot.models.model import Model

DOUBLE = {"float32": torch.float64, "float": torch.float64}


class _Doubled:
    """The module torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return DOUBLE.get(name) or getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    with ExitStack() as patches:
        for module in (modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_rope_utils):
            patches.enter_context(mock.patch.object(module, "torch", _Doubled()))
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        patches.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)  # dynamic RoPE multiplies an integer tensor by a Python float
        yield


def in_transformers(model: Model, folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The model as transformers loads it from the folder that it was saved in."""
    model.save(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def loss_and_grads(theirs: Any, tokens: np.ndarray, targets: np.ndarray) -> tuple[Any, float, dict[str, np.ndarray]]:
    """Logits, mean loss and gradients by autograd."""
    logits = theirs(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-100)
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), loss.item(), grads


def scrambled_llama(config: onfoot.LlamaConfig, seed: int, dtype: str = "float64", engine: str = "auto") -> Model:
    """A model away from its initial values: norms not 1, biases not 0."""
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.3, value.shape)
        for name, value in onfoot.create(config).params.items()
    }
    return Model(config, params, dtype, engine)


def random_config(seed: int, ratio: int, tied: bool, kind: str, **changes: Any) -> onfoot.LlamaConfig:
    """A small configuration with odd sizes."""
    rng = np.random.default_rng(seed)
    n_kv = int(rng.integers(1, 4))
    width = int(rng.integers(1, 4)) * 2
    heads = n_kv * ratio
    return onfoot.LlamaConfig(
        **{
            "vocab_size": int(rng.integers(5, 29)),
            "hidden_size": heads * width,
            "intermediate_size": int(rng.integers(3, 23)),
            "num_hidden_layers": int(rng.integers(1, 4)),
            "num_attention_heads": heads,
            "num_key_value_heads": n_kv,
            "max_position_embeddings": 32,
            "rms_norm_eps": float(rng.choice([1e-6, 1e-2])),
            "rope_theta": float(rng.choice([10.0, 10000.0])),
            "tie_word_embeddings": tied,
            "model_type": kind,
            **changes,
        }
    )


def batch(config: onfoot.LlamaConfig, seed: int, b: int = 2, t: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, some of them −100."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, config.vocab_size, (2, b, t))
    targets[rng.random((b, t)) < 0.3] = -100
    targets[0, 0] = 0
    return tokens, targets
