"""`onfoot chat`, and `onfoot generate --chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from onfoot.cli.options import Dtype, Engine, Threads
from onfoot.terminal import for_terminal

if TYPE_CHECKING:
    from onfoot.generate.chat import Chat

ANSWER_TOKENS = 512  # of an answer in a conversation, by default


def chat(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, run folder, GGUF file, or smollm2.")],
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to load: adapter folder or run folder.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.", min=1)] = ANSWER_TOKENS,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.2,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with total probability p; 1 is all.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.", min=0)] = 0,
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    threads: Threads = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Use 8-bit weights, or a GGUF file's own blocks: faster, less memory.")
    ] = False,
) -> None:
    """Chat with a model in the terminal: a short form of onfoot generate MODEL --chat."""
    from onfoot.cli.generate import generate

    generate(
        model, adapter, chat=True, system=system, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
        seed=seed, dtype=dtype, engine=engine, quantized=quantized,
    )  # fmt: skip


def answer_prompts(chat: Chat, prompts: list[str], max_new_tokens: int) -> None:
    """Prints the answer to each prompt, each in a conversation of its own."""
    for prompt in prompts:
        chat.reset()
        for text in chat.ask(prompt, max_new_tokens):
            print(for_terminal(text), end="", flush=True)
        print()


def converse(chat: Chat, name: str, max_new_tokens: int) -> None:
    """Reads lines and prints answers until the input ends or /exit; everything but answers goes to stderr."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() a history and line editing)
        say(
            f"{name}: {chat.model.n_params:,} parameters, context {chat.context:,} tokens\n"
            f"/help shows the commands; /exit or Ctrl-D leaves; Ctrl-C stops an answer"
        )
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input("> ").strip()
            command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line)
            if command is not None and command[1] in ("exit", "quit"):
                return
            if command is not None:
                run_command(chat, command[1], command[2])
            elif line:
                answer(chat, line, max_new_tokens)
    print()


def run_command(chat: Chat, name: str, text: str | None) -> None:
    """Runs a command other than /exit."""
    if name == "help":
        say(
            "/help           shows this\n"
            "/system TEXT    sets the system message; without TEXT, shows it\n"
            "/reset          starts a new conversation with the same system message\n"
            "/exit           leaves, as Ctrl-D does\n"
            "Ctrl-C          stops an answer; at the prompt, leaves"
        )
    elif name == "reset":
        chat.reset()
        say("a new conversation")
    elif name == "system" and text:
        chat.system = text
        say(f"system message: {text}")
    elif name == "system":
        say("no system message" if chat.system is None else f"system message: {chat.system}")
    else:
        say(f"unknown command /{name}; /help shows the commands")


def answer(chat: Chat, question: str, max_new_tokens: int) -> None:
    """Prints one answer while it is generated; Ctrl-C ends it."""
    from onfoot.generate.chat import MessageTooLongError

    texts = chat.ask(question, max_new_tokens)
    with interrupted() as stop:
        try:
            for number, text in enumerate(texts):
                if number == 0 and chat.n_forgotten:
                    turns = "oldest turn is" if chat.n_forgotten == 1 else f"{chat.n_forgotten} oldest turns are"
                    say(f"the context of {chat.context:,} tokens is full: the {turns} forgotten")
                print(for_terminal(text), end="", flush=True)
                if stop():
                    break
        except MessageTooLongError as error:
            say(str(error))
            return
        except KeyboardInterrupt:  # a second one, before the token was complete
            pass
        finally:
            texts.close()  # type: ignore[attr-defined]
    print()
    if chat.why == "stopped":
        say("stopped")
    elif chat.why == "length":
        say(f"stopped after {max_new_tokens:,} tokens; --max-new-tokens allows more")
    elif chat.why == "context":
        say("stopped: the context is full; the next message makes room")


@contextmanager
def interrupted() -> Iterator[Callable[[], bool]]:
    """Yields a function that is True after Ctrl-C; a second Ctrl-C raises KeyboardInterrupt at once."""
    seen = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Prints a line about the conversation, dim on a terminal, so that it differs from the model's text."""
    from rich.console import Console
    from rich.text import Text

    sys.stdout.flush()
    console = Console(stderr=True, highlight=False)
    console.print(Text(for_terminal(text, sys.stderr), style="dim"), soft_wrap=True)
