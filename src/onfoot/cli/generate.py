"""`onfoot generate`: text from a model."""

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
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, a run, a GGUF file, or a name: smollm2.")
    ],
    adapter: Annotated[
        Path | None, typer.Option(help="A LoRA adapter on top: a folder, or a run.", show_default=False)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to go on from; several times for several at once.", show_default=False),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.", show_default=False)] = None,
    tokens: Annotated[
        str | None, typer.Option(help='Token ids in place of a prompt, as in "3 1 4".', show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are questions; without one, a conversation at the terminal.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="How many; by default 200, or what the context leaves.", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest tokens that together reach p.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only tokens at least so likely against the likeliest.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was said is less likely.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop behind this text; several times for several.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    slide: Annotated[bool, typer.Option(help="Beyond the context, go on with its last half.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    engine: Annotated[str, typer.Option(help=f"auto, {', '.join(ENGINES)}.")] = "auto",
    threads: Threads = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Weights in 8 bits (a GGUF file's own blocks): faster, smaller.")
    ] = False,
) -> None:
    """Generate text from a model, or talk to one with --chat."""
    from onfoot import load
    from onfoot.generate.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    given = [
        name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--tokens", tokens)) if value
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: choose one")
    if chat and (tokens or slide):
        raise ValueError(f"--chat and {'--tokens' if tokens else '--slide'} do not go together; leave one out")
    if "" in (stop or []):
        raise ValueError("--stop needs some text to stop at")
    loaded = load(model, dtype, engine, quantized=quantized)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if chat:
        questions = [read_text(prompt_file)] if prompt_file else (prompt or None)
        _chat(loaded, questions, max_new_tokens or 200, sampling, seed, stop or [])
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
            raise ValueError("a prompt is needed: --prompt, --prompt-file or --tokens")
        return [np.asarray([model.tokenizer.eos_id])]  # a document begins
    prompts = [np.asarray(model.tokenizer.encode(text), dtype=np.int64) for text in texts]
    if any(p.size == 0 for p in prompts):
        raise ValueError("an empty prompt has no tokens; leave --prompt out to begin a document, or give some text")
    return prompts


def _chat(
    model: Model, questions: list[str] | None, max_new_tokens: int, sampling: Sampling, seed: int, stop: list[str]
) -> None:
    """Answers each question by itself, or, without any, talks until the end of the input."""
    from onfoot.generate.chat import ends, prompt_ids

    stop_ids, stop_texts = ends(model) if model.tokenizer is not None else ((), [])
    if questions is not None:
        for question in questions:
            ids = prompt_ids(model, [{"role": "user", "content": question}])
            _stream(model, ids, _room(model, ids, max_new_tokens), sampling, seed, stop + stop_texts, stop_ids=stop_ids)
        return
    messages: list[dict[str, str]] = []
    while True:
        try:
            messages.append({"role": "user", "content": input("> ")})
        except EOFError:
            print()
            return
        ids = prompt_ids(model, messages)
        answer = _stream(
            model, ids, _room(model, ids, max_new_tokens), sampling, seed, stop + stop_texts, stop_ids=stop_ids
        )
        messages.append({"role": "assistant", "content": answer})


def _room(model: Model, ids: np.ndarray, max_new_tokens: int) -> int:
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
    """Writes each new piece of text as soon as it is whole, behind the prompt unless it is a conversation's."""
    from onfoot.generate.loop import stream
    from onfoot.models.inputs import check_tokens

    check_tokens(prompt[None], model.config.vocab_size, model.config.n_positions)
    assert model.tokenizer is not None
    new: list[int] = []
    pieces = stream(model, [prompt], max_new_tokens, sampling, seed, slide)
    first = next(pieces)  # before anything is written: what is refused is refused here
    if stop_ids is None:
        print(for_terminal(model.tokenizer.decode(prompt.tolist())), end="", flush=True)
    written = ""
    for column in _chain(first, pieces):
        if int(column[0]) in (model.eos_ids if stop_ids is None else stop_ids):
            break
        new.append(int(column[0]))
        written = _write(model.tokenizer, new, written)
        if any(s in model.tokenizer.decode(new) for s in stop):
            break
    text = model.tokenizer.decode(new)
    print(for_terminal(text[len(written) :]))
    return text


def _write(tokenizer: Tokenizer, ids: list[int], written: str) -> str:
    """Prints what has come since; a character whose bytes are not all there yet waits."""
    text = tokenizer.decode(ids)
    if not text.endswith("\ufffd"):
        print(for_terminal(text[len(written) :]), end="", flush=True)
        return text
    return written


def _chain(first: np.ndarray, rest: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    yield first
    yield from rest
