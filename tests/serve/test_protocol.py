"""Any JSON value as a request: it is understood, or refused with an error that can be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_in_thread import chat_model

from onfoot.serve.protocol import UNSUPPORTED, Limits, Order, RequestError, Served, read_order

SERVED = Served(chat_model("numpy"), "tiny", Limits(100, 50))
SURROGATE = "\ud800"
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(SURROGATE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]) | VALUES, "content": VALUES}),
    max_size=3,
)
FIELDS = [
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "stop", "seed", "logprobs", "top_logprobs", "stream", "stream_options", *UNSUPPORTED,
]  # fmt: skip


def outcome(body: Any, is_chat: bool) -> str:
    """What becomes of a request."""
    try:
        order = read_order(body, SERVED, is_chat)
    except RequestError as error:
        json.dumps(error.to_json(), ensure_ascii=False).encode("utf-8")
        assert 400 <= error.status < 500
        return "refused"
    assert isinstance(order, Order)
    assert all(len(p) + n <= 100 for p, n in zip(order.prompts, order.max_tokens, strict=True))
    return "understood"


@settings(max_examples=400)
@given(
    is_chat=st.booleans(),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES | MESSAGES, max_size=3),
)
def test_any_values_are_understood_or_refused(is_chat: bool, changes: dict[str, Any]) -> None:
    base = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    assert outcome(base, is_chat) == "understood"
    assert outcome({**base, **changes}, is_chat) in ("understood", "refused")


@given(body=VALUES)
def test_any_body_is_refused(body: Any) -> None:
    assert outcome(body, True) == "refused"


@pytest.mark.parametrize("prompt", [[], "", [[]], [""], [1, "a"], [[1], "a"], [1.0], [True], [10**6], [-1], None, 3])
def test_prompts_of_any_form(prompt: Any) -> None:
    right = {"": "understood", "['']": "understood", "[[1], 'a']": "understood"}
    assert outcome({"model": "tiny", "prompt": prompt}, False) == right.get(str(prompt), "refused")
