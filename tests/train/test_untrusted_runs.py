"""Run files and training data may be untrusted: a one-line error names what cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onfoot.data import corpus
from onfoot.data.bigram import bigram_loss
from onfoot.data.sft import load_source
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train.options import FinetuneOptions, TrainOptions


def saved(path: Path, **changes: Any) -> Path:
    from dataclasses import asdict

    path.write_text(json.dumps({"command": "train", **asdict(TrainOptions()), **changes}))
    return path


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    assert TrainOptions.load(saved(tmp_path / "run.json")) == TrainOptions()
    assert TrainOptions.load(saved(tmp_path / "run.json", lr=1, init="x")) == TrainOptions(lr=1, init="x")


@pytest.mark.parametrize(
    "changes",
    [{"steps": "5"}, {"steps": 1.5}, {"steps": True}, {"steps": 10**400}, {"steps": None}, {"steps": [5]},
     {"lr": "0.1"},
     {"lr": float("nan")}, {"lr": float("inf")}, {"clip": None}, {"betas": 3}, {"betas": [0.9]}, {"betas": ["a", "b"]},
     {"betas": [[0.9], 0.9]}, {"watch": 1}, {"texts": "a"}, {"texts": [1]}, {"texts": None}, {"init": 3},
     {"engine": ["numpy"]},
     {"schedule": {}}, {"dtype": 32}, {"tokenizer": None}, {"seed": 2**70}, {"x\ny": 1}, {"dropout": "none"}],
    ids=str,
)  # fmt: skip
def test_options_of_other_types_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path / "run.json", **changes)
    with pytest.raises(ValueError, match=r"run\.json") as caught:
        TrainOptions.load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"command": ["train"]}', b'{"command": "x\\ny"}']
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    for kind in (TrainOptions, FinetuneOptions):
        with pytest.raises(ValueError, match=str(tmp_path)) as caught:
            kind.load(tmp_path / "run.json")
        assert "\n" not in str(caught.value)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("to be or not to be")
    corpus.write_tokens(corpus.find_texts([tmp_path / "a.txt"]), byte_tokenizer(), tmp_path / "data")
    assert len(corpus.open_tokens(tmp_path / "data")) == 18
    return tmp_path / "data"


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "object"}, {"dtype": "float64"}, {"dtype": ["u2", "u2"]}, {"dtype": None}, {"tokens": -1},
     {"tokens": "18"},
     {"tokens": 18.0}, {"tokens": 10**30}, {"tokens": 17}, {"sha256": 5}, {"sha256": None}, {"dtype": "uint32"}],
    ids=str,
)  # fmt: skip
def test_a_tokens_json_that_does_not_match_is_rejected(data: Path, changes: dict[str, Any]) -> None:
    path = data / "tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=r"tokens\.(json|bin)") as caught:
        corpus.open_tokens(data)
        corpus.check_tokens(data)
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_are_refused_before_they_are_counted(data: Path) -> None:
    ids = np.array([1, 2, 2**32 - 1], np.uint32)
    (data / "tokens.bin").write_bytes(ids.tobytes())
    meta = {**json.loads((data / "tokens.json").read_text()), "dtype": "uint32", "tokens": 3}
    (data / "tokens.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"tokens\.bin has the id 4294967295, but vocab_size is 257"):
        bigram_loss(corpus.open_tokens(data), corpus.open_tokens(data), 257)


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
def test_a_pipe_among_the_texts_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=str(tmp_path)):
        corpus.find_texts([tmp_path / name])
    with pytest.raises(ValueError, match="is not a regular file"):
        list(corpus.all_pieces([corpus.Text(name, path=tmp_path / name)]))


@pytest.mark.parametrize(
    "line",
    [b'{"prompt": "a", "completion": ' + b"[" * 100_000, b'{"prompt": "\\ud800", "completion": "b"}',
     b'{"prompt": "a", "prompt": "b", "completion": "c"}', b'{"prompt": "a", "completion": ' + b"9" * 5000 + b"}",
     b"[" + b"[]," * 1_100_000 + b"[]]", b'{"messages": [{"role": ["user"], "content": "a"}]}',
     b'{"messages": [{"role": "x\\ny", "content": "a"}]}', b'{"x\\ny": 1}', b'{"messages": {"role": "user"}}'],
    ids=["deep", "half a character", "a key twice", "a long number", "a million values", "a list as a role",
         "a role of two lines",
         "a field of two lines", "an object"],
)  # fmt: skip
def test_lines_that_make_no_sense_are_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "completion": "c"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2") as caught:
        load_source([path], byte_tokenizer(), ChatTemplate(), max_length=100, batch_size=1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_an_unpaired_surrogate_in_a_training_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: .*unpaired"):
        corpus.write_tokens(corpus.find_texts([tmp_path / "b.jsonl"]), byte_tokenizer(), tmp_path / "data")
