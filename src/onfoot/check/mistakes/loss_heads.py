"""Known mistakes in the head of a language model with its loss, and in DPO."""

from __future__ import annotations

from collections.abc import Callable

from onfoot.check.layer import Array, Mistake, Piece

Apply = Callable[..., dict[str, Piece]]


def softmax_backward_again(divided: Array, y_pred: Array) -> Array:
    """y_pred − y_gt passed through softmax's gradient once more."""
    return (divided - (divided * y_pred).sum(axis=-1, keepdims=True)) * y_pred


def _again(layer: str) -> Mistake:
    return Mistake(
        "the gradient of softmax applied twice",
        layer,
        "y_pred − y_gt is the gradient of the logits already; it was passed through the gradient of softmax again.",
        "CE.2",
        "the gradient of the logits is (y_pred − y_gt)/number of targets",
        lambda p: {"dlogits": softmax_backward_again},
    )


HEAD = (
    _again("loss_head"),
    Mistake(
        "dx not divided by the number of targets",
        "loss_head",
        "dweight and dbias are those of the mean loss, dx is that of the sum.",
        "CE.2",
        "divide y_pred − y_gt by the number of targets once, before all three products",
        lambda p: {"for_dx": lambda dlogits, undivided: undivided},
    ),
    Mistake(
        "dweight and dbias not divided by the number of targets",
        "loss_head",
        "dx is that of the mean loss, dweight and dbias are those of the sum.",
        "CE.2",
        "divide y_pred − y_gt by the number of targets once, before all three products",
        lambda p: {"for_parameters": lambda dlogits, undivided: undivided},
    ),
)

TIED = (
    _again("tied_head"),
    Mistake(
        "the layer norm left out of the backward pass",
        "tied_head",
        "The gradient of the norm's output is added to the table; it must pass through the layer norm first.",
        "40",
        "add the layer norm's dx to the rows of the table",
        lambda p: {"below_norm": lambda dx, dfeatures: dfeatures},
    ),
    Mistake(
        "the embedding in place of the norm's output in the logits' path",
        "tied_head",
        "dlogitsᵗ weight[ids]: the input of the logits is the layer norm's output.",
        "TIE.1",
        "dweight = (rows added at ids) + dlogitsᵗ (the layer norm's output)",
        lambda p: {"head_input": lambda features, embedded: embedded},
    ),
    Mistake(
        "the embedding's rows added at the targets",
        "tied_head",
        "The gradient of the embedding is added to the rows of the targets; it belongs to those of the ids.",
        "3",
        "np.add.at(dweight, ids, …)",
        lambda p: {"rows_of": lambda ids, targets: targets},
    ),
    Mistake(
        "the logits' path subtracted",
        "tied_head",
        "The two uses of the table have opposite signs.",
        "TIE.1",
        "dweight is the sum of both uses",
        lambda p: {"both_paths": lambda embedding, logits: embedding - logits},
    ),
)


def _dpo(name: str, explains: str, equation: str, fix: str, apply: Apply) -> Mistake:
    return Mistake(name, "dpo", explains, equation, fix, apply)


WEIGHT = "dchosen = −w, drejected = w with w = beta σ(−m) dout/number of pairs"


DPO = (
    _dpo(
        "the reference ignored",
        "m = beta (chosen − rejected): the margin is how much more the policy prefers the answer than the reference.",
        "DPO.1",
        "m = beta [(chosen − ref_chosen) − (rejected − ref_rejected)]",
        lambda p: {
            "gain_chosen": lambda chosen, ref_chosen: chosen,
            "gain_rejected": lambda rejected, ref_rejected: rejected,
        },
    ),
    _dpo(
        "σ(m) in place of σ(−m)",
        "Pairs that are learned already push the most.",
        "DPO.3",
        WEIGHT,
        lambda p: {"push": lambda margin: p.push(-margin)},
    ),
    _dpo(
        "σ missing from the weight",
        "Every pair pushes equally: the derivative of −log σ(m) is −σ(−m), not −1.",
        "DPO.3",
        WEIGHT,
        lambda p: {"push": lambda margin: 0 * margin + 1.0},
    ),
    _dpo(
        "beta missing from the gradient",
        "The margin is beta times a difference, so its derivative has the factor beta.",
        "DPO.4",
        WEIGHT,
        lambda p: {"weight": lambda push, beta, dloss, n: push * (dloss / n)},
    ),
    _dpo(
        "beta missing from the margin",
        "σ is evaluated at the difference itself; the gradient does have the factor beta.",
        "DPO.1",
        "m = beta [(chosen − ref_chosen) − (rejected − ref_rejected)]",
        lambda p: {"margin": lambda gain_chosen, gain_rejected, beta: gain_chosen - gain_rejected},
    ),
    _dpo(
        "the gradient of log σ(m)",
        "The loss is −log σ(m): both signs are reversed, and training prefers the rejected answers.",
        "DPO.4",
        WEIGHT,
        lambda p: {"dchosen": lambda weight: 1.0 * weight, "drejected": lambda weight: -weight},
    ),
    _dpo(
        "both answers pushed the same way",
        "drejected has the sign of dchosen; the rejected answer is in the margin with a minus.",
        "DPO.4",
        WEIGHT,
        lambda p: {"drejected": lambda weight: -weight},
    ),
    _dpo(
        "a mean loss whose gradient is not divided",
        "The gradient is that of the sum over the pairs.",
        "DPO.4",
        WEIGHT,
        lambda p: {"pairs": lambda margin: 1},
    ),
)

MISTAKES = (*HEAD, *TIED, *DPO)
