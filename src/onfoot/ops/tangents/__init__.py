"""The tangents of the formulas: derivatives of forward and backward along a direction of their inputs.

Beside its pair, `op_forward` and `op_backward`, an op has two functions: `y_dot, saved_dot = op_tangent(x_dot, ...,
saved)` and `dx_dot, ... = op_backward_tangent(dy, dy_dot, saved, saved_dot)`. `saved_dot` holds the tangents of what
`saved` holds, in the same fields. A parameter that does not move has the tangent None.
"""

from onfoot.ops.tangents.activation import (
    gelu_erf_backward_tangent,
    gelu_erf_tangent,
    gelu_tanh_backward_tangent,
    gelu_tanh_tangent,
    relu_backward_tangent,
    relu_tangent,
)
from onfoot.ops.tangents.attention import (
    attention_backward_tangent,
    attention_tangent,
    softmax_backward_tangent,
    softmax_tangent,
)
from onfoot.ops.tangents.attention_head import (
    head_backward_tangent,
    head_tangent,
    heads_backward_tangent,
    heads_tangent,
)
from onfoot.ops.tangents.batch_norm import batch_norm_backward_tangent, batch_norm_tangent
from onfoot.ops.tangents.cross_entropy import cross_entropy_backward_tangent, cross_entropy_tangent, token_tangents
from onfoot.ops.tangents.dropout import dropout_backward_tangent, dropout_tangent
from onfoot.ops.tangents.embedding import embedding_backward_tangent, embedding_tangent
from onfoot.ops.tangents.grouped_query import grouped_query_backward_tangent, grouped_query_tangent
from onfoot.ops.tangents.layer_norm import layer_norm_backward_tangent, layer_norm_tangent
from onfoot.ops.tangents.linear import (
    frozen_linear_backward_tangent,
    frozen_linear_tangent,
    linear_backward_tangent,
    linear_tangent,
)
from onfoot.ops.tangents.lora import (
    lora_backward_tangent,
    lora_linear_backward_tangent,
    lora_linear_tangent,
    lora_tangent,
)
from onfoot.ops.tangents.multi_head import multi_head_backward_tangent, multi_head_tangent
from onfoot.ops.tangents.rms_norm import rms_norm_backward_tangent, rms_norm_tangent
from onfoot.ops.tangents.rope import rope_backward_tangent, rope_tangent
from onfoot.ops.tangents.swiglu import swiglu_backward_tangent, swiglu_tangent

__all__ = [
    "attention_backward_tangent",
    "attention_tangent",
    "batch_norm_backward_tangent",
    "batch_norm_tangent",
    "cross_entropy_backward_tangent",
    "cross_entropy_tangent",
    "dropout_backward_tangent",
    "dropout_tangent",
    "embedding_backward_tangent",
    "embedding_tangent",
    "frozen_linear_backward_tangent",
    "frozen_linear_tangent",
    "gelu_erf_backward_tangent",
    "gelu_erf_tangent",
    "gelu_tanh_backward_tangent",
    "gelu_tanh_tangent",
    "grouped_query_backward_tangent",
    "grouped_query_tangent",
    "head_backward_tangent",
    "head_tangent",
    "heads_backward_tangent",
    "heads_tangent",
    "layer_norm_backward_tangent",
    "layer_norm_tangent",
    "linear_backward_tangent",
    "linear_tangent",
    "lora_backward_tangent",
    "lora_linear_backward_tangent",
    "lora_linear_tangent",
    "lora_tangent",
    "multi_head_backward_tangent",
    "multi_head_tangent",
    "relu_backward_tangent",
    "relu_tangent",
    "rms_norm_backward_tangent",
    "rms_norm_tangent",
    "rope_backward_tangent",
    "rope_tangent",
    "softmax_backward_tangent",
    "softmax_tangent",
    "swiglu_backward_tangent",
    "swiglu_tangent",
    "token_tangents",
]
