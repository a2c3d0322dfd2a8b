"""The formulas inside PyTorch models: every pair as a function that autograd can differentiate.

    import onfoot.torch

    y = onfoot.torch.attention(q, k, v, causal=True)
    y.sum().backward()  # q.grad, k.grad and v.grad come from onfoot.ops.attention_backward

Arguments are those of the pairs in `onfoot.ops`: weights are (in, out), leading axes are free. First derivatives only.
With fewer queries than keys, causal masks align the last query with the last key; PyTorch's `is_causal=True` aligns
the first with the first.
"""

from __future__ import annotations

try:
    import torch
except ImportError as error:
    raise ImportError('onfoot.torch needs PyTorch: pip install "onfoot[torch]"') from error

from onfoot import ops
from onfoot.ops import Head
from onfoot.ops.cross_entropy import IGNORE
from onfoot.ops.dpo import dpo_loss_backward, dpo_loss_forward
from onfoot.torch.function import Tensor, differentiable

attention = differentiable(ops.attention_forward, ops.attention_backward, wrt=["q", "k", "v"])
batch_norm = differentiable(ops.batch_norm_forward, ops.batch_norm_backward, wrt=["x", "weight", "bias"])
dpo_loss = differentiable(dpo_loss_forward, dpo_loss_backward, wrt=["chosen", "rejected"])
dropout = differentiable(ops.dropout_forward, ops.dropout_backward, wrt=["x"])
gelu_erf = differentiable(ops.gelu_erf_forward, ops.gelu_erf_backward, wrt=["x"])
gelu_tanh = differentiable(ops.gelu_tanh_forward, ops.gelu_tanh_backward, wrt=["x"])
grouped_query = differentiable(ops.grouped_query_forward, ops.grouped_query_backward, wrt=["q", "k", "v"])
head = differentiable(ops.head_forward, ops.head_backward, wrt=["a", "head"])
heads = differentiable(ops.heads_forward, ops.heads_backward, wrt=["a", "heads"])
layer_norm = differentiable(ops.layer_norm_forward, ops.layer_norm_backward, wrt=["x", "weight", "bias"])
lora = differentiable(ops.lora_forward, ops.lora_backward, wrt=["x", "down", "up"])
lora_linear = differentiable(ops.lora_linear_forward, ops.lora_linear_backward, wrt=["x", "down", "up"])
multi_head = differentiable(
    ops.multi_head_forward,
    ops.multi_head_backward,
    wrt=["query", "key", "value", "w_q", "b_q", "w_k", "b_k", "w_v", "b_v"],
)
relu = differentiable(ops.relu_forward, ops.relu_backward, wrt=["x"])
rms_norm = differentiable(ops.rms_norm_forward, ops.rms_norm_backward, wrt=["x", "weight"])
rope = differentiable(ops.rope_forward, ops.rope_backward, wrt=["x"])
swiglu = differentiable(ops.swiglu_forward, ops.swiglu_backward, wrt=["gate", "up"])

_cross_entropy = differentiable(ops.cross_entropy_forward, ops.cross_entropy_backward, wrt=["logits"])
_embedding = differentiable(ops.embedding_forward, ops.embedding_backward, wrt=["weight"])
_frozen_linear = differentiable(ops.frozen_linear_forward, ops.frozen_linear_backward, wrt=["x"])
_linear = differentiable(ops.linear_forward, ops.linear_backward, wrt=["x", "weight", "bias"])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x w + b, weight (in, out). If neither weight nor bias requires a gradient, x is not kept."""
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    return (_linear if trains else _frozen_linear)(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """The row of `weight` for each id."""
    _check_ids(ids, weight.shape[0], "id")
    return _embedding(ids, weight)


def cross_entropy(logits: Tensor, targets: Tensor, divisor: float | None = None) -> Tensor:
    """The cross-entropy of logits (..., V) and targets (...): the mean over targets that are not −100.

    With a `divisor`, their sum divided by it: the number of targets of a whole step that is split into microbatches.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets must have shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    counting = targets[targets != IGNORE]
    _check_ids(counting, logits.shape[-1], "target")
    if divisor is None:
        if counting.numel() == 0:
            raise ValueError(f"all {targets.numel()} targets are {IGNORE} (ignored); their mean is undefined")
        divisor = counting.numel()
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # a sum over the vocabulary; under autocast, PyTorch's loss uses float32 too
    return _cross_entropy(logits, targets, divisor)


def _check_ids(ids: Tensor, n: int, what: str) -> None:
    """Raises an error for what indexing would silently accept: a mask of bytes, and −1 for the last row."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{what}s must be int32 or int64, got {ids.dtype}")
    if ids.numel() and (ids.min() < 0 or ids.max() >= n):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{what} {int(bad)} is outside 0 ... {n - 1}")


__all__ = [
    "Head",
    "attention",
    "batch_norm",
    "cross_entropy",
    "dpo_loss",
    "dropout",
    "embedding",
    "gelu_erf",
    "gelu_tanh",
    "grouped_query",
    "head",
    "heads",
    "layer_norm",
    "linear",
    "lora",
    "lora_linear",
    "multi_head",
    "relu",
    "rms_norm",
    "rope",
    "swiglu",
]
