"""The formulas: every layer is a pair of pure functions.

`y, saved = layer_norm_forward(x, weight, bias, eps)` and `dx, dweight, dbias = layer_norm_backward(dy, saved)`.

Each runs on NumPy arrays and on PyTorch tensors. A line that implements an equation has its id; the ids are explained
in `docs/equations/`.
"""

from onfoot.ops.activation import (
    gelu_erf_backward,
    gelu_erf_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    relu_backward,
    relu_forward,
)
from onfoot.ops.attention import attention_backward, attention_forward
from onfoot.ops.attention_head import (
    Head,
    head_backward,
    head_forward,
    heads_backward,
    heads_forward,
)
from onfoot.ops.batch_norm import batch_norm_backward, batch_norm_forward
from onfoot.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
from onfoot.ops.dropout import dropout_backward, dropout_forward
from onfoot.ops.embedding import embedding_backward, embedding_forward, embedding_input_gradient
from onfoot.ops.grouped_query import grouped_query_backward, grouped_query_forward
from onfoot.ops.layer_norm import layer_norm_backward, layer_norm_forward
from onfoot.ops.linear import (
    frozen_linear_backward,
    frozen_linear_forward,
    linear_backward,
    linear_forward,
    weight_gradient,
)
from onfoot.ops.lora import lora_backward, lora_forward, lora_linear_backward, lora_linear_forward
from onfoot.ops.multi_head import multi_head_backward, multi_head_forward
from onfoot.ops.noise import add_noise
from onfoot.ops.rms_norm import rms_norm_backward, rms_norm_forward
from onfoot.ops.rope import rope_backward, rope_forward
from onfoot.ops.swiglu import swiglu_backward, swiglu_forward
from onfoot.ops.update import adamw_update, adamw_updates, add, sum_first, sum_of_squares

__all__ = [
    "Head",
    "adamw_update",
    "adamw_updates",
    "add",
    "add_noise",
    "attention_backward",
    "attention_forward",
    "batch_norm_backward",
    "batch_norm_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "dropout_backward",
    "dropout_forward",
    "embedding_backward",
    "embedding_forward",
    "embedding_input_gradient",
    "frozen_linear_backward",
    "frozen_linear_forward",
    "gelu_erf_backward",
    "gelu_erf_forward",
    "gelu_tanh_backward",
    "gelu_tanh_forward",
    "grouped_query_backward",
    "grouped_query_forward",
    "head_backward",
    "head_forward",
    "heads_backward",
    "heads_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "linear_backward",
    "linear_forward",
    "lora_backward",
    "lora_forward",
    "lora_linear_backward",
    "lora_linear_forward",
    "multi_head_backward",
    "multi_head_forward",
    "relu_backward",
    "relu_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "rope_backward",
    "rope_forward",
    "sum_first",
    "sum_of_squares",
    "swiglu_backward",
    "swiglu_forward",
    "weight_gradient",
]
