"""Stop strings and log-probabilities of an answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onfoot.formats.tokenizer import byte_tokenizer, char_tokenizer
from onfoot.generate.stop import StopStrings
from onfoot.serve.answer import Answer, token_logprob


def cut(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first; of several, the longest."""
    ends = [(i + len(s), i) for s in stop if (i := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=300)
@given(
    parts=st.lists(st.text("ab.", max_size=4), max_size=12),
    stop=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3),
)
def test_a_text_in_any_parts_is_cut_before_the_first_stop_string(parts: list[str], stop: list[str]) -> None:
    strings, shown = StopStrings(stop), ""
    for i, part in enumerate(parts):
        more, stopped = strings.add(part)
        shown += more
        so_far = "".join(parts[: i + 1])
        assert stopped == any(s in so_far for s in stop)
        assert cut(so_far, stop).startswith(shown)
        if stopped:
            break
    else:
        shown += strings.finish()
    assert shown == cut("".join(parts[: i + 1]) if parts else "", stop)


@settings(max_examples=150)
@given(text=st.text("ab.", min_size=1, max_size=30), stop=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=2))
def test_pieces_have_the_text_before_the_stop_string_and_one_entry_per_character(text: str, stop: list[str]) -> None:
    tokenizer = char_tokenizer(["ab."])
    answer, pieces = Answer(tokenizer, len(text), stop=stop, top_logprobs=2), []
    for token in tokenizer.encode(text):
        pieces.append(answer.add(token, np.zeros(tokenizer.size, np.float32)))
        if pieces[-1].finish_reason:
            break
    ends = (end for end in range(1, len(text) + 1) if any(s in text[:end] for s in stop))
    right = cut(text[: next(ends, len(text))], stop)  # the first stop string that is complete
    assert "".join(piece.text for piece in pieces) == right
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert tokenizer.decode([entry.token for entry in entries]) == right
    assert [entry.offset for entry in entries] == list(range(len(right)))
    assert pieces[-1].finish_reason == ("stop" if right != text else "length")
    assert pieces[-1].n_tokens == len(pieces)


def test_an_incomplete_character_is_shown_at_the_end_and_a_stop_token_is_not() -> None:
    tokenizer = byte_tokenizer()
    llama, logits = tokenizer.encode("🦙"), np.zeros(tokenizer.size, np.float32)
    answer = Answer(tokenizer, 9, stop_ids=[llama[0]], stop=["�!"])
    pieces = [answer.add(token, logits) for token in (*llama[1:3], llama[0])]
    assert [piece.text for piece in pieces][-1] == "�"  # held back: a stop string may begin with it
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].n_tokens == 3
    answer = Answer(tokenizer, 3)
    assert [answer.add(token, logits).text for token in llama[:3]] == ["", "", "�"]


def test_logprobs_are_the_log_softmax_of_the_logits() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 50).astype(np.float32)
    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    entry = token_logprob(7, logits, 5, 0)
    assert np.isclose(entry.logprob, np.log(p[7]), rtol=1e-12)
    assert [i for i, _ in entry.top] == np.argsort(-p)[:5].tolist()
    np.testing.assert_allclose([value for _, value in entry.top], np.sort(np.log(p))[::-1][:5], rtol=1e-12)
    assert len(token_logprob(7, logits, 0, 0).top) == 0
    assert len(token_logprob(7, logits, 80, 0).top) == 50
