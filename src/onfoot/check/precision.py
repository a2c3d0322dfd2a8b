"""Gradients that are right but for lost digits: a step in half precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.layer import Array

NEAR = 2e-2  # relative distance below which digits were lost
BITS = {"float16": 11, "bfloat16": 8}  # of the significand


def lost_digits(evidence: Evidence, g: int) -> str:
    """What is said of a gradient that was rounded to fewer digits in every case; empty if it was not."""
    errors, seen = [], []
    for i, answers in enumerate(evidence.answers):
        right, answer = evidence.run(Candidate(), i), answers[g]
        if right is None or right[g].shape != answer.shape or not np.isfinite(answer).all():
            return ""
        if evidence.informative(i, g):
            errors.append(evidence.difference(Candidate(), i, g) / evidence.norms[i][g])
            seen.append(answer)
    if not errors or max(errors) > NEAR:
        return ""
    name = evidence.layer.gradients[g]
    for dtype in ("bfloat16", "float16"):
        if all(np.array_equal(x, _rounded(x, BITS[dtype])) for x in seen):
            return f"{name} is right up to rounding to {dtype}: all its entries are {dtype} numbers"
    return ""


def _rounded(x: Array, bits: int) -> Array:
    """x with so many bits of significand."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


def all_lost_digits(evidence: Evidence, gradients: Sequence[int]) -> dict[int, str]:
    """What is said of each of the gradients whose digits were lost."""
    said = {g: lost_digits(evidence, g) for g in gradients}
    return {g: words for g, words in said.items() if words}
