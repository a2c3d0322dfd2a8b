"""SentencePiece BPE tokenizers in GGUF files ("llama"): a score per token instead of a list of merges.

The pair whose concatenation has the highest score is merged first; a character without a token becomes its bytes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of the format
SPACE = "▁"
MAX_TOKEN = 256  # characters of a token that can be merged; SentencePiece's own limit is 16 unless told otherwise
MAX_CHARACTERS = 4 << 20  # of all tokens that can be merged: twice those of the largest vocabularies
BYTE_TOKENS = [f"<0x{i:02X}>" for i in range(256)]


def build(tokens: list[str], scores: np.ndarray, types: np.ndarray, space_prefix: bool) -> Backend:
    """The tokenizer of these tokens; with `space_prefix`, a text begins with a space, which decoding removes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    merges = merges_by_score(vocab, scores, types)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if space_prefix else [])])
    return backend


def merges_by_score(vocab: dict[str, int], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a normal token, that of the highest score first."""
    merges: list[tuple[float, int, int, str, str]] = []
    characters = sum(len(token) for token, i in vocab.items() if types[i] == NORMAL)
    if characters > MAX_CHARACTERS:
        raise ValueError(f"its tokens have {characters:,} characters in all; the limit is {MAX_CHARACTERS:,}")
    for token, i in vocab.items():
        if types[i] != NORMAL:
            continue
        if len(token) > MAX_TOKEN:
            raise ValueError(f"token {i} has {len(token):,} characters; the limit is {MAX_TOKEN}")
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                merges.append((-float(scores[i]), i, at, left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def scores_of(vocab: dict[str, int], merges: list[tuple[str, str]], types: np.ndarray) -> np.ndarray:
    """Scores that give these merges: the earlier a token is first merged, the higher; other tokens below them.

    Raises ValueError if no scores do: some tokenizers merge fewer pairs than those that their tokens allow.
    """
    order = list(dict.fromkeys(left + right for left, right in merges))
    scores = np.zeros(len(types), np.float32)
    rank = {token: i for i, token in enumerate(order)}
    below = len(order)
    for token, i in sorted(vocab.items(), key=lambda item: item[1]):
        if types[i] == NORMAL:
            scores[i] = -rank.get(token, below)
            below += token not in rank
    implied = merges_by_score(vocab, scores, types)
    if set(implied) != set(merges) or [a + b for a, b in implied] != [a + b for a, b in merges]:
        raise ValueError("its merges do not follow from one score per token")
    return scores


def space_prefix_of(state: dict[str, Any]) -> bool | None:
    """Whether a tokenizer.json of a SentencePiece BPE prepends a space to a text; None if it is of another kind."""
    normalizer, pre = state.get("normalizer"), state.get("pre_tokenizer")
    if not state["model"].get("byte_fallback"):
        return None
    if normalizer is None and pre is not None and pre["type"] == "Metaspace":
        whole = pre["replacement"] == SPACE and not pre["split"]
        return pre["prepend_scheme"] != "never" if whole else None
    for prefix in (True, False):
        if pre is None and normalizer == json.loads(build([], *_NONE, prefix).to_str())["normalizer"]:
            return prefix
    return None


_NONE = np.zeros(0, np.float32), np.zeros(0, np.int32)
