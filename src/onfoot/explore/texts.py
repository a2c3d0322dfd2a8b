"""User input to token ids, or a ValueError that explains what is wrong and how to fix it."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from onfoot.models.inputs import check_tokens

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.models.model import Model

MAX_TOKENS = 64  # attention weights grow quadratically, and the page has all of them
MAX_CHARACTERS = 4_000
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}


def read_text(model: Model, text: str) -> np.ndarray:
    """The token ids (1, T) of a text."""
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer; give token ids instead, such as 3 1 4 1 5")
    if not text.strip():
        raise ValueError("the text is empty; at least two tokens are needed, an input and its target")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the text has {len(text):,} characters, the limit is {MAX_CHARACTERS:,}; shorten it")
    try:
        ids = model.tokenizer.encode(text, add_special_tokens=True)
    except ValueError as error:  # a character that the tokenizer does not know
        reason, _, _ = str(error).partition(";")
        known = "".join(x for x in vocabulary(model) if len(x) == 1) if model.config.vocab_size < 128 else ""
        raise ValueError(reason + (f"; it has {known}" if known else "")) from None
    return check_ids(model, ids)


def read_ids(model: Model, ids: str) -> np.ndarray:
    """Token ids (1, T) from a string such as "3 1 4"."""
    if len(ids) > MAX_CHARACTERS:
        raise ValueError(f"the token ids have {len(ids):,} characters, the limit is {MAX_CHARACTERS:,}; give fewer")
    words = ids.replace(",", " ").split()
    if not words:
        raise ValueError("no token ids; give at least two, such as 3 1 4 1 5")
    for word in words:
        if not word.removeprefix("-").isdecimal():
            raise ValueError(f"token id {word!r} is not an integer; give ids such as 3 1 4 1 5")
    return check_ids(model, [int(word) for word in words])


def check_ids(model: Model, ids: list[int]) -> np.ndarray:
    limit = min(MAX_TOKENS, model.config.n_positions)
    if len(ids) < 2:
        raise ValueError(f"at least two tokens are needed, an input and its target, got {len(ids)}")
    if len(ids) > limit:
        raise ValueError(f"{len(ids)} tokens exceed the limit of {limit}; shorten the text")
    wrong = [id for id in ids if not 0 <= id < model.config.vocab_size]
    if wrong:
        raise ValueError(f"token id must be between 0 and {model.config.vocab_size - 1}, got {wrong[0]}")
    return check_tokens(np.array([ids], dtype=np.int64), model.config.vocab_size, model.config.n_positions)


def shown(model: Model, id: int) -> str:
    """A token in printable form: a space as ␣, and `#id` if it cannot be printed."""
    return str(id) if model.tokenizer is None else _printable(model.tokenizer, id, model.tokenizer.decode([id]))


def _printable(tokenizer: Tokenizer, id: int, text: str) -> str:
    text = text or tokenizer.backend.id_to_token(id) or ""
    if text.isascii() and text.isprintable() and text:  # most tokens of a large vocabulary
        return text.replace(" ", VISIBLE[" "])
    if not text or any(unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn") and c not in VISIBLE for c in text):
        return f"#{id}"
    return "".join(VISIBLE.get(character, character) for character in text) if "�" not in text else f"#{id}"


def special_ids(model: Model) -> list[int]:
    """The ids of special tokens, such as <|endoftext|>, which do not stand for text."""
    if model.tokenizer is None:
        return []
    added = model.tokenizer.backend.get_added_tokens_decoder()
    return [id for id, token in added.items() if token.special and id < model.config.vocab_size]


def vocabulary(model: Model) -> list[str]:
    """Every token of the model in printable form."""
    if model.tokenizer is None:
        return [str(id) for id in range(model.config.vocab_size)]
    return list(_vocabulary(model.tokenizer, model.config.vocab_size))


@lru_cache(maxsize=2)  # every text of a model has the same, and 50,000 tokens take a second
def _vocabulary(tokenizer: Tokenizer, n: int) -> tuple[str, ...]:
    texts = tokenizer.decode_each(range(n))
    return tuple(_printable(tokenizer, id, text) for id, text in enumerate(texts))
