"""E20 to E27 against the oracle."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from errata import loss_and_embedding as literal
from errata.oracle import draw, outcome
from errata.registry import Line, erratum
from onfoot.check.layers.cross_entropy import one_hot
from onfoot.check.mistakes.embedding import table_gradient_by_assignment
from onfoot.models.inputs import next_token_targets
from onfoot.ops import (
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
)
from onfoot.ops.cross_entropy import IGNORE
from oracles import autograd, relative_error

N_VOCAB = 11
IDS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 10, 7]])  # repeats within a sequence and across


def logits_of(ids: np.ndarray) -> np.ndarray:
    return draw(20, (*ids.shape, N_VOCAB))[0]


def loss_gradient(logits: np.ndarray, targets: np.ndarray, reduction: str) -> np.ndarray:
    """The oracle's gradient of the logits."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        flat = torch.as_tensor(targets).flatten()
        return F.cross_entropy(x.flatten(0, 1), flat, reduction=reduction, ignore_index=IGNORE)

    return autograd(loss, [logits], 1.0)[0]


def right_gradient(logits: np.ndarray, targets: np.ndarray, divisor: float) -> np.ndarray:
    return cross_entropy_backward(1.0, cross_entropy_forward(logits, targets, divisor)[1])


@erratum("E20", "I", "§1, Table 2", "Δ_12 belongs to the sum of the losses")
def e20() -> list[Line]:
    logits, targets = logits_of(IDS), next_token_targets(IDS)
    uneven = targets.copy()
    uneven[0, :4] = IGNORE  # 2 targets in one sequence, 6 in the other
    mean, uneven_mean = loss_gradient(logits, targets, "mean"), loss_gradient(logits, uneven, "mean")
    right = relative_error(right_gradient(logits, targets, 12), mean)
    return [
        Line(
            "gradient of the mean: Δ_12 undivided",
            relative_error(literal.delta_of_the_sum(logits, targets), mean),
            right,
        ),
        Line(
            "gradient of the mean: divided by all 14 tokens, not by the 12 targets",
            relative_error(literal.delta_over_all_tokens(logits, targets), mean),
            right,
        ),
        Line(
            "sequences of 2 and 6 targets: the mean of the two means",
            relative_error(literal.delta_of_the_mean_of_means(logits, uneven), uneven_mean),
            relative_error(right_gradient(logits, uneven, 8), uneven_mean),
        ),
    ]


@erratum("E21", "W", "§1, Table 2", "n_T rows of Δ_12 for n_T − 1 targets")
def e21() -> list[Line]:
    logits, targets = logits_of(IDS), next_token_targets(IDS)
    reference = loss_gradient(logits, targets, "sum")
    right = relative_error(right_gradient(logits, targets, 1), reference)
    shifted = one_hot(IDS[:, 1:], N_VOCAB)
    return [
        Line("y_pred − y_gt, n_T rows and n_T − 1 rows", outcome(lambda: logits - shifted), str(reference.shape)),
        Line(
            "Δ_12, a zero row for the last token",
            relative_error(literal.delta_with_a_zero_row(logits, IDS), reference),
            right,
        ),
        Line("Δ_12, a cyclic shift", relative_error(literal.delta_with_a_roll(logits, IDS), reference), right),
    ]


@erratum("E22", "A", "§1, §2", "the target “t* + 1”, and ids from 1")
def e22() -> list[Line]:
    logits, targets = logits_of(IDS), next_token_targets(IDS)
    reference = loss_gradient(logits, targets, "sum")
    ids_from_one, table = np.array([1, N_VOCAB]), draw(22, (N_VOCAB, 4))[0]
    return [
        Line(
            "Δ_12, the id plus 1 as the target",
            relative_error(literal.delta_of_the_next_id(logits, IDS), reference),
            relative_error(right_gradient(logits, targets, 1), reference),
        ),
        Line(
            "ids 1 and n_vocab in a table whose rows count from 0",
            outcome(lambda: embedding_forward(ids_from_one, table)[0]),
            outcome(lambda: embedding_forward(ids_from_one - 1, table)[0]),
        ),
    ]


@erratum("E23", "T", "§1", "log of softmax")
def e23() -> list[Line]:
    logits, targets = 1000 * logits_of(IDS), IDS
    reference = F.cross_entropy(
        torch.as_tensor(logits).flatten(0, 1), torch.as_tensor(targets).flatten(), reduction="sum"
    ).item()
    with np.errstate(all="ignore"):
        plain = literal.loss_in_two_steps(logits, targets, shifted=False)
        shifted = literal.loss_in_two_steps(logits, targets, shifted=True)
    right = relative_error(cross_entropy_forward(logits, targets, 1)[0], reference)
    return [
        Line("loss at logits of about ±1000, exp as it stands", str(plain), right),
        Line("the same, maximum taken off, then log", str(shifted), right),
    ]


@erratum("E24", "T", "§2, eq 3", "repeated tokens lost by an indexed assignment")
def e24() -> list[Line]:
    (dy,) = draw(24, (*IDS.shape, 4))
    table = np.zeros((N_VOCAB, 4))
    reference = autograd(lambda w: F.embedding(torch.as_tensor(IDS), w), [table], dy)[0]
    return [
        Line(
            "∂w_tok",
            relative_error(table_gradient_by_assignment(IDS, dy, N_VOCAB), reference),
            relative_error(embedding_backward(dy, embedding_forward(IDS, table)[1]), reference),
        )
    ]


@erratum("E26", "I", "Table 3", "the position table in a batch")
def e26() -> list[Line]:
    d1, table = draw(26, (3, 7, 4), (9, 4))
    positions = np.arange(7)

    def output(w: torch.Tensor) -> torch.Tensor:
        return w[torch.as_tensor(positions)].expand(3, 7, 4)

    reference = autograd(output, [table], d1)[0]
    right = embedding_backward(d1.sum(axis=0), embedding_forward(positions, table)[1])
    return [
        Line(
            "shape of oheᵗΔ_1 for 3 sequences, n_context = 9, d = 4",
            outcome(lambda: literal.position_gradient_as_printed(d1, 9)),
            outcome(lambda: right),
        ),
        Line(
            "∂w_pos of one sequence alone",
            relative_error(literal.position_gradient_of_one_sequence(d1, 9), reference),
            relative_error(right, reference),
        ),
    ]


@erratum("E27", "I", "§7, Table 3", "tied weights have two gradients")
def e27() -> list[Line]:
    table, weight, bias = draw(27, (N_VOCAB, 4), (4,), (4,))
    targets = next_token_targets(IDS)

    def loss(w: torch.Tensor) -> torch.Tensor:
        a11 = F.layer_norm(w[torch.as_tensor(IDS)], (4,), torch.as_tensor(weight), torch.as_tensor(bias))
        flat = torch.as_tensor(targets).flatten()
        return F.cross_entropy((a11 @ w.T).flatten(0, 1), flat, reduction="sum", ignore_index=IGNORE)

    reference = autograd(loss, [table], 1.0)[0]
    a1, s_embedding = embedding_forward(IDS, table)
    a11, s_norm = layer_norm_forward(a1, weight, bias)
    a12, s_logits = linear_forward(a11, table.T)
    d12 = cross_entropy_backward(1.0, cross_entropy_forward(a12, targets, 1)[1])
    d11, dhead, _ = linear_backward(d12, s_logits)
    d1 = layer_norm_backward(d11, s_norm)[0]
    right = relative_error(embedding_backward(d1, s_embedding) + dhead.T, reference)
    paths = (IDS, d1, a11, d12)
    return [
        Line("∂w_tok, oheᵗΔ_1 alone", relative_error(literal.tied_gradient_of_the_embedding(*paths), reference), right),
        Line(
            "∂w_tok, (a_11ᵗΔ_12)ᵗ alone", relative_error(literal.tied_gradient_of_the_logits(*paths), reference), right
        ),
    ]
