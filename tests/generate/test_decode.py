"""The text of tokens that arrive one by one is exactly the text of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.generate.decode import StreamDecoder

TEXT = "Grün ist die Weide, 雪 and 🦙🦙 graze; don't they? ▁ <0x41> � done."


def _with(decoder: Any) -> Tokenizer:
    """A tokenizer of SentencePiece-like pieces, bytes, and special and added tokens, with this decoder."""
    pieces = ["▁", "▁▁", "▁a", "a", "b", "▁the", "##s", "</w>", "x</w>", ".", "n't", "�", "雪", "", "'s"]
    pieces += [f"<0x{b:02X}>" for b in (0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xA6, 0x99, 0xFF)]
    backend = Backend(models.WordLevel({piece: 2 * i for i, piece in enumerate(pieces)}, unk_token="a"))  # gaps in ids
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken(" two words ", special=False)])
    return Tokenizer(backend, "</s>")


SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "bpe": bpe_tokenizer(iter([TEXT] * 3), 300),
    "characters": char_tokenizer([TEXT]),
    "byte level, added tokens": _with(decoders.ByteLevel()),
    "sentencepiece": _with(decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 1, 0)])),
    "sentencepiece without strip": _with(decoders.Sequence(SENTENCEPIECE)),
    "metaspace": _with(decoders.Metaspace()),
    "word pieces": _with(decoders.WordPiece()),
    "word ends": _with(decoders.BPEDecoder()),
    "none": _with(None),
}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join([*map(decoder.add, ids), decoder.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_texts_of_all_tokens_together_are_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 1), max_size=30))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40))  # no special tokens
def test_every_text_is_returned_without_replaced_characters(name: str, text: str) -> None:
    decoder = StreamDecoder(TOKENIZERS[name])
    parts = [decoder.add(token) for token in TOKENIZERS[name].encode(text)]
    assert "".join(parts) == text
    assert decoder.finish() == ""


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end() -> None:
    decoder = StreamDecoder(TOKENIZERS["bytes"])
    llama = TOKENIZERS["bytes"].encode("🦙")
    assert [decoder.add(token) for token in llama] == ["", "", "", "🦙"]
    assert [decoder.add(token) for token in llama[:3]] == ["", "", ""]
    assert decoder.finish() == "�"


def test_a_space_depends_on_the_token_before_it_not_on_a_skipped_one() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    a, special = tokenizer.backend.token_to_id("▁a"), tokenizer.backend.token_to_id("<s>")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.add(token) for token in (special, a, special, special, a)] == ["", "a", "", "", " a"]


def test_the_work_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(list(ids)))
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    tokenizer = TOKENIZERS["sentencepiece"]
    pieces = [tokenizer.backend.token_to_id(piece) for piece in ("▁a", "b", "▁", "<s>", "<0xE2>", "<0x82>", "<0xAC>")]
    assert streamed(tokenizer, pieces * 50) == "ab €" + " ab €" * 49
    assert longest <= 6
