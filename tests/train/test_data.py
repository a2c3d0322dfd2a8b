"""Data: every token is a target once per epoch, the order is fixed, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onfoot.data import corpus
from onfoot.data.windows import Windows, split
from onfoot.formats.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.integers(2, 200), st.integers(1, 30), st.integers(0, 100), st.integers(1, 7))
def test_an_epoch_has_every_token_but_the_first_as_a_target_once(n: int, context: int, seed: int, batch: int) -> None:
    windows = Windows(np.arange(n), context, seed)
    seen: list[int] = []
    for first in range(0, len(windows), batch):
        tokens, targets = windows.sample(first, min(batch, len(windows) - first))
        counts = targets != -100
        assert (targets[counts] == tokens[counts] + 1).all()
        seen += targets[counts].tolist()
    assert sorted(seen) == list(range(1, n))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    windows = Windows(np.arange(1000), 10, seed=3)
    whole = windows.sample(0, 250)[0]
    apart = np.concatenate([Windows(np.arange(1000), 10, seed=3).sample(i, 25)[0] for i in range(0, 250, 25)])
    assert (whole == apart).all()
    assert (whole[:100] != whole[100:200]).any()  # another order in the second epoch
    assert sorted(whole[:100, 0]) == sorted(whole[100:200, 0])
    assert (Windows(np.arange(1000), 10, seed=4).sample(0, 100)[0] != whole[:100]).any()


def test_the_split_leaves_nothing_out_and_refuses_short_texts() -> None:
    train, held_out = split(np.arange(100), 0.2, 9)
    assert (np.concatenate([train, held_out]) == np.arange(100)).all() and len(held_out) == 20
    with pytest.raises(ValueError, match="100 tokens, which leaves 20 for validation: less than one window of 20"):
        split(np.arange(100), 0.2, 20)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_text_files_folders_and_jsonl_are_tokenised_into_one_mapped_file(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "b.txt", "second")
    write(tmp_path / "in" / "deep" / "c.jsonl", '{"text": "third"}\n\n{"text": "four\\u2028th"}\n')
    write(tmp_path / "in" / "ignored.csv", "x")
    first = write(tmp_path / "a.txt", "first")
    texts = corpus.find_texts([first, tmp_path / "in"])
    tokens = corpus.write_tokens(texts, TOKENIZER, tmp_path / "data")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    end = TOKENIZER.eos_id
    expected = [i for text in ("first", "second", "third", "four\u2028th") for i in [*TOKENIZER.encode(text), end]]
    assert tokens.tolist() == expected
    assert (corpus.open_tokens(tmp_path / "data") == tokens).all()


def test_a_bom_and_upper_case_suffixes_make_no_difference(tmp_path: Path) -> None:
    plain = [write(tmp_path / "a.txt", "text"), write(tmp_path / "b.jsonl", '{"text": "one"}\n{"text": "two"}\n')]
    marked = tmp_path / "marked"
    marked.mkdir()
    for path in plain:
        write(marked / path.name.upper(), b"\xef\xbb\xbf" + path.read_bytes())
    expected = list(corpus.all_pieces(corpus.find_texts(plain)))
    assert expected == ["text", "one", "two"]
    for paths in ([marked], sorted(marked.iterdir())):
        assert list(corpus.all_pieces(corpus.find_texts(paths))) == expected
    tokens = [corpus.write_tokens(corpus.find_texts(p), TOKENIZER, tmp_path / "d").tolist() for p in (plain, [marked])]
    assert tokens[0] == tokens[1]
    bad = write(tmp_path / "bad.txt", b"\xef\xbb\xbfgood\xff")
    with pytest.raises(ValueError, match="byte 0xff at position 7"):
        list(corpus.all_pieces(corpus.find_texts([bad])))


def test_a_text_may_have_any_suffix_or_none(tmp_path: Path) -> None:
    texts = {"a.md": "# one", "b.py": "two = 2", "c": "three", "d.log": "four", "e.TXT": "five"}
    paths = [write(tmp_path / name, text) for name, text in texts.items()]
    assert list(corpus.all_pieces(corpus.find_texts(paths))) == list(texts.values())


def test_a_folder_is_searched_for_text_by_suffix_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.md", "b.py", "c.rst", "d.tex", "e.txt", "f.bin", "g", "h.json", ".i.txt", ".git/j.txt", "k/l.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name)
    assert list(corpus.all_pieces(corpus.find_texts([tmp_path]))) == [
        "a.md",
        "b.py",
        "c.rst",
        "d.tex",
        "e.txt",
        "k/l.md",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%PDF-1.7\n", "is a PDF file, not UTF-8 text; convert it first"),
        (b"PK\x03\x04ab", "is a ZIP archive"),
        (b"\x1f\x8b\x08", "is compressed with gzip"),
        ("Grüße".encode("utf-16"), "is UTF-16 text, not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\0", r"is a binary file \(byte 0 at position 7\), not UTF-8 text"),
    ],
)
def test_files_that_are_not_text_are_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=rf"book {message}"):
        corpus.find_texts([write(tmp_path / "book", content)])


def test_kinds_that_are_not_expected_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a\.txt is a \.txt file, expected \.jsonl or \.csv; rename or convert it; plain text is for"
    ):
        corpus.find_texts([write(tmp_path / "a.txt", "x")], (".jsonl", ".csv"))
    with pytest.raises(ValueError, match=r"a is a file without a suffix, expected \.jsonl"):
        corpus.find_texts([write(tmp_path / "a", "x")], (".jsonl",))


def test_long_files_are_read_in_pieces_without_losing_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 64)
    for text in ("zeile äöü\n" * 100, "äöü€𝄞" * 700):  # with line ends, and without any
        path = write(tmp_path / "x.txt", text)
        pieces = list(corpus.all_pieces(corpus.find_texts([path])))
        assert len(pieces) > 3 and "".join(pieces) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b"good\n\xff bad", r"a\.txt is not valid UTF-8: byte 0xff at position 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', r'a\.jsonl, line 1: the field "text" is missing'),
        ("a.jsonl", b'["x"]\n', r'a\.jsonl, line 1: the field "text" is missing'),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        corpus.write_tokens(corpus.find_texts([path]), TOKENIZER, tmp_path / "data")


def test_missing_files_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.txt does not exist"):
        corpus.find_texts([tmp_path / "nothing.txt"])
    with pytest.raises(ValueError, match=r"has no \.txt, \.md, \.rst, \.tex, \.py, \.jsonl or \.parquet file"):
        corpus.find_texts([tmp_path])


def test_a_truncated_token_file_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "some text")
    corpus.write_tokens(corpus.find_texts([path]), TOKENIZER, tmp_path)
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"tokens\.bin has 15 bytes, which is not 9 uint16 tokens"):
        corpus.open_tokens(tmp_path)
    assert json.loads((tmp_path / "tokens.json").read_text())["tokens"] == 9


def test_python_ships_half_a_megabyte_of_training_text() -> None:
    text = corpus.builtin_text().text
    assert text is not None and 300_000 < len(text) < 1_000_000
