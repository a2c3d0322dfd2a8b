"""`onfoot generate`: generates text with a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from onfoot.cli.console import show_text
from onfoot.cli.options import Threads, parse_tokens
from onfoot.engine import ENGINES
from onfoot.formats.files import read_text
from onfoot.terminal import for_terminal

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.generate.sampling import Sampling
    from onfoot.models.model import Model


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, run folder, GGUF file, or smollm2.")],
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to load: adapter folder or run folder.", show_default=False)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; repeat for a batch of prompts.", show_default=False),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File that contains the prompt.", show_default=False)] = None,
    tokens: Annotated[
        str | None, typer.Option(help='Token ids instead of a prompt, as in "3 1 4".', show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat prompts as user messages; without a prompt, chat interactively.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens to generate; by default 200, or what fits in the context.", show_default=False
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens with total probability p.", show_default=False),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this fraction of the top probability.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, repeated tokens are less likely.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop after this text; repeat for several.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    slide: Annotated[bool, typer.Option(help="When the context is full, continue from its last half.")] = False,
    dtype: Annotated[
        str, typer.Option(help="Data type: float32, float64, or auto: float32, with 16-bit weights as in the files.")
    ] = "auto",
    engine: Annotated[str, typer.Option(help=f"Engine: auto, {', '.join(ENGINES)}.")] = "auto",
    threads: Threads = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Use 8-bit weights, or a GGUF file's own blocks: faster, less memory.")
    ] = False,
) -> None:
    """Generate text with a model, or chat with it (--chat)."""
    from onfoot import load
    from onfoot.generate.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    inputs = [
        name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--tokens", tokens)) if value
    ]
    if len(inputs) > 1:
        raise ValueError(f"give only one of {' and '.join(inputs)}")
    if chat and (tokens or slide):
        raise ValueError(f"--chat cannot be used with {'--tokens' if tokens else '--slide'}; remove one of them")
    if "" in (stop or []):
        raise ValueError("--stop must not be empty")
    loaded = load(model, dtype, engine, quantized=quantized)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if chat:
        user_prompts = [read_text(prompt_file)] if prompt_file else (prompt or None)
        _chat(loaded, user_prompts, max_new_tokens or 200, sampling, seed, stop or [])
        return
    if tokens is not None:
        prompts = [np.asarray(parse_tokens(tokens))]
    else:
        texts = [read_text(prompt_file)] if prompt_file else (prompt or [])
        prompts = _encode(loaded, texts)
    if max_new_tokens is None:
        room = loaded.config.n_positions - max(map(len, prompts))
        max_new_tokens = 200 if slide else max(1, min(200, room))
    if len(prompts) == 1 and loaded.tokenizer is not None:
        _stream(loaded, prompts[0], max_new_tokens, sampling, seed, stop or [], slide)
        return
    outputs = loaded.generate(
        prompts, max_new_tokens, temperature, top_k, top_p, seed, min_p=min_p, repetition_penalty=repetition_penalty,
        stop=stop or [], slide=slide,
    )  # fmt: skip
    for i, ids in enumerate(outputs):
        text = " ".join(map(str, ids.tolist())) if loaded.tokenizer is None else loaded.tokenizer.decode(ids.tolist())
        show_text((f"--- {i + 1} ---\n" if len(outputs) > 1 else "") + text)


def _encode(model: Model, texts: list[str]) -> list[np.ndarray]:
    if model.tokenizer is None:
        raise ValueError('this model has no tokenizer; give token ids, as in --tokens "3 1 4"')
    if not texts:
        if model.tokenizer.eos_id is None:
            raise ValueError("no prompt; give --prompt, --prompt-file or --tokens")
        return [np.asarray([model.tokenizer.eos_id])]  # the start of a document
    prompts = [np.asarray(model.tokenizer.encode(text), dtype=np.int64) for text in texts]
    if any(p.size == 0 for p in prompts):
        raise ValueError("an empty prompt has no tokens; omit --prompt to start a new document, or give some text")
    return prompts


def _chat(
    model: Model, user_prompts: list[str] | None, max_new_tokens: int, sampling: Sampling, seed: int, stop: list[str]
) -> None:
    """Answers each prompt in its own conversation, or, if None, chats until the end of the input."""
    from onfoot.generate.chat import ends, prompt_ids

    stop_ids, stop_texts = ends(model) if model.tokenizer is not None else ((), [])
    if user_prompts is not None:
        for prompt in user_prompts:
            ids = prompt_ids(model, [{"role": "user", "content": prompt}])
            n_new = _n_new(model, ids, max_new_tokens)
            _stream(model, ids, n_new, sampling, seed, stop + stop_texts, stop_ids=stop_ids)
        return
    messages: list[dict[str, str]] = []
    while True:
        try:
            messages.append({"role": "user", "content": input("> ")})
        except EOFError:
            print()
            return
        ids = prompt_ids(model, messages)
        n_new = _n_new(model, ids, max_new_tokens)
        answer = _stream(model, ids, n_new, sampling, seed, stop + stop_texts, stop_ids=stop_ids)
        messages.append({"role": "assistant", "content": answer})


def _n_new(model: Model, ids: np.ndarray, max_new_tokens: int) -> int:
    """max_new_tokens, limited to what fits in the context after the prompt, and at least 1."""
    return max(1, min(max_new_tokens, model.config.n_positions - ids.size))


def _stream(
    model: Model,
    prompt: np.ndarray,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: list[str],
    slide: bool = False,
    stop_ids: tuple[int, ...] | None = None,
) -> str:
    """Prints text while it is generated and returns it; prints the prompt first unless `stop_ids` is given (chat)."""
    from onfoot.generate.loop import stream
    from onfoot.models.inputs import check_tokens

    check_tokens(prompt[None], model.config.vocab_size, model.config.n_positions)
    assert model.tokenizer is not None
    new: list[int] = []
    steps = stream(model, [prompt], max_new_tokens, sampling, seed, slide)
    first = next(steps)  # invalid arguments raise here, before anything is printed
    if stop_ids is None:
        print(for_terminal(model.tokenizer.decode(prompt.tolist())), end="", flush=True)
    written = ""
    for tokens in _chain(first, steps):
        if int(tokens[0]) in (model.eos_ids if stop_ids is None else stop_ids):
            break
        new.append(int(tokens[0]))
        written = _write(model.tokenizer, new, written)
        if any(s in model.tokenizer.decode(new) for s in stop):
            break
    text = model.tokenizer.decode(new)
    print(for_terminal(text[len(written) :]))
    return text


def _write(tokenizer: Tokenizer, ids: list[int], written: str) -> str:
    """Prints the text after `written` and returns all of it; waits while the last character is incomplete."""
    text = tokenizer.decode(ids)
    if not text.endswith("\ufffd"):
        print(for_terminal(text[len(written) :]), end="", flush=True)
        return text
    return written


def _chain(first: np.ndarray, rest: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    yield first
    yield from rest
