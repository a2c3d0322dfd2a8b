"""A small chat model, servers of it on free ports, and the answers that its requests must get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from serve_in_thread import Running, chat_model

from onfoot.models.model import Model


@pytest.fixture(scope="session")
def model() -> Model:
    return chat_model()


@pytest.fixture(scope="module")
def running(model: Model) -> Iterator[Running]:
    server = Running(model)
    yield server
    server.close()


@pytest.fixture
def start(model: Model) -> Iterator[Callable[..., Running]]:
    """Starts servers with their own options."""
    started: list[Running] = []

    def one(given: Model | None = None, **options: Any) -> Running:
        started.append(Running(given or model, **options))
        return started[-1]

    yield one
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def sequential(model: Model) -> Callable[..., tuple[str, str]]:
    """The answer of `model.generate` alone, and its finish reason, for a prompt's ids."""

    def answer(ids: Any, n: int, temperature: float = 0.0, seed: int = 0, row: int = 0, **more: Any) -> tuple[str, str]:
        prompts = [np.asarray(ids, np.int64)] * (row + 1)
        tokens = model.generate(prompts, n, temperature, seed=seed, stop_ids=model.eos_ids, **more)[row]
        assert model.tokenizer is not None
        new = tokens[len(ids) :].tolist()
        return model.tokenizer.decode(new), "stop" if new[-1] in model.eos_ids else "length"

    return answer
