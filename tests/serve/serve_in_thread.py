"""A small chat model, and a server of it in a thread."""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openai

import onfoot
from onfoot.formats.tokenizer import Tokenizer, char_tokenizer
from onfoot.models.model import Model
from onfoot.serve.protocol import Limits, Served
from onfoot.serve.run import listen, new_server
from onfoot.serve.scheduler import Scheduler

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_model(engine: str = "auto") -> Model:
    """A model of characters with random weights and a chat template."""
    tokenizer = char_tokenizer([string.ascii_letters + string.digits + " .,:;!?[]\n"])
    config = onfoot.LlamaConfig(
        vocab_size=tokenizer.size, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=320,
    )  # fmt: skip
    model = onfoot.create(config, 0, engine=engine)
    rng = np.random.default_rng(1)
    for p in model.params.values():
        p += rng.normal(0, 0.25, p.shape).astype(np.float32)
    model.tokenizer = Tokenizer(tokenizer.backend, tokenizer.eos, None, TEMPLATE)
    return model


class Running:
    """A server in a thread, its scheduler and its address."""

    def __init__(self, model: Model, key: str | None = None, max_body: int = 1 << 16, **options: Any) -> None:
        self.model = model
        self.scheduler = Scheduler(model, **{"max_batch": 8, "context": 300, **options})
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.server = new_server(
            Served(model, "tiny", Limits(self.scheduler.context, 200)), self.scheduler, listening, key, max_body
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.scheduler.start()
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that another thread does; a test that waits in vain fails."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        self.server.should_exit = True
        self.scheduler.stop()
        self.thread.join(30)
        self.scheduler.join(30)
        assert not self.thread.is_alive()
