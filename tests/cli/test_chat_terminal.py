"""The conversation on a real terminal: banner, commands, Ctrl-C, a full context; and what a pipe gets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer
from onfoot.generate.chat import Chat, Sampling

BYTES = byte_tokenizer()
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def lively(n_positions: int) -> onfoot.Model:
    """A model that writes letters and never ends by itself."""
    config = onfoot.GPT2Config(
        vocab_size=257, n_positions=n_positions, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    rng = np.random.default_rng(3)
    params = {name: x + rng.normal(0, 0.5, x.shape) for name, x in onfoot.create(config).params.items()}
    params["lm_head.weight"][np.setdiff1d(np.arange(257), BYTES.encode("abcdefghij klmnop."))] = 0
    model = onfoot.Model(config, params)
    model.tokenizer = Tokenizer(BYTES.backend, BYTES.eos, None, TEMPLATE)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("chat")
    for n in (64, 8192):
        lively(n).save(root / str(n))
    return {n: root / str(n) for n in (64, 8192)}


class Terminal:
    """A command on a pseudo-terminal: what it shows, and what is typed."""

    def __init__(self, *arguments: str) -> None:
        self.parent, child = pty.openpty()
        command = [sys.executable, "-m", "onfoot", *arguments]
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)
        self.shown = ""

    def until(self, pattern: str, seconds: float = 120) -> str:
        """Reads until the pattern appears in what is new, and returns the new text up to its end."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.parent], [], [], 1)[0]:
                try:
                    self.shown += ESCAPES.sub("", os.read(self.parent, 65536).decode(errors="replace"))
                except OSError:  # the other end is closed
                    raise AssertionError(f"it ended without {pattern!r}: {self.shown!r}") from None
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.parent, text.encode())

    def leave(self) -> None:
        """Presses Ctrl-C until the program ends: one that comes before the program waits for a line is not heard."""
        for _ in range(20):
            self.type("\x03")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=3)
                return

    def status(self) -> int:
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.parent)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*arguments: object) -> Terminal:
        opened.append(Terminal(*map(str, arguments)))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_conversation_on_a_terminal(terminal: Any, folders: dict[int, Path]) -> None:
    screen = terminal(
        "generate", folders[8192], "--chat", "--temperature", "0", "--system", "be kind", "--max-new-tokens", 9
    )
    banner = screen.until(r"\n> ")
    assert f"{folders[8192]}: " in banner and "context 8,192 tokens" in banner and "/exit or Ctrl-D leaves" in banner
    chat = Chat(onfoot.load(folders[8192]), Sampling(0), system="be kind")
    for question in ("hello", "and now?"):
        screen.type(f"{question}\n")
        expected = "".join(chat.ask(question, 9))
        assert f"\n{expected}\nstopped after 9 tokens; --max-new-tokens allows more\n" in screen.until(r"more\n> ")
    screen.type("\n   \n")
    assert screen.until("> ").strip() == ">" and screen.until("> ").strip() == ">"  # empty lines are ignored
    screen.type("/help\n")
    assert "/system TEXT" in screen.until("leaves\n> ")
    screen.type("/system\n")
    assert "system message: be kind\n" in screen.until("kind\n> ")
    screen.type("/nonsense x\n")
    assert "unknown command /nonsense; /help shows the commands" in screen.until("commands\n> ")
    screen.type("/system be brief\n")
    screen.until("system message: be brief\n> ")
    screen.type("/reset\n")
    screen.until("a new conversation\n> ")
    chat.reset()
    chat.system = "be brief"
    screen.type("hello\n")
    assert f"\n{''.join(chat.ask('hello', 9))}\n" in screen.until("more\n> ")
    screen.type("/exit\n")
    assert screen.status() == 0


def test_ctrl_c_stops_the_answer_and_at_the_prompt_the_program(terminal: Any, folders: dict[int, Path]) -> None:
    screen = terminal("chat", folders[8192], "--max-new-tokens", 8000, "--temperature", 0)
    screen.until(r"\n> ")
    screen.type("tell me a long story\n")
    screen.until(r"[a-p. ]{50}\Z|[a-p. ]{80}")
    screen.type("\x03")
    said = screen.until(r"stopped\n> ")
    assert "Traceback" not in said and "Aborted" not in said and len(said) < 8000
    screen.type("/help\n")
    screen.until("leaves\n> ")  # it goes on
    screen.leave()
    assert screen.status() == 0


def test_a_full_context_is_said_and_the_chat_goes_on(terminal: Any, folders: dict[int, Path]) -> None:
    screen = terminal("chat", folders[64], "--max-new-tokens", 12)
    screen.until(r"\n> ")
    screen.type("one question\n")
    screen.until(r"more\n> ")
    screen.type("another question\n")
    assert "the context of 64 tokens is full: the oldest turn is forgotten" in screen.until(r"more\n> ")
    screen.type("x" * 70 + "\n")
    assert "have 77 tokens, but the context has 64; shorten it" in screen.until(r"shorten it\n> ")
    screen.type("y" * 50 + "\n")
    assert "stopped: the context is full" in screen.until(r"makes room\n> ")
    screen.type("\x04")  # Ctrl-D
    assert screen.status() == 0


def test_a_pipe_gets_the_answers_and_no_banner(folders: dict[int, Path]) -> None:
    typed = ["generate", str(folders[8192]), "--chat", "--max-new-tokens", "7", "--system", "S"]
    result = CliRunner().invoke(app, typed, input="hello\n\n/reset\nhello\n/exit\nnever read\n")
    answer = "".join(Chat(onfoot.load(folders[8192]), system="S").ask("hello", 7))  # temperature 0.2, top-p 0.9
    assert result.exit_code == 0 and result.stdout == f"> {answer}\n> > > {answer}\n> "
    assert "parameters" not in result.stderr
    result = CliRunner().invoke(app, [*typed, "--prompt", "hello", "--prompt", "hello"])
    assert result.stdout == f"{answer}\n{answer}\n" and result.stderr == ""


def test_the_sampling_of_a_chat_is_gentler_unless_given(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Sampling] = []
    real = Chat.__init__

    def watched(chat: Chat, model: Any, sampling: Sampling, **named: Any) -> None:
        used.append(sampling)
        real(chat, model, sampling, **named)

    monkeypatch.setattr(Chat, "__init__", watched)
    for command in (["generate", "--chat"], ["chat"]):
        for more in ([], ["--temperature", "1", "--top-p", "0.5"], ["--temperature", "0.7"]):
            assert CliRunner().invoke(app, [*command, str(folders[64]), *more], input="").exit_code == 0
    expected = [Sampling(0.2, top_p=0.9), Sampling(1.0, top_p=0.5), Sampling(0.7, top_p=0.9)]
    assert used == [*expected, *expected]


def test_a_system_message_needs_a_chat(folders: dict[int, Path]) -> None:
    result = CliRunner().invoke(app, ["generate", str(folders[64]), "--prompt", "x", "--system", "y"])
    assert result.exit_code == 2 and "--system needs --chat" in result.stderr
