"""How well a model predicts a text: loss, perplexity and bits per byte over sliding windows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.ops.cross_entropy import IGNORE
from onfoot.terminal import Shown

if TYPE_CHECKING:
    from onfoot.data.sliding import Piece
    from onfoot.models.model import Model

CONTEXT = 1024  # tokens per window by default, unless the model allows fewer


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """The loss of a model on a data file."""

    loss: float  # nats per token: the mean over all targets
    n_tokens: int  # targets
    n_bytes: int  # of the targets' text in UTF-8
    context: int  # tokens per window
    stride: int
    tokens_sha256: str  # of all token ids and their targets: equal where losses per token can be compared

    def facts(self) -> dict[str, str]:
        """The figures as text, for a notebook."""
        bits = self.bits_per_byte
        return {
            "loss": f"{self.loss:.6g} nats per token",
            "perplexity": f"{self.perplexity:.6g}",
            "bits per byte": "unknown" if bits is None else f"{bits:.4g}",
            "targets": f"{self.n_tokens:,}",
            "context": f"{self.context}, stride {self.stride}",
        }

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite beyond the largest float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The whole loss in bits, divided by the bytes of the text; does not depend on the tokenizer."""
        return self.loss * self.n_tokens / math.log(2) / self.n_bytes if self.n_bytes else None


def evaluate(
    model: Model,
    data: str | Path,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> Evaluation:
    """The loss over a text file, or over the targets of a .jsonl file ("text", "messages", "prompt", ...).

    The tokens are read in windows of `context` tokens (by default 1024, or n_positions), each `stride` tokens after the
    one before (by default half of the context). Every target counts exactly once, with at least context − stride tokens
    before it, or all that there are: a smaller stride gives each token more context and costs more windows. Lines of a
    .jsonl file are separate documents. With a `limit`, the data ends after so many bytes of targets.
    `on_progress(done, all, loss)` is called with numbers of targets and the mean loss so far.
    """
    from onfoot.data.sliding import read_documents, sliding_windows, window_batches
    from onfoot.generate.chat import template_of

    context, stride = _check_windows(model, context, stride)
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    tokenizer, path = model.tokenizer, Path(data)
    if tokenizer is None:
        raise ValueError(
            f"{model.source or 'this model'} has no tokenizer to encode the data; put tokenizer.json next to its "
            f"config.json"
        )
    template = template_of(model)

    def documents() -> Iterator[Iterator[Piece]]:
        return read_documents(path, tokenizer, template, limit)

    n_tokens, n_bytes, digest = _count(documents())  # tokenizing twice costs little beside the model
    if n_tokens == 0:
        raise ValueError(f"{path} is too short: it has no token that follows another; at least 2 tokens are needed")
    total, done = 0.0, 0
    windows = (window for document in documents() for window in sliding_windows(document, context, stride))
    for tokens, targets in window_batches(windows, batch_size, context):
        n = int((targets != IGNORE).sum())
        total += model.loss(tokens, targets) * n
        done += n
        if on_progress is not None:
            on_progress(done, n_tokens, total / done)
    if done != n_tokens:
        raise ValueError(f"{path} changed while it was read: {n_tokens:,} targets at first, then {done:,}")
    if not math.isfinite(total):
        raise ValueError(f"the loss is {total}: the weights are damaged, or training diverged")
    return Evaluation(total / n_tokens, n_tokens, n_bytes, context, stride, digest)


def _check_windows(model: Model, context: int | None, stride: int | None) -> tuple[int, int]:
    """Context and stride with their defaults."""
    config: Any = model.config
    if not config.causal:
        raise ValueError("cannot evaluate with causal=False: tokens would attend to the tokens that they predict")
    if context is None:
        context = min(config.n_positions, CONTEXT)
    if context < 1:
        raise ValueError(f"context must be >= 1, got {context}")
    if context > config.n_positions:
        raise ValueError(
            f"context={context} exceeds n_positions={config.n_positions} of the model; choose a shorter one"
        )
    if stride is None:
        stride = max(1, context // 2)
    if not 1 <= stride <= context:
        raise ValueError(
            f"stride must be in 1 ... {context}, the context, got {stride}: every token must be in a window"
        )
    return context, stride


def _count(documents: Iterator[Iterator[Piece]]) -> tuple[int, int, str]:
    """The number of targets and of their bytes, and a checksum of all tokens."""
    n_tokens, n_bytes, digest = 0, 0, hashlib.sha256()
    for document in documents:
        for piece in document:
            n_tokens += int(piece.learn.sum())
            n_bytes += piece.n_bytes
            digest.update(np.where(piece.learn, piece.ids, -1 - piece.ids).astype("<i8").tobytes())
    return n_tokens, n_bytes, digest.hexdigest()
