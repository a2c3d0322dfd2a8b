"""Where text ends: before or after a string, wherever the pieces are cut, and at a stop id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.generate.decode import StreamDecoder
from onfoot.generate.stop import StopStrings, cut, texts

BYTES = byte_tokenizer()
WORDS = st.lists(st.text("ab;", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("ab;", max_size=5), max_size=8), WORDS, WORDS)
def test_pieces_end_where_the_whole_text_does(pieces: list[str], before: list[str], after: list[str]) -> None:
    whole = "".join(pieces)
    lengths = [
        n for n in range(len(whole) + 1) if any(s in whole[:n] for s in before + after)
    ]  # one of them is complete
    read = whole[: min(lengths, default=len(whole))]
    ends = [read.index(s) for s in before if s in read] + [read.index(s) + len(s) for s in after if s in read]
    stop, shown, stopped = StopStrings(before, after), "", False
    for piece in pieces:
        text, stopped = stop.add(piece)
        shown += text
        if stopped:
            break
    assert shown + ("" if stopped else stop.finish()) == read[: min(ends, default=len(read))]
    assert stopped == bool(ends) and stop.finish() == ""


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    stop = StopStrings(before=["<|end|>"], after=["STOP"])
    assert [stop.add(piece) for piece in ("a<", "|e", "x", "<|end", "ST", "OP and")] == [
        ("a", False), ("", False), ("<|ex", False), ("", False), ("<|endST", False), ("OP", True),
    ]  # fmt: skip
    stop = StopStrings(before=["<|end|>"])
    assert stop.add("b<|en") == ("b", False) and stop.add("d|>c") == ("", True) and stop.finish() == ""


@pytest.mark.parametrize(
    ("written", "before", "after", "expected"),
    [
        ("one two three", [], ["zz", "two"], "one two"),
        ("one two three", [" two"], [], "one"),
        ("é→𝄞", [], [], "é→𝄞"),
        ("é→𝄞", ["𝄞"], [], "é→"),
        ("a;", [";b"], [], "a;"),  # held back, and then not a stop string
    ],
)
def test_tokens_end_at_strings_and_ids(written: str, before: list[str], after: list[str], expected: str) -> None:
    ids = BYTES.encode(written)
    assert "".join(texts(StreamDecoder(BYTES), ids, (), StopStrings(before, after))) == expected
    more = [*ids, 256, *BYTES.encode("more")]
    assert "".join(texts(StreamDecoder(BYTES), more, (256,), StopStrings(before, after))) == expected


def test_multi_byte_characters_come_complete_and_a_broken_one_at_the_end() -> None:
    ids = [*BYTES.encode("é→𝄞"), BYTES.encode("é")[0]]
    pieces = [text for text in texts(StreamDecoder(BYTES), ids, (), StopStrings()) if text]
    assert pieces == ["é", "→", "𝄞", "\ufffd"]


def test_a_whole_text_is_cut_after_its_prompt() -> None:
    ids = BYTES.encode("stop and go, stop; go")
    assert cut(BYTES, ids, 8, ["stop", "go"]) == "stop and go"
    assert cut(BYTES, ids, 11, ["stop", "xx"]) == "stop and go, stop"
    assert cut(BYTES, ids, 11, []) == "stop and go, stop; go"
