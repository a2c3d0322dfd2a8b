"""The metadata of a tokenizer for a GGUF file: byte-level BPE as "gpt2", SentencePiece BPE as "llama"."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from onfoot.config import Config
from onfoot.formats.gguf_sentencepiece import (
    BYTE,
    BYTE_TOKENS,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    scores_of,
    space_prefix_of,
)
from onfoot.formats.gguf_tokenizer import PRE_TOKENIZERS, WHOLE_WORDS_FIRST, pre_tokenizer
from onfoot.formats.tokenizer import Tokenizer, check_fits, tokenizer_errors

NORMALIZERS: dict[str, tuple[Any, ...]] = {"qwen2": (None, {"type": "NFC"})}  # others have none


def tokenizer_metadata(tokenizer: Tokenizer | None, config: Config) -> dict[str, Any]:
    """The keys tokenizer.*; raises ValueError for a tokenizer that GGUF cannot hold."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab", **_special_ids(tokenizer, config)}
    check_fits(tokenizer, config, tokenizer.name)
    state = json.loads(tokenizer.backend.to_str())
    if state["model"]["type"] != "BPE":
        raise ValueError(
            f"{tokenizer.name}: a tokenizer of the kind {state['model']['type']} cannot be stored in a GGUF file, "
            f"only BPE; train with the byte or bpe tokenizer"
        )
    vocab, special = tokenizer.backend.get_vocab(with_added_tokens=True), state["added_tokens"]
    tokens, types = _tokens(vocab, {token["content"]: token["special"] for token in special}, config.vocab_size)
    merges = [_pair(merge) for merge in state["model"]["merges"]]
    space_prefix = space_prefix_of(state)
    values: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if space_prefix is None:
        values |= {"model": "gpt2", "pre": _pre_name(state, tokenizer.name), "merges": [" ".join(m) for m in merges]}
    else:
        _mark_bytes(tokenizer.name, vocab, state["model"]["unk_token"], types)
        try:
            scores = scores_of(vocab, merges, types)
        except ValueError as error:
            raise ValueError(f"{tokenizer.name} cannot be stored in a GGUF file: {error}") from None
        values |= {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": space_prefix}
    out = {f"tokenizer.ggml.{name}": value for name, value in values.items()} | _special_ids(tokenizer, config)
    out |= _added(tokenizer)
    return out if tokenizer.chat_template is None else out | {"tokenizer.chat_template": tokenizer.chat_template}


def _pair(merge: Any) -> tuple[str, str]:
    """A merge of a tokenizer.json, which older versions write as one text."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _tokens(vocab: dict[str, int], added: dict[str, bool], size: int) -> tuple[list[str], np.ndarray]:
    """The tokens and their types; a row of the token table without a token gets a name that no text uses."""
    tokens, types = [f"[PAD{i}]" for i in range(size)], np.full(size, UNUSED, np.int32)
    for token, i in vocab.items():
        tokens[i] = token
        types[i] = (CONTROL if added[token] else USER_DEFINED) if token in added else NORMAL
    return tokens, types


def _mark_bytes(name: str, vocab: dict[str, int], unknown: str | None, types: np.ndarray) -> None:
    """Sets the types of the 256 byte tokens and of the unknown token."""
    missing = next((token for token in BYTE_TOKENS if token not in vocab), None)
    if missing is not None:
        raise ValueError(f"{name} cannot be stored in a GGUF file: it has no byte token {missing}")
    types[[vocab[token] for token in BYTE_TOKENS]] = BYTE
    if unknown is not None and unknown in vocab:
        types[vocab[unknown]] = UNKNOWN


def _pre_name(state: dict[str, Any], name: str) -> str:
    """The name of a tokenizer.json's pre-tokenizer, by which llama.cpp splits texts."""
    model = state["model"]
    for pre in PRE_TOKENIZERS:
        same = _essential(state["pre_tokenizer"]) == _essential(json.loads(pre_tokenizer(pre).__getstate__()))
        plain = state["normalizer"] in NORMALIZERS.get(pre, (None,))
        words = bool(model.get("ignore_merges")) == (pre in WHOLE_WORDS_FIRST)
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model["byte_fallback"]
        if same and plain and words and not affixes:
            return pre
    raise ValueError(
        f"{name}: its normalizer and pre-tokenizer are none that a GGUF file can name; "
        f"supported: {', '.join(PRE_TOKENIZERS)} and SentencePiece BPE"
    )


def _essential(part: Any) -> Any:
    """A pre-tokenizer without the option that changes no ids."""
    if not isinstance(part, dict):
        return part
    return {key: [_essential(x) for x in value] if isinstance(value, list) else value
            for key, value in part.items() if key != "trim_offsets"}  # fmt: skip


def _special_ids(tokenizer: Tokenizer | None, config: Config) -> dict[str, Any]:
    """The ids of the begin and end tokens; a model without a begin token begins with its end token, as GPT-2 does."""
    own = () if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = [i for i in dict.fromkeys((*own, *config.eos_ids)) if i is not None and 0 <= i < config.vocab_size]
    bos = None if tokenizer is None or tokenizer.bos is None else tokenizer.backend.token_to_id(tokenizer.bos)
    bos = config.bos_token_id if bos is None else bos
    ids = {"bos": bos if bos is not None else ends[0] if ends else None}
    ids |= {"eos": ends[0] if ends else None, "eot": ends[1] if len(ends) > 1 else None}
    return {f"tokenizer.ggml.{which}_token_id": i for which, i in ids.items() if i is not None and i >= 0}


def _added(tokenizer: Tokenizer) -> dict[str, bool]:
    """Whether the tokenizer's own encoding adds a begin token and an end token."""
    with tokenizer_errors(tokenizer.name):
        plain = tokenizer.backend.encode("a", add_special_tokens=False).ids
        ids = tokenizer.backend.encode("a", add_special_tokens=True).ids
    n = len(ids) - len(plain)
    before = next((i for i in range(n + 1) if ids[i : i + len(plain)] == plain), 0)
    return {"tokenizer.ggml.add_bos_token": before > 0, "tokenizer.ggml.add_eos_token": n - before > 0}
