"""`onfoot serve`: what it refuses before it starts, and how its options reach the server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.serve import run

CONFIG = onfoot.LlamaConfig(
    vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = onfoot.create(CONFIG, engine="numpy")
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "small")
    return tmp_path / "small"


def serve(*arguments: Any, **environment: str) -> Any:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)], env={"ONFOOT_API_KEY": "", **environment})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_host_that_others_reach_needs_a_key(folder: Path, host: str) -> None:
    result = serve(folder, "--host", host)
    assert result.exit_code == 2
    assert f"error: --host {host} can be reached from other machines: set ONFOOT_API_KEY" in result.output


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(folder, "--port", port)
    assert result.exit_code == 2
    assert f"cannot bind 127.0.0.1, port {port}" in result.output


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    onfoot.create(CONFIG, engine="numpy").save(tmp_path)
    result = serve(tmp_path, "--port", 0)
    assert result.exit_code == 2
    assert "has no tokenizer, which the server needs" in result.output


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    result = serve(folder, "--port", 0, "--context", 65)
    assert result.exit_code == 2
    assert "--context 65 exceeds n_positions=64 of the model; choose at most 64" in result.output


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_options_reach_the_server(folder: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def instead(served: Any, scheduler: Any, listening: socket.socket, key: str | None) -> None:
        given.append((served, scheduler, key))
        listening.close()

    monkeypatch.setattr(run, "serve", instead)
    options = ["--max-batch", 3, "--max-queue", 5, "--context", 40, "--max-tokens", 20, "--name", "mine"]
    result = serve(folder, "--host", host, "--port", 0, *options, ONFOOT_API_KEY="secret")
    assert result.exit_code == 0
    served, scheduler, key = given[0]
    assert (served.name, served.limits.context, served.limits.max_tokens) == ("mine", 40, 20)
    assert (len(scheduler.cache.slots), scheduler.max_queue, scheduler.context, key) == (3, 5, 40, "secret")
    assert f"mine: http://{host}:" in result.output
    serve(folder, "--port", 0)
    served, scheduler, key = given[1]
    assert (served.name, served.limits.context, served.limits.max_tokens, key) == ("small", 64, 64, None)
