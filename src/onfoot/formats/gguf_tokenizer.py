"""Builds the tokenizer in a GGUF file's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from onfoot.config import Config
from onfoot.formats import gguf_sentencepiece
from onfoot.formats.files import shown
from onfoot.formats.gguf_sentencepiece import CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from onfoot.formats.tokenizer import Tokenizer, add_bos, check_fits, tokenizer_errors

WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # pre-tokenizers of LLaMA 3
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
NO_TOKENIZER = ("no_vocab", "none")
# The pre-tokenization pattern of LLaMA 3 and Qwen2; they differ in how many digits stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer of that name; None if it is not supported."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "gpt2"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in WHOLE_WORDS_FIRST:
        return _split_by(WORDS.format(digits="{1,3}"))
    if name == "qwen2":
        return _split_by(WORDS.format(digits=""))
    return None


def read_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in a file's metadata; raises ValueError for a kind that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{path}: tokenizer {shown(kind)} is not supported, only 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece BPE)"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    types = _numbers(metadata, "token_type", tokens, path) if kind == "llama" or _has_types(metadata) else None
    n = len(tokens)
    while types is not None and n > 0 and types[n - 1] == UNUSED:  # rows of the token table that no text uses
        n -= 1
    used, used_types = tokens[:n], np.ones(n, np.int32) if types is None else types[:n]
    build = _sentencepiece if kind == "llama" else _byte_level
    backend = build(metadata, used, used_types, path)
    with tokenizer_errors(str(path)):
        special = [token for token, type_ in zip(used, used_types, strict=True) if type_ in (CONTROL, UNKNOWN)]
        others = [token for token, type_ in zip(used, used_types, strict=True) if type_ == USER_DEFINED]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        backend.add_tokens([AddedToken(token, normalized=False) for token in others])

    def named(which: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{which}_token_id")
        return tokens[i] if type(i) is int and 0 <= i < len(tokens) else None

    bos = named("bos")
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre_name(metadata) in WHOLE_WORDS_FIRST)
    if begins is True:
        add_bos(backend, bos)
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Tokenizer(backend, named("eos"), bos, template, str(path))


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: np.ndarray, path: Path) -> Backend:
    pre = _pre_name(metadata)
    splitter = pre_tokenizer(pre) if isinstance(pre, str) else None
    if splitter is None:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{path}: pre-tokenizer {shown(pre)} is not supported; supported: {supported}")
    merges = _strings(metadata, "tokenizer.ggml.merges", path)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words_first = pre in WHOLE_WORDS_FIRST
    with tokenizer_errors(str(path)):
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words_first))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: np.ndarray, path: Path) -> Backend:
    scores = _numbers(metadata, "scores", metadata["tokenizer.ggml.tokens"], path)
    space_prefix = metadata.get("tokenizer.ggml.add_space_prefix") is not False
    with tokenizer_errors(str(path)):
        return gguf_sentencepiece.build(tokens, scores[: len(tokens)], types, space_prefix)


def _pre_name(metadata: dict[str, Any]) -> Any:
    return metadata.get("tokenizer.ggml.pre", "gpt-2")


def _has_types(metadata: dict[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.token_type") is not None


def find_tokenizer(metadata: dict[str, Any], path: Path, config: Config) -> Tokenizer | None:
    """The tokenizer in a file's metadata, checked against the model; None if there is none."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if isinstance(kind, str) and kind in NO_TOKENIZER:
        return None
    tokenizer = read_tokenizer(metadata, path)
    check_fits(tokenizer, config, path)
    return tokenizer


def _strings(metadata: dict[str, Any], key: str, path: Path) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path}: {key} is missing or not an array of strings")
    return values


def _numbers(metadata: dict[str, Any], name: str, tokens: list[str], path: Path) -> np.ndarray:
    """An array with a finite number per token."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if isinstance(values, list) and all(type(value) in (int, float) for value in values):
        values = np.array(values)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf" or len(values) != len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.{name} must be an array of {len(tokens):,} numbers, one per token")
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: tokenizer.ggml.{name} has values that are not finite")
    return values
