"""The openai package as the client: chat, completions, streams, stop strings, choices, log-probabilities and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from serve_in_thread import Running

from onfoot.generate.chat import prompt_ids
from onfoot.models.model import Model

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
Sequential = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


@pytest.fixture(scope="module")
def ids(model: Model) -> list[int]:
    return prompt_ids(model, QUESTION).tolist()


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "onfoot"


def test_a_chat_is_answered_as_by_generate(client: openai.OpenAI, ids: list[int], sequential: Sequential) -> None:
    got = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, max_completion_tokens=40)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == sequential(ids, 40)
    assert got.choices[0].message.role == "assistant"
    assert got.usage.prompt_tokens == len(ids)
    assert got.usage.completion_tokens == 40
    assert got.usage.total_tokens == len(ids) + 40
    assert got.object == "chat.completion" and got.id.startswith("chatcmpl-")


def test_a_streamed_chat_has_the_same_text_and_its_usage_at_the_end(
    client: openai.OpenAI, ids: list[int], sequential: Sequential
) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=QUESTION, temperature=0, max_tokens=40, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert (text, chunks[-2].choices[0].finish_reason) == sequential(ids, 40)
    assert len(chunks) > 30
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_an_answer_ends_at_the_end_of_text(client: openai.OpenAI, model: Model, sequential: Sequential) -> None:
    assert model.tokenizer is not None
    prompts = [f"{letter} is" for letter in "abcdefghijklmnop"]
    answers = [sequential(model.tokenizer.encode(prompt), 150) for prompt in prompts]
    assert {reason for _, reason in answers} == {"stop", "length"}  # both occur
    for prompt, right in zip(prompts, answers, strict=True):
        got = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=150)
        assert (got.choices[0].text, got.choices[0].finish_reason) == right


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_a_stop_string(
    client: openai.OpenAI, ids: list[int], sequential: Sequential, stream: bool
) -> None:
    whole, _ = sequential(ids, 40)
    stop = ["never", whole[20:23]]
    got = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=40, stop=stop, stream=stream
    )
    if stream:
        chunks = list(got)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert (text, reason) == (whole[: whole.find(stop[1])], "stop")


@pytest.mark.parametrize("more", [{}, {"top_p": 0.7}])
def test_several_choices_are_those_of_generate_with_the_same_seed(
    client: openai.OpenAI, ids: list[int], sequential: Sequential, more: dict[str, float]
) -> None:
    got = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0.8, max_tokens=25, n=3, seed=11, **more
    )
    right = [sequential(ids, 25, 0.8, 11, row, **more)[0] for row in range(3)]
    assert [choice.message.content for choice in got.choices] == right
    assert len({*right}) == 3
    assert [choice.index for choice in got.choices] == [0, 1, 2]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    got = [client.completions.create(model="tiny", prompt="so", max_tokens=30).choices[0].text for _ in range(3)]
    assert len({*got}) == 3


def test_several_prompts_as_texts_or_ids(client: openai.OpenAI, model: Model, sequential: Sequential) -> None:
    assert model.tokenizer is not None
    encoded = [model.tokenizer.encode(text) for text in ("one", "and two")]
    for prompt in (["one", "and two"], encoded):
        got = client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert [choice.text for choice in got.choices] == [sequential(x, 16)[0] for x in encoded]
        assert got.usage.prompt_tokens == 10
    one = client.completions.create(model="tiny", prompt=encoded[1], temperature=0)
    assert one.choices[0].text == got.choices[1].text


def logprobs(model: Model, ids: list[int], n: int) -> np.ndarray:
    """The log-probabilities (n, V) of the last n tokens' predictions, by the formulas in float64."""
    exact = Model(model.config, model.params, "float64", "numpy")
    logits = exact.logits(np.array([ids]))[0, -n - 1 : -1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, model: Model, ids: list[int], stream: bool) -> None:
    assert model.tokenizer is not None
    got = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=1.0, seed=3, max_tokens=12, logprobs=True, top_logprobs=4,
        stream=stream,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    entries = [entry for choice in choices for entry in (choice.logprobs.content if choice.logprobs else [])]
    assert len(entries) == 12
    tokens = [model.tokenizer.backend.token_to_id(entry.token) for entry in entries]
    right = logprobs(model, ids + tokens, 12)
    np.testing.assert_allclose([entry.logprob for entry in entries], right[np.arange(12), tokens], atol=1e-5)
    for entry, row in zip(entries, right, strict=True):
        best = [model.tokenizer.backend.token_to_id(one.token) for one in entry.top_logprobs]
        np.testing.assert_allclose([one.logprob for one in entry.top_logprobs], np.sort(row)[::-1][:4], atol=1e-5)
        np.testing.assert_allclose(row[best], np.sort(row)[::-1][:4], atol=1e-5)
        assert bytes(entry.bytes).decode() == entry.token


def test_logprobs_of_a_completion(client: openai.OpenAI, model: Model) -> None:
    assert model.tokenizer is not None
    prompt = "Once upon"
    got = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=9, logprobs=2).choices[0]
    ids = model.tokenizer.encode(prompt + got.text)
    right = logprobs(model, ids, 9)
    assert "".join(got.logprobs.tokens) == got.text
    np.testing.assert_allclose(got.logprobs.token_logprobs, right.max(-1), atol=1e-5)
    assert got.logprobs.text_offset == list(range(9))
    np.testing.assert_allclose(
        [sorted(top.values()) for top in got.logprobs.top_logprobs], np.sort(right)[:, -2:], atol=1e-5
    )


@pytest.mark.parametrize(
    "change, status, what",
    [
        ({"model": "other"}, 404, "does not exist; this server has 'tiny'"),
        ({"messages": []}, 400, "non-empty list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "text"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "tools are not supported"),
        ({"messages": [{"role": "user", "content": "ünknown"}]}, 400, "vocabulary"),
        ({"messages": [{"role": "user", "content": "long " * 60}]}, 400, "leaves no room"),
        ({"temperature": 3}, 400, r"temperature must be a number in \[0, 2\], got 3"),
        ({"temperature": "hot"}, 400, "temperature must be a number"),
        ({"top_p": -0.1}, 400, "top_p"),
        ({"n": 0}, 400, r"n must be an integer in \[1, 16\]"),
        ({"n": 17}, 400, r"n must be an integer in \[1, 16\]"),
        ({"max_tokens": 201}, 400, r"max_tokens must be an integer in \[1, 200\]"),
        ({"max_completion_tokens": 200, "messages": [{"role": "user", "content": "x" * 100}]}, 400, "exceeds the con"),
        ({"stop": [""]}, 400, "stop string"),
        ({"stop": list("abcde")}, 400, "at most 4"),
        ({"top_logprobs": 2}, 400, "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        ({"logit_bias": {"3": 5}}, 400, "logit_bias is not supported"),
        ({"seed": 1.5}, 400, "seed must be an integer"),
        ({"stream": "yes"}, 400, "stream must be true or false"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_have_openais_form(client: openai.OpenAI, change: dict[str, Any], status: int, what: str) -> None:
    body = {"model": "tiny", "messages": QUESTION, **change}
    with pytest.raises(openai.APIStatusError, match=what) as error:
        client.post("/chat/completions", body=body, cast_to=object)
    assert error.value.status_code == status
    found = error.value.response.json()["error"]
    assert found["type"] == "invalid_request_error"
    assert set(found) == {"message", "type", "param", "code"}


def test_harmless_fields_are_ignored(client: openai.OpenAI, ids: list[int], sequential: Sequential) -> None:
    harmless = {
        "user": "me", "store": False, "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto", "unheard_of": 1,
        "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"},
    }  # fmt: skip
    got = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=5, extra_body=harmless
    )
    assert got.choices[0].message.content == sequential(ids, 5)[0]


def test_content_in_text_parts_and_a_developers_message(
    client: openai.OpenAI, ids: list[int], sequential: Sequential
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]},
    ]
    got = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert got.choices[0].message.content == sequential(ids, 20)[0]


def post(running: Running, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    """The status and the JSON object of a response, by the standard library."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b"[" * 5000, b""])
def test_a_body_that_is_not_a_json_object_is_refused(running: Running, body: bytes) -> None:
    status, found = post(running, body)
    assert status == 400
    assert found["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_refused(running: Running) -> None:
    status, found = post(running, b" " * (1 << 16) + b"{}")
    assert status == 413
    assert "at most 65,536 bytes" in found["error"]["message"]
    parts: Any = (b" " * 1000 for _ in range(70))  # without a Content-Length
    assert post(running, parts)[0] == 413


def test_an_unknown_path_has_an_error_in_the_same_form(running: Running) -> None:
    assert post(running, b"{}", "/v1/embeddings")[0] == 404
    assert post(running, b"{}", "/v1/models")[0] == 405


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_without_a_key_other_pages_are_refused(running: Running, header: dict[str, str]) -> None:
    status, found = post(running, b"{}", **header)
    assert status == 403
    assert "127.0.0.1" in found["error"]["message"]
