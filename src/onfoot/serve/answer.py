"""The text of one answer while it is generated: decoded tokens, stop strings and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onfoot.formats.tokenizer import Tokenizer
from onfoot.generate.decode import StreamDecoder
from onfoot.generate.stop import StopStrings


class TokenLogprob(NamedTuple):
    """A token's log-probability, those of the most likely tokens, and where the token's text begins."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int


@dataclass
class Piece:
    """The next part of an answer; the last one has a finish reason."""

    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", or "error"
    error: str = ""  # what went wrong
    n_tokens: int = 0  # of the answer so far
    n_reused: int = 0  # tokens of the prompt that were not computed again


class Answer:
    """Turns sampled tokens into pieces of text, until a stop condition is met."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self._max_new_tokens, self._stop_ids, self._top = max_new_tokens, stop_ids, top_logprobs
        self._decoder, self._stop = StreamDecoder(tokenizer), StopStrings(stop)
        self._decoded = self._shown = 0  # characters
        self._waiting: list[TokenLogprob] = []  # whose text is held back

    def add(self, token: int, logits: np.ndarray) -> Piece:
        """The piece that this token completes, which may be empty; `logits` (V,) are those it was sampled from."""
        self.tokens.append(token)
        if token in self._stop_ids:
            return self._finish("", "stop")
        if self._top is not None:
            self._waiting.append(token_logprob(token, logits, self._top, self._decoded))
        text = self._decoder.add(token)
        self._decoded += len(text)
        shown, stopped = self._stop.add(text)
        if stopped:
            self._shown += len(shown)
            return Piece(shown, self._known(), "stop", n_tokens=len(self.tokens))
        if len(self.tokens) == self._max_new_tokens:
            return self._finish(shown, "length")
        self._shown += len(shown)
        return Piece(shown, self._known(), n_tokens=len(self.tokens))

    def _finish(self, shown: str, reason: str) -> Piece:
        rest, stopped = self._stop.add(self._decoder.finish())
        text = shown + rest + ("" if stopped else self._stop.finish())
        self._shown += len(text)
        entries = self._known() if stopped else self._waiting
        return Piece(text, entries, "stop" if stopped else reason, n_tokens=len(self.tokens))

    def _known(self) -> list[TokenLogprob]:
        """The entries of the tokens whose text begins before the end of what is shown."""
        known = [entry for entry in self._waiting if entry.offset < self._shown]
        self._waiting = self._waiting[len(known) :]
        return known


def token_logprob(token: int, logits: np.ndarray, top: int, offset: int) -> TokenLogprob:
    """log softmax of the logits at a token, and at the most likely ones."""
    scores = logits.astype(np.float64) - logits.max()
    scores -= np.log(np.exp(scores).sum())
    best = np.argpartition(-scores, min(top, scores.size - 1))[:top]
    best = best[np.argsort(-scores[best], kind="stable")]
    return TokenLogprob(token, float(scores[token]), [(int(i), float(scores[i])) for i in best], offset)
