"""Sampling strategies: from one row of logits to one token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 takes the likeliest token, always."""

    temperature: float = 1.0
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens that together reach probability p
    min_p: float | None = None  # only tokens at least min_p times as likely as the likeliest
    repetition_penalty: float = 1.0  # above 1, tokens that were seen before get less likely

    def __post_init__(self) -> None:
        def refuse(name: str, limit: str) -> None:
            raise ValueError(f"{name}={getattr(self, name)!r}: {limit}")

        if not self.temperature >= 0:
            refuse("temperature", "0 (always the likeliest token) or above")
        if self.top_k is not None and self.top_k < 1:
            refuse("top_k", "at least 1, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            refuse("top_p", "above 0 and at most 1, or none")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            refuse("min_p", "between 0 and 1, or none")
        if not self.repetition_penalty > 0:
            refuse("repetition_penalty", "above 0; 1 changes nothing")


def penalise(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """Divides the positive logits of tokens seen before by the penalty, and multiplies the negative ones."""
    out = logits.copy()
    ids = np.unique(seen)
    out[ids] = np.where(out[ids] > 0, out[ids] / penalty, out[ids] * penalty)
    return out


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that is sampled from, (V,), after temperature, top-k, top-p and min-p, in this order."""
    with np.errstate(over="ignore"):  # the likeliest is at 0; far below it −inf is as good as any number
        scores = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.size:
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        scores = np.where(scores < threshold, -np.inf, scores)
    p = _softmax(scores)
    if sampling.top_p is not None and sampling.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]  # the probability of all likelier tokens
        p[order[before >= sampling.top_p]] = 0
    if sampling.min_p is not None:
        p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def next_token(logits: np.ndarray, seen: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """One token for one row of logits (V,), given the tokens before it."""
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or its training diverged")
    if sampling.repetition_penalty != 1:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    p = probabilities(logits, sampling)
    return int(min(np.searchsorted(np.cumsum(p), rng.random(), side="right"), np.flatnonzero(p)[-1]))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
