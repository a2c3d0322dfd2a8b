"""Text from tokens as they arrive: the work per token does not grow with the length of the text.

A byte-level tokenizer's text is its tokens' bytes, decoded as UTF-8. Other tokenizers are asked for the last tokens
only: the context, whose text is known, and those after it.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from typing import Any

from onfoot.formats.tokenizer import Tokenizer

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte of a character that is not in the vocabulary


class StreamDecoder:
    """Decodes tokens one by one; all texts together are exactly `tokenizer.decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoders(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if kinds == ["ByteLevel"] else None
        self._byte_fallback = "ByteFallback" in kinds
        self._skipped = {i for i, t in tokenizer.backend.get_added_tokens_decoder().items() if t.special}
        self._context: list[int] = []  # the tokens before the pending ones that their text may depend on
        self._pending: list[int] = []  # tokens whose text has not been returned

    def add(self, token: int) -> str:
        """The text that this token completes; "" while its last character is incomplete."""
        name = None if token in self._skipped else self._tokenizer.backend.id_to_token(token)
        if name is None:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(_bytes(name))
        self._pending.append(token)
        if self._byte_fallback and BYTE.fullmatch(name):
            return ""  # one invalid byte makes all bytes beside it invalid, so they are decoded together
        return self._complete()

    def finish(self) -> str:
        """The rest of the text; an incomplete character is shown as U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._utf8 is not None else self._complete()

    def _complete(self) -> str:
        known = self._tokenizer.decode(self._context) if self._context else ""
        text = self._tokenizer.decode(self._context + self._pending)
        # A context without text would let a decoder take the next token for the first, and strip its space.
        last = self._pending[-1:]
        self._context = last if last and self._tokenizer.decode(last) else self._context + self._pending
        self._pending = []
        return text[len(known) :]


def _decoders(tokenizer: Tokenizer) -> list[str]:
    """The types of the steps by which a tokenizer decodes."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


@lru_cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@lru_cache(1 << 16)
def _bytes(name: str) -> bytes:
    """The bytes of a byte-level token; an added token with other characters stands for itself."""
    table = _byte_of_character()
    if all(c in table for c in name):
        return bytes(table[c] for c in name)
    return name.encode()


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for in the middle of a text; a special token's are those of its name."""
    name, kinds = tokenizer.backend.id_to_token(token), _decoders(tokenizer)
    if name is None:
        return b""
    if kinds == ["ByteLevel"]:
        return _bytes(name)
    if "ByteFallback" in kinds and BYTE.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()
