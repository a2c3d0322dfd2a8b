"""`onfoot generate`: text from a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from onfoot.cli.console import show_text
from onfoot.cli.options import parse_tokens

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.models.model import Model


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or the folder of a run.")],
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
    engine: Annotated[str, typer.Option(help="auto, numpy, torch.")] = "auto",
) -> None:
    """Generate text from a model folder or a run."""
    from onfoot import load
    from onfoot.generate.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    loaded = load(model, dtype, engine)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if tokens is not None:
        prompts = [np.asarray(parse_tokens(tokens))]
    else:
        texts = [prompt_file.read_text(encoding="utf-8")] if prompt_file else (prompt or [])
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
        if model.tokenizer.end_id is None:
            raise ValueError("a prompt is needed: --prompt, --prompt-file or --tokens")
        return [np.asarray([model.tokenizer.end_id])]  # a document begins
    prompts = [np.asarray(model.tokenizer.encode(text), dtype=np.int64) for text in texts]
    if any(p.size == 0 for p in prompts):
        raise ValueError("an empty prompt has no tokens; leave --prompt out to begin a document, or give some text")
    return prompts


def _stream(
    model: Model, prompt: np.ndarray, max_new_tokens: int, sampling: object, seed: int, stop: list[str], slide: bool
) -> None:
    """Writes the prompt and each new piece of text as soon as it is whole."""
    from onfoot.generate.loop import stream
    from onfoot.models.inputs import check_tokens

    check_tokens(prompt[None], model.config.vocab_size, model.config.n_positions)
    assert model.tokenizer is not None
    new: list[int] = []
    pieces = stream(model, [prompt], max_new_tokens, sampling, seed, slide)  # type: ignore[arg-type]
    first = next(pieces)  # before anything is written: what is refused is refused here
    print(model.tokenizer.decode(prompt.tolist()), end="", flush=True)
    written = ""
    for column in _chain(first, pieces):
        if int(column[0]) == model.config.eos_token_id:
            break
        new.append(int(column[0]))
        written = _write(model.tokenizer, new, written)
        if any(s in model.tokenizer.decode(new) for s in stop):
            break
    print(model.tokenizer.decode(new)[len(written) :])


def _write(tokenizer: Tokenizer, ids: list[int], written: str) -> str:
    """Prints what has come since; a character whose bytes are not all there yet waits."""
    text = tokenizer.decode(ids)
    if not text.endswith("\ufffd"):
        print(text[len(written) :], end="", flush=True)
        return text
    return written


def _chain(first: np.ndarray, rest: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    yield first
    yield from rest
