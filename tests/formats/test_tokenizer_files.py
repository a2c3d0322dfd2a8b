"""Settings in a tokenizer's file must not truncate, pad or change a text, or crash the process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import onfoot
from onfoot.data import corpus
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer

TEXT = "the quick brown fox, isn't it? " * 40
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 4000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "!",
}  # fmt: skip


def changed(path: Path, **changes: Any) -> Path:
    byte_tokenizer().save(path.parent, 64)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    path = changed(tmp_path / "tokenizer.json", truncation=TRUNCATION, padding=PADDING)
    assert len(Backend.from_file(str(path)).encode(TEXT).ids) != len(TEXT)  # the file does request it
    for loaded in (Tokenizer.load(path), Tokenizer.load(tmp_path), Tokenizer.find(tmp_path)):
        assert loaded is not None
        assert loaded.encode(TEXT) == byte_tokenizer().encode(TEXT)
        assert loaded.decode(loaded.encode(TEXT)) == TEXT


def test_a_corpus_keeps_all_its_tokens_after_transformers_wrote_a_truncation(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs(["a text", "another, longer text"], truncation=True, max_length=8)
    theirs.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())["truncation"]["max_length"] == 8
    (tmp_path / "a.txt").write_text(TEXT * 10)
    tokens = corpus.write_tokens(
        corpus.find_texts([tmp_path / "a.txt"]), Tokenizer.load(tmp_path / "theirs"), tmp_path / "data"
    )
    assert len(tokens) == len(TEXT) * 10


def test_a_model_in_a_folder_encodes_whole_texts(tmp_path: Path) -> None:
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=16, n_embd=12, n_layer=1, n_head=3))
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path)
    changed(tmp_path / "tokenizer.json", truncation=TRUNCATION, padding=PADDING)
    loaded = onfoot.load(tmp_path).tokenizer
    assert loaded is not None and len(loaded.encode(TEXT)) == len(TEXT)


def test_the_same_text_has_the_same_ids_whatever_dropout_a_file_asks_for(tmp_path: Path) -> None:
    bpe_tokenizer(iter([TEXT]), 280).save(tmp_path, 64)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    expected = Tokenizer.load(tmp_path).encode(TEXT)
    state["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert all(Tokenizer.load(tmp_path).encode(TEXT) == expected for _ in range(3))


def with_vocabulary(path: Path, vocab: dict[str, int], added: list[dict[str, Any]] | None = None) -> Path:
    state = {
        "version": "1.0", "added_tokens": added or [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
    }  # fmt: skip
    path.write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("largest", [29, 1000, 70_000])
def test_ids_beyond_the_models_vocabulary_are_refused_when_it_is_loaded(tmp_path: Path, largest: int) -> None:
    config = onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=1, n_head=3)
    onfoot.create(config, engine="numpy").save(tmp_path)
    with_vocabulary(tmp_path / "tokenizer.json", {"a": 0, "b": 28})
    assert onfoot.load(tmp_path, engine="numpy").tokenizer is not None  # two tokens, but ids up to 28: they fit
    with_vocabulary(tmp_path / "tokenizer.json", {"a": 0, "b": largest})
    with pytest.raises(ValueError, match=f"ids up to {largest}, but the model has vocab_size=29"):
        onfoot.load(tmp_path, engine="numpy")


def test_added_tokens_count_among_the_ids(tmp_path: Path) -> None:
    config = onfoot.GPT2Config(vocab_size=2, n_positions=16, n_embd=12, n_layer=1, n_head=3)
    onfoot.create(config, engine="numpy").save(tmp_path)
    added = {
        "id": 2, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    with_vocabulary(tmp_path / "tokenizer.json", {"a": 0, "b": 1}, [added])
    with pytest.raises(ValueError, match="ids up to 2, but the model has vocab_size=2"):
        onfoot.load(tmp_path, engine="numpy")


def test_ids_beyond_65536_are_stored_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    state = json.loads(with_vocabulary(path, {"a": 65_535, "b": 65_536, "c": 70_000}).read_text())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(state))
    (tmp_path / "a.txt").write_text("a b c b")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.size == 70_001
    tokens = corpus.write_tokens(corpus.find_texts([tmp_path / "a.txt"]), tokenizer, tmp_path / "data")
    assert tokens.dtype == np.uint32 and tokens.tolist() == [65_535, 65_536, 70_000, 65_536]
    with_vocabulary(path, {"a": 65_535})
    small = Tokenizer.load(path)
    (tmp_path / "a.txt").write_text("a")
    again = corpus.write_tokens(corpus.find_texts([tmp_path / "a.txt"]), small, tmp_path / "small")
    assert again.dtype == np.uint16 and again.tolist() == [65_535]


def test_an_id_that_no_model_could_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: token id 4294967295 is too large"):
        Tokenizer.load(with_vocabulary(tmp_path / "tokenizer.json", {"a": 4294967295}))


PANICS: dict[str, dict[str, Any]] = {
    "a unigram without tokens": {"model": {"type": "Unigram", "unk_id": 0, "vocab": []}},
    "a broken table of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a regular expression that is none": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
    "half an object": {"model": {"type": "BPE"}},
    "another type": {"model": 3},
}


@pytest.mark.parametrize("name", PANICS)
def test_a_tokenizer_that_panics_or_fails_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = changed(tmp_path / "tokenizer.json", **PANICS[name])
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a valid tokenizer: ")) as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_a_truncation_shorter_than_its_stride_is_harmless(tmp_path: Path) -> None:
    """The tokenizers library panics on it when encoding; here truncation is disabled."""
    path = changed(tmp_path / "tokenizer.json", truncation={**TRUNCATION, "stride": 9})
    assert len(Tokenizer.load(path).encode(TEXT)) == len(TEXT)


def test_replacements_that_multiply_a_text_are_refused(tmp_path: Path) -> None:
    replacement = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8}
    for part, inside in (("normalizer", "normalizers"), ("decoder", "decoders")):
        path = changed(tmp_path / "tokenizer.json", **{part: {"type": "Sequence", inside: [replacement] * 2}})
        Tokenizer.load(path).encode("a")
        path = changed(tmp_path / "tokenizer.json", **{part: {"type": "Sequence", inside: [replacement] * 9}})
        with pytest.raises(ValueError, match=r"tokenizer\.json: it can make a text up to 134,217,728 times as long"):
            Tokenizer.load(path)


def test_a_panic_while_encoding_is_a_value_error(tmp_path: Path) -> None:
    """pyo3's PanicException is not an Exception, so `except Exception` does not catch it."""

    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *args: Any, **kwargs: Any) -> None:
            raise PanicException("index out of bounds\nnote: ...")

        decode = encode

    tokenizer = Tokenizer.load(changed(tmp_path / "tokenizer.json"))
    tokenizer.backend = Panics()
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(ValueError, match=r"tokenizer\.json .*index out of bounds") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [("[]", ""), ('{"a": "0"}', ""), ('{"a": -1}', ""), ('{"a": 0}', "a b c\n"), ('{"a": 0}', "x y\n"), ("", ""),
     ('{"a": 0, "b": 99999999999}', "")],
)  # fmt: skip
def test_an_invalid_vocabulary_or_merges_file_is_rejected(tmp_path: Path, vocab: str, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_gpt2s_pair_of_files_is_read_as_the_tokenizers_package_reads_it(tmp_path: Path) -> None:
    from tokenizers import models

    state = json.loads(bpe_tokenizer(iter([TEXT]), 280).backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in state["merges"]), ""]
    for end in ("\n", "\r\n"):
        (tmp_path / "merges.txt").write_bytes(end.join(lines).encode())
        theirs = models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        ours = Tokenizer.load(tmp_path)
        assert ours.encode("the quick") == [t.id for word in ("the", "Ġquick") for t in theirs.tokenize(word)]
