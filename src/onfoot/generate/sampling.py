"""Sampling strategies: from one row of logits to one token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """The sampling strategy. A temperature of 0 always picks the most likely token (greedy decoding)."""

    temperature: float = 1.0
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the most likely tokens whose total probability reaches p
    min_p: float | None = None  # keep tokens at least min_p times as likely as the most likely
    repetition_penalty: float = 1.0  # values above 1 make tokens seen before less likely

    def __post_init__(self) -> None:
        def refuse(name: str, limit: str) -> None:
            raise ValueError(f"{name} must be {limit}, got {getattr(self, name)!r}")

        if not self.temperature >= 0:
            refuse("temperature", ">= 0 (0 always picks the most likely token)")
        if self.top_k is not None and self.top_k < 1:
            refuse("top_k", ">= 1 or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            refuse("top_p", "in (0, 1] or None")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            refuse("min_p", "in [0, 1] or None")
        if not self.repetition_penalty > 0:
            refuse("repetition_penalty", "> 0 (1 means no penalty)")


def penalise(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """The logits, with those of seen tokens divided by the penalty if positive, multiplied by it if negative."""
    out = logits.copy()
    ids = np.unique(seen)
    out[ids] = np.where(out[ids] > 0, out[ids] / penalty, out[ids] * penalty)
    return out


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The sampling distribution, (V,), after temperature, top-k, top-p and min-p, in this order."""
    with np.errstate(over="ignore"):  # the maximum is 0; an overflow to −inf is harmless
        scores = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.size:
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        scores = np.where(scores < threshold, -np.inf, scores)
    p = _softmax(scores)
    if sampling.top_p is not None and sampling.top_p < 1:
        order = _most_likely(p, sampling.top_p)
        p[p < p[order[-1]]] = 0
        before = np.cumsum(p[order]) - p[order]  # the total probability of all more likely tokens
        p[order[before >= sampling.top_p]] = 0
    if sampling.min_p is not None:
        p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def next_token(logits: np.ndarray, seen: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """A token sampled from one row of logits (V,); `seen` are the tokens before it."""
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or training diverged")
    if sampling.repetition_penalty != 1:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    p = probabilities(logits, sampling)
    return int(min(np.searchsorted(np.cumsum(p), rng.random(), side="right"), np.flatnonzero(p)[-1]))


def _most_likely(p: np.ndarray, total: float) -> np.ndarray:
    """The most likely tokens in descending order, as many as surely have this total probability.

    Usually they are few, and sorting the rest of a large vocabulary would take longer than a step of a small model.
    """
    for n in (256, 4096):
        if n < p.size:
            some = np.flatnonzero(p >= np.partition(p, -n)[-n])
            if p[some].sum() > total + 1e-6:
                return some[np.argsort(-p[some], kind="stable")]
    return np.argsort(-p, kind="stable")


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
