"""Built and loaded tokenizers decode what they encode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import onfoot
from onfoot.data.corpus import Text
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.train.options import TrainOptions
from onfoot.train.pretrain import make_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
BYTES = byte_tokenizer()
BPE = bpe_tokenizer(iter([TEXT]), 300)


@given(st.text())
def test_byte_and_bpe_tokenizers_decode_any_text_they_encode(text: str) -> None:
    assume(BYTES.eos not in text and BPE.eos not in text)
    for tokenizer in (BYTES, BPE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_token_per_byte() -> None:
    assert BYTES.size == 257
    assert len(BYTES.encode("héllo")) == len("héllo".encode())


def test_bpe_learns_frequent_pieces() -> None:
    assert BPE.size <= 300
    assert len(BPE.encode(TEXT)) < len(TEXT) / 3
    with pytest.raises(ValueError, match=r"vocab_size must be >= 257 for BPE \(256 bytes and the end-of-text token\)"):
        bpe_tokenizer(iter([TEXT]), 100)


def test_one_token_per_character_and_unknown_ones_are_named() -> None:
    tokenizer = char_tokenizer(["héllo\nworld"])
    assert tokenizer.decode(tokenizer.encode("wör\n".replace("ö", "o"))) == "wor\n"
    assert len(tokenizer.encode("héllo")) == 5
    with pytest.raises(ValueError, match="the character 'z' is not in this character tokenizer's vocabulary"):
        tokenizer.encode("héllz")


def test_the_end_token_is_one_token_and_is_not_shown() -> None:
    for tokenizer in (BYTES, BPE, char_tokenizer(["ab"])):
        assert tokenizer.eos_id is not None
        assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


def test_the_public_tokenizers_are_those_of_the_option(tmp_path: Path) -> None:
    made = {
        "byte": onfoot.Tokenizer.byte(),
        "char": onfoot.Tokenizer.char(TEXT),
        "bpe": onfoot.Tokenizer.bpe([TEXT[:40], TEXT[40:]], 300),
    }
    for kind, tokenizer in made.items():
        (tmp_path / kind).mkdir()
        tokenizer.save(tmp_path / kind, 64)
        options = TrainOptions(tokenizer=kind, vocab_size=300 if kind == "bpe" else 0, validation=1e-9)
        theirs = make_tokenizer(options, [Text("a", text=TEXT[:40]), Text("b", text=TEXT[40:])])
        assert tokenizer.backend.get_vocab() == theirs.backend.get_vocab()
        assert onfoot.Tokenizer.load(tmp_path / kind).encode(TEXT) == theirs.encode(TEXT) != []
    assert onfoot.Tokenizer.char([TEXT]).size == made["char"].size  # one text, or a list of texts
    assert onfoot.Tokenizer.bpe(TEXT, 300).encode(TEXT) == bpe_tokenizer(iter([TEXT]), 300).encode(TEXT)


def test_saved_tokenizers_load_unchanged(tmp_path: Path) -> None:
    for tokenizer in (BYTES, BPE, char_tokenizer([TEXT])):
        tokenizer.save(tmp_path, 64)
        again = Tokenizer.load(tmp_path)
        assert again.encode(TEXT) == tokenizer.encode(TEXT)
        assert again.eos_id == tokenizer.eos_id


def test_gpt2s_vocabulary_and_merges_are_read(tmp_path: Path) -> None:
    state = json.loads(BPE.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = [" ".join(m) if isinstance(m, list) else m for m in state["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    for path in (tmp_path, tmp_path / "vocab.json"):
        assert Tokenizer.load(path).encode(TEXT) == BPE.encode(TEXT)


def test_files_that_are_not_tokenizers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing does not exist; built-in tokenizers: byte, char, bpe"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a valid tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"needs merges\.txt in the same folder"):
        Tokenizer.load(tmp_path / "vocab.json")
