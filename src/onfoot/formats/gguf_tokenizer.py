"""Builds the byte-level BPE tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from onfoot.config import Config
from onfoot.formats.files import shown
from onfoot.formats.tokenizer import Tokenizer, add_bos, check_fits, tokenizer_errors

CONTROL, USER_DEFINED = 3, 4  # token types that are matched before BPE
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


def _pre_tokenizer(name: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "gpt2"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _split_by(WORDS.format(digits="{1,3}"))
    if name == "qwen2":
        return _split_by(WORDS.format(digits=""))
    return None


def read_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in a file's metadata; raises ValueError for a kind that is not supported."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer {shown(kind)} is not supported, only 'gpt2' (byte-level BPE)")
    pre_tokenizer = _pre_tokenizer(pre)
    if pre_tokenizer is None:
        raise ValueError(
            f"{path}: pre-tokenizer {shown(pre)} is not supported; supported: gpt-2, smollm, llama-bpe, qwen2"
        )
    tokens, merges = (_strings(metadata, f"tokenizer.ggml.{name}", path) for name in ("tokens", "merges"))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words_first = pre in ("llama-bpe", "llama3", "llama-v3")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and not isinstance(types, list | np.ndarray):
        raise ValueError(f"{path}: tokenizer.ggml.token_type must be an array of numbers")
    with tokenizer_errors(str(path)):
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words_first))
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizer
        backend.decoder = decoders.ByteLevel()
        for token, type_ in zip(tokens, () if types is None else types, strict=False):
            if type_ == CONTROL:
                backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif type_ == USER_DEFINED:
                backend.add_tokens([AddedToken(token, normalized=False)])

    def named(which: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{which}_token_id")
        return tokens[i] if type(i) is int and 0 <= i < len(tokens) else None

    if metadata.get("tokenizer.ggml.add_bos_token", whole_words_first) is True:  # LLaMA 3's tokenizer adds it
        add_bos(backend, named("bos"))
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Tokenizer(backend, named("eos"), named("bos"), template, str(path))


def find_tokenizer(metadata: dict[str, Any], path: Path, config: Config) -> Tokenizer | None:
    """The tokenizer in a file's metadata, checked against the model; None if there is none."""
    if "tokenizer.ggml.model" not in metadata:
        return None
    tokenizer = read_tokenizer(metadata, path)
    check_fits(tokenizer, config, path)
    return tokenizer


def _strings(metadata: dict[str, Any], key: str, path: Path) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path}: {key} is missing or not an array of strings")
    return values
