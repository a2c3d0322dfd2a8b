"""Many clients at once, clients that leave, reused prefixes, full queues, failures and the end of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from serve_in_thread import Running, chat_model

from onfoot.generate.chat import prompt_ids
from onfoot.generate.slots import SlotCache
from onfoot.models.model import Model
from onfoot.serve import scheduler

Start = Callable[..., Running]
Sequential = Callable[..., tuple[str, str]]


def chat(client: Any, text: str, tokens: int, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=tokens, **{"temperature": 0, **more}
    )


def test_32_clients_get_their_own_sequential_answers(start: Start, model: Model, sequential: Sequential) -> None:
    running = start()
    client = running.client()
    rng = np.random.default_rng(5)
    texts = ["".join(chr(c) for c in rng.integers(97, 123, rng.integers(1, 60))) for _ in range(32)]
    lengths = rng.integers(5, 60, 32).tolist()

    def ask(i: int) -> tuple[str, str]:
        got = chat(client, texts[i], lengths[i], stream=i % 3 == 0)
        if i % 3:
            return got.choices[0].message.content, got.choices[0].finish_reason
        chunks = list(got)
        return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    right = [
        sequential(prompt_ids(model, [{"role": "user", "content": text}]), n)
        for text, n in zip(texts, lengths, strict=True)
    ]
    assert answers == right
    assert running.scheduler.stats.largest_batch == 8
    assert running.scheduler.stats.requests == 32
    assert (running.scheduler.n_running, running.scheduler.n_waiting) == (0, 0)


def test_samples_do_not_depend_on_the_other_requests(start: Start, model: Model, sequential: Sequential) -> None:
    client = start().client()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(chat, client, "Say it", 30, temperature=1.0, seed=seed) for seed in range(8)]
        answers = [future.result().choices[0].message.content for future in futures]
    ids = prompt_ids(model, [{"role": "user", "content": "Say it"}])
    assert answers == [sequential(ids, 30, 1.0, seed)[0] for seed in range(8)]


def test_the_next_turn_of_a_conversation_reuses_the_prefix(start: Start, model: Model, sequential: Sequential) -> None:
    running = start(max_batch=2)
    client = running.client()
    messages: list[Any] = [{"role": "user", "content": "Tell me about the prefix of this text."}]
    before = 0
    for turn in range(3):
        got = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=30)
        ids = prompt_ids(model, messages)
        assert got.choices[0].message.content == sequential(ids, 30)[0]
        reused = got.usage.prompt_tokens_details.cached_tokens
        assert reused >= before
        assert (reused > 0) == (turn > 0)
        before = len(ids) - 1
        chat(client, "Something else, in between.", 5)  # takes the other slot
        messages += [
            {"role": "assistant", "content": got.choices[0].message.content},
            {"role": "user", "content": f"And then, in turn {turn}?"},
        ]
    assert running.scheduler.stats.reused_tokens > 0


def test_choices_and_equal_prompts_share_their_prefix(start: Start, model: Model, sequential: Sequential) -> None:
    running = start()
    text = "The same question for all of the choices."
    got = chat(running.client(), text, 20, n=4)
    ids = prompt_ids(model, [{"role": "user", "content": text}])
    assert [choice.message.content for choice in got.choices] == [sequential(ids, 20)[0]] * 4
    assert running.scheduler.stats.reused_tokens == 3 * (len(ids) - 1)


def test_a_long_prompt_is_computed_in_parts_while_others_go_on(
    start: Start, model: Model, sequential: Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CHUNK", 40)
    monkeypatch.setattr(scheduler, "REUSE", 10**9)
    sizes: list[int] = []
    prefill = SlotCache.prefill
    monkeypatch.setattr(SlotCache, "prefill", lambda self, s, x: (sizes.append(len(x)), prefill(self, s, x))[1])
    client = start().client()
    texts = ["x" * 250, "short", "y" * 120 + "z"]
    with ThreadPoolExecutor(3) as pool:
        answers = [got.choices[0].message.content for got in pool.map(lambda text: chat(client, text, 12), texts)]
    right = [sequential(prompt_ids(model, [{"role": "user", "content": text}]), 12)[0] for text in texts]
    assert answers == right
    assert max(sizes) <= 40 + scheduler.LAST
    assert len(sizes) > 6


def test_a_client_that_leaves_frees_its_slot(start: Start, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    running, client_gone = start(max_batch=1), threading.Event()
    next_logits, counts = SlotCache.next_logits, running.scheduler.stats

    def without_end(self: SlotCache, slots: Any, tokens: Any) -> np.ndarray:
        """Answers go on to their limit, but not past 50 tokens before the client is gone."""
        assert counts.generated_tokens < 50 or client_gone.wait(60)
        logits = next_logits(self, slots, tokens).copy()
        logits[:, list(model.eos_ids)] = -100
        return logits

    monkeypatch.setattr(SlotCache, "next_logits", without_end)
    stream = chat(running.client(), "Go on and on", 200, stream=True)
    next(iter(stream))
    running.wait_until(lambda: counts.generated_tokens >= 50)
    cancel, cancelled = running.scheduler.cancel, threading.Event()
    monkeypatch.setattr(running.scheduler, "cancel", lambda jobs: (cancel(jobs), cancelled.set()))
    stream.close()
    assert cancelled.wait(60)
    client_gone.set()
    running.wait_until(lambda: running.scheduler.n_running == 0)
    assert 50 <= counts.generated_tokens <= 52
    cancelled.clear()
    client_gone.clear()
    counts.generated_tokens = 0
    with pytest.raises(openai.APITimeoutError):  # a whole answer: the client closes its connection
        chat(running.client(timeout=0.3), "Go on and on, and more", 200, n=16)
    assert cancelled.wait(60)
    client_gone.set()
    running.wait_until(lambda: (running.scheduler.n_running, running.scheduler.n_waiting) == (0, 0))
    assert counts.generated_tokens <= 52
    assert len(chat(running.client(), "Still there?", 3).choices[0].message.content) == 3


def test_a_full_queue_is_an_error_that_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(max_batch=1, max_queue=1)
    client = running.client()
    gate = threading.Event()
    next_logits = SlotCache.next_logits
    monkeypatch.setattr(SlotCache, "next_logits", lambda self, s, x: (gate.wait(60), next_logits(self, s, x))[1])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chat, client, "first", 3)
        running.wait_until(lambda: running.scheduler.n_running == 1)
        second = pool.submit(chat, client, "second", 3)
        running.wait_until(lambda: running.scheduler.n_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="1 answers are waiting, the limit is 1"):
            chat(client, "third", 3)
        gate.set()
        assert first.result().choices[0].finish_reason == "length"
        assert second.result().choices[0].finish_reason == "length"


def test_a_failure_ends_its_requests_and_not_the_server(
    start: Start, model: Model, sequential: Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start().client()

    def fail(*args: Any) -> Any:
        raise RuntimeError("a planted failure")

    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "next_logits", fail)
        with pytest.raises(openai.InternalServerError, match="a planted failure"):
            chat(client, "first", 9)
        with pytest.raises(openai.APIError, match="a planted failure"):
            list(chat(client, "streamed", 9, stream=True))
    right = sequential(prompt_ids(model, [{"role": "user", "content": "first"}]), 9)[0]
    assert chat(client, "first", 9).choices[0].message.content == right


def test_a_key_is_required_where_there_is_one(start: Start) -> None:
    running = start(key="secret")
    assert chat(running.client(api_key="secret"), "hello", 3).choices[0].finish_reason == "length"
    for key in ("none", "secre", "secret2"):
        with pytest.raises(openai.AuthenticationError, match="valid key"):
            running.client(api_key=key).models.list()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{running.url}/v1/models", timeout=30)
    with urllib.request.urlopen(f"{running.url}/health", timeout=30) as response:
        assert json.load(response)["status"] == "ok"


def test_any_engine_can_serve(start: Start, sequential: Sequential) -> None:
    model = chat_model("numpy")
    client = start(model).client()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda text: chat(client, text, 12).choices[0].message.content, "abc"))
    assert model.tokenizer is not None
    for text, answer in zip("abc", answers, strict=True):
        ids = prompt_ids(model, [{"role": "user", "content": text}])
        out = model.generate([ids], 12, 0.0, stop_ids=model.eos_ids)[0]
        assert answer == model.tokenizer.decode(out[len(ids) :].tolist())


def test_ctrl_c_ends_the_answers_and_the_server(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "tiny")
    process = subprocess.Popen(
        [sys.executable, "-m", "onfoot", "serve", str(tmp_path / "tiny"), "--port", "0", "--context", "300"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "ONFOOT_API_KEY": ""},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http"))
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        prompt = [{"role": "user", "content": "Go on"}]
        more = {"temperature": 2.0, "extra_body": {"top_k": 40}, "n": 16}
        chunks = client.chat.completions.create(model="tiny", messages=prompt, stream=True, **more)
        next(iter(chunks))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(chunks)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
