"""The DPO loss of pairs of answers, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops.dpo import dpo_loss_backward, dpo_loss_forward, sigmoid

PIECES = Pieces(
    gain_chosen=lambda chosen, ref_chosen: chosen - ref_chosen,
    gain_rejected=lambda rejected, ref_rejected: rejected - ref_rejected,
    margin=lambda gain_chosen, gain_rejected, beta: beta * (gain_chosen - gain_rejected),
    push=lambda margin: sigmoid(-margin),
    pairs=lambda margin: margin.shape[0],
    weight=lambda push, beta, dloss, n: push * (beta * dloss / n),
    dchosen=lambda weight: -weight,
    drejected=lambda weight: weight,
)


def steps(
    p: Pieces, chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, dout: float, beta: float = 0.1
) -> Gradients:
    margin = p.margin(p.gain_chosen(chosen, ref_chosen), p.gain_rejected(rejected, ref_rejected), beta)  # (pairs,)
    weight = p.weight(p.push(margin), beta, dout, p.pairs(margin))
    return p.dchosen(weight), p.drejected(weight)


def reference(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, dout: float, beta: float = 0.1
) -> Gradients:
    saved = dpo_loss_forward(chosen, rejected, ref_chosen, ref_rejected, beta, 0.0, float(len(chosen)))[1]
    return dpo_loss_backward(dout, saved)


def cases(rng: np.random.Generator, beta: float = 0.1, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, n: int, gain: float = 1.0, exact: bool = False) -> Case | None:
        fitted = sizes.fit(name, exact, batch=n)
        if fitted is None:
            return None
        (n,) = fitted
        ref_chosen, ref_rejected = -20 * rng.random(n) - 5, -20 * rng.random(n) - 5
        chosen, rejected = (ref + gain * rng.standard_normal(n) / beta for ref in (ref_chosen, ref_rejected))
        upstream = float(rng.uniform(0.4, 0.9))
        return Case(name, (chosen, rejected, ref_chosen, ref_rejected, upstream), {"N": n})

    n, other = distinct(rng, 2, 4, 12)
    found = [
        case("odd sizes", n),
        case("other sizes", other, gain=2.0),
        case("two pairs", 2, exact=True),
        case("one pair", 1, exact=True),
        case("the start: the policy is the reference", n + 12, gain=0.0),
        case("margins of either sign", n + 13, gain=8.0),
    ]
    return kept(found)


DPO = Layer(
    name="dpo",
    arguments=("chosen", "rejected", "ref_chosen", "ref_rejected", "dout"),
    gradients=("dchosen", "drejected"),
    contract=(
        "out = −log σ(beta [(chosen − ref_chosen) − (rejected − ref_rejected)]), the mean over all pairs; beta = 0.1",
        "chosen, rejected, ref_chosen, ref_rejected (pairs): log-probabilities of whole answers by the policy and by "
        "the reference, which is constant; dout a number, 1 if left out",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"beta": 0.1},
    sizes=("batch",),
    upstream_optional=True,
)
