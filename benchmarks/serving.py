"""Tokens per second of `onfoot serve`, with one client and with several, over HTTP.

    python benchmarks/serving.py --out benchmarks/serving.json

starts a server of SmolLM2 (135M), quantised as in its GGUF file and in float32. Each client sends chats one after the
other, at temperature 0, and waits for the whole answer. Takes about a minute per model on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onfoot
from onfoot.recording import pool
from onfoot.serve.protocol import Limits, Served
from onfoot.serve.run import listen, new_server
from onfoot.serve.scheduler import Scheduler

QUESTIONS = [
    "What is the capital of France?", "Why is the sky blue?", "Write a poem about rain.", "What is a prime number?",
    "Tell me a story about a fox.", "How do I boil an egg?", "Who wrote Hamlet?", "What is a transformer?",
]  # fmt: skip


def ask(port: int, question: str, tokens: int) -> int:
    """Sends one chat; the number of new tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": tokens}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["usage"]["completion_tokens"])


def rate(port: int, clients: int, requests: int, tokens: int) -> float:
    """New tokens per second of all clients together."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        made = sum(
            threads.map(
                lambda i: ask(port, f"{QUESTIONS[i % len(QUESTIONS)]} ({clients}.{i})", tokens),
                range(clients * requests),
            )
        )
    return made / (time.perf_counter() - begin)


def measure(quantized: bool, clients: int, requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The rates with one client and with several; the best of some repeats each, taken in turn."""
    model = onfoot.load("smollm2", quantized=quantized)
    scheduler = Scheduler(model, clients, 2048)
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = new_server(Served(model, "m", Limits(2048, 2048)), scheduler, listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    scheduler.start()
    thread.start()
    rate(port, clients, 1, 8)  # records the steps
    one, several = [], []
    for _ in range(repeats):
        one.append(rate(port, 1, max(1, requests), tokens))
        several.append(rate(port, clients, requests, tokens))
    server.should_exit = True
    scheduler.stop()
    thread.join(30)
    out = {"one client": max(one), f"{clients} clients": max(several), "ratio": max(several) / max(one)}
    return {key: round(value, 2) for key, value in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1, help="per client")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "threads": pool.threads(),
        "tokens per answer": options.tokens,
        "tokens per second": {},
    }
    for name, quantized in (("smollm2, quantised", True), ("smollm2, float32", False)):
        rates = measure(quantized, options.clients, options.requests, options.tokens, options.repeats)
        found["tokens per second"][name] = rates
        print(name, rates, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
