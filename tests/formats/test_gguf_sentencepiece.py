"""SentencePiece tokenizers in GGUF files give the ids of the sentencepiece package, and can be written again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

import onfoot
from onfoot.formats.gguf_export import export_model
from onfoot.formats.gguf_sentencepiece import MAX_TOKEN, merges_by_score, scores_of
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.formats.gguf_tokenizer_write import tokenizer_metadata
from onfoot.formats.tokenizer import Tokenizer
from onfoot.models.model import Model

LINES = "\n".join(topics.values()).split("\n")[:3000]
TEXTS = [
    *LINES[:600], "日本 é 2024  spaces   here", " lead", "trail ", "\ttab", "a", "", "aaaaaaaaaaa", "  ", "x\u0301 😀",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A BPE model as LLaMA's: bytes for unknown characters, spaces and letters as they are."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, vocab_size=700, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
        character_coverage=0.999,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def metadata_of(trained: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(trained.get_piece_size())
    types = [
        2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1 for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([trained.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": trained.bos_id(), "tokenizer.ggml.eos_token_id": trained.eos_id(),
    }  # fmt: skip


def model_of(tokenizer: Tokenizer, vocab_size: int = 720) -> Model:
    model = onfoot.create(onfoot.LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    ), engine="numpy")  # fmt: skip
    model.tokenizer = tokenizer
    return model


def test_ids_and_texts_are_those_of_sentencepiece(trained: Any, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata_of(trained), tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == trained.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.size) == ("<s>", "</s>", 700)
    assert tokenizer.encode("<s>a</s>")[0] == 1 and tokenizer.encode("<s>a</s>")[-1] == 2
    assert tokenizer.backend.encode("a").ids == [1, *trained.encode("a")]  # its own encoding begins with <s>


def test_without_a_space_prefix_the_text_begins_as_it_is(trained: Any, tmp_path: Path) -> None:
    metadata = {**metadata_of(trained), "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = read_tokenizer(metadata, tmp_path)
    for text in ("the brown", " the", "日"):
        assert trained.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text)).lstrip(" ")
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" the") == trained.encode("the") != tokenizer.encode("the")
    assert tokenizer.backend.encode("a").ids == tokenizer.encode("a")


def test_a_written_tokenizer_is_read_as_the_same(trained: Any, tmp_path: Path) -> None:
    metadata = metadata_of(trained)
    tokenizer = read_tokenizer(metadata, tmp_path)
    export_model(model_of(tokenizer), tmp_path / "model.gguf")
    again = onfoot.load(tmp_path / "model.gguf", engine="numpy").tokenizer
    assert again is not None
    first, second = (json.loads(x.backend.to_str()) for x in (tokenizer, again))
    assert first == second
    assert again.size == 700 and (again.bos, again.eos) == ("<s>", "</s>")
    written = tokenizer_metadata(tokenizer, model_of(tokenizer).config)
    assert (written["tokenizer.ggml.token_type"][:700] == metadata["tokenizer.ggml.token_type"]).all()
    theirs, ours = metadata["tokenizer.ggml.scores"], written["tokenizer.ggml.scores"]
    merged = [i for i in range(700) if len(trained.id_to_piece(i)) > 1 and theirs[i] < 0]
    assert (np.argsort(-theirs[merged], kind="stable") == np.argsort(-ours[merged], kind="stable")).all()
    assert written["tokenizer.ggml.add_bos_token"] is True and written["tokenizer.ggml.add_eos_token"] is False


def test_transformers_reads_the_same_ids_from_an_exported_file(trained: Any, tmp_path: Path) -> None:
    export_model(model_of(read_tokenizer(metadata_of(trained), tmp_path)), tmp_path / "model.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    texts = [text for text in TEXTS if not text.startswith(" ")]  # theirs adds no space before a space
    for text in texts[:100]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == trained.encode(text)


def test_a_saved_folder_and_the_metaspace_form_are_recognised(trained: Any, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata_of(trained), tmp_path)
    config = model_of(tokenizer).config
    expected = tokenizer_metadata(tokenizer, config)
    tokenizer.save(tmp_path, 32)
    state = json.loads(tokenizer.backend.to_str())
    metaspace = pre_tokenizers.Metaspace("▁", "first", split=False)
    state |= {"normalizer": None, "pre_tokenizer": json.loads(metaspace.__getstate__())}
    for other in (Tokenizer.load(tmp_path), Tokenizer(Backend.from_str(json.dumps(state)), "</s>", "<s>")):
        found = tokenizer_metadata(other, config)
        assert {k: v for k, v in found.items() if not isinstance(v, np.ndarray)} == {
            k: v for k, v in expected.items() if not isinstance(v, np.ndarray)
        }
        assert (found["tokenizer.ggml.scores"] == expected["tokenizer.ggml.scores"]).all()


def test_merges_that_no_scores_give_are_refused(trained: Any, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata_of(trained), tmp_path)
    state = json.loads(tokenizer.backend.to_str())
    del state["model"]["merges"][-1]
    with pytest.raises(ValueError, match="cannot be stored in a GGUF file: its merges do not follow from one score"):
        tokenizer_metadata(Tokenizer(Backend.from_str(json.dumps(state))), model_of(tokenizer).config)
    vocab, types = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}, np.ones(5, np.int32)
    merges = [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]
    assert scores_of(vocab, merges, types).tolist() == [-3, -4, -1, 0, -2]
    assert merges_by_score(vocab, np.array([0, 0, 1, 2, 3]), np.array([1, 1, 3, 1, 1])) == [
        ("a", "ba"), ("ab", "a"), ("b", "a"),
    ]  # fmt: skip
    del state["model"]["vocab"]["<0x41>"]
    with pytest.raises(ValueError, match="it has no byte token <0x41>"):
        tokenizer_metadata(Tokenizer(Backend.from_str(json.dumps(state))), model_of(tokenizer).config)


def test_a_vocabulary_that_would_take_long_to_read_is_refused(tmp_path: Path) -> None:
    """Each token is split at each of its characters."""
    tokens = [f"{i:06d}{'a' * 250}" for i in range(17_000)]
    numbers = {"scores": np.zeros(17_000, np.float32), "token_type": np.ones(17_000, np.int32)}
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    with pytest.raises(ValueError, match="its tokens have 4,352,000 characters in all; the limit is 4,194,304"):
        read_tokenizer(metadata | {f"tokenizer.ggml.{name}": x for name, x in numbers.items()}, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", None, "tokenizer.ggml.scores must be an array of 700 numbers"),
        ("scores", np.zeros(699, np.float32), "tokenizer.ggml.scores must be an array of 700 numbers"),
        ("scores", np.full(700, np.nan, np.float32), "tokenizer.ggml.scores has values that are not finite"),
        ("token_type", ["a"] * 700, "tokenizer.ggml.token_type must be an array of 700 numbers"),
        ("token_type", np.ones(3, np.int32), "tokenizer.ggml.token_type must be an array of 700 numbers"),
        ("tokens", 5, "tokenizer.ggml.tokens is missing or not an array of strings"),
        ("model", np.arange(3), "tokenizer array.* is not supported"),
        ("tokens", ["x" * (MAX_TOKEN + 1)] * 700, "token 699 has 257 characters; the limit is 256"),
    ],
    ids=str,
)  # fmt: skip
def test_damaged_tokenizers_are_refused_by_name(
    trained: Any, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    metadata = {**metadata_of(trained), f"tokenizer.ggml.{key}": value}
    if key == "tokens":
        metadata["tokenizer.ggml.token_type"] = np.ones(700, np.int32)
    with pytest.raises(ValueError, match=message) as caught:
        read_tokenizer(metadata, tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value) and "\n" not in str(caught.value)
