"""E41 to E43 against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from errata import note_on_qk as literal
from errata.oracle import attention_data, attention_gradients, draw, outcome
from errata.registry import Line, erratum
from onfoot.check.mistakes.attention import key_gradient_by_printed_jacobian
from onfoot.ops import attention_backward, attention_forward
from oracles import autograd, relative_error


def query_and_key_lines(formula: Callable[..., tuple[np.ndarray, ...]]) -> list[Line]:
    q, k, v, dout = attention_data()
    reference = attention_gradients(q, k, v, dout, causal=False)
    right = attention_backward(dout, attention_forward(q, k, v, causal=False)[1])
    computed = zip(("dQ", "dK"), formula(q, k, v, dout), right, reference, strict=False)
    return [Line(name, relative_error(printed, ref), relative_error(r, ref)) for name, printed, r, ref in computed]


@erratum("E41", "W", "the note on QKᵗ", "dL/dA used for dL/dZ")
def e41() -> list[Line]:
    return query_and_key_lines(literal.through_weights_not_scores)


@erratum("E42", "W", "the note on QKᵗ", "1/√d_k is missing")
def e42() -> list[Line]:
    return query_and_key_lines(literal.without_scale)


@erratum("E43", "A", "the note on QKᵗ", "“∂Z/∂K = Qᵗ” is no Jacobian")
def e43() -> list[Line]:
    q, k, dz = draw(43, (5, 5), (5, 5), (5, 5))
    reference = autograd(lambda k: torch.as_tensor(q) @ k.T, [k], dz)[0]
    narrow_q, narrow_k = (torch.as_tensor(x) for x in draw(44, (5, 3), (5, 3)))
    jacobian = torch.autograd.functional.jacobian(lambda k: narrow_q @ k.T, narrow_k)
    return [
        Line("shape of ∂Z/∂K, n = 5, d_k = 3", outcome(lambda: narrow_q.numpy().T), outcome(lambda: jacobian.numpy())),
        Line(
            "dZ · ∂Z/∂K, n = 5, d_k = 3",
            outcome(lambda: dz @ narrow_q.numpy().T),
            outcome(lambda: dz.T @ narrow_q.numpy()),
        ),
        Line(
            "dK = dZ Qᵗ, n = d_k = 5",
            relative_error(key_gradient_by_printed_jacobian(dz, q), reference),
            relative_error(literal.key_gradient(dz, q), reference),
        ),
    ]
