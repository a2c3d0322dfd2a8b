"""`onfoot generate`: generates text with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from onfoot.cli.console import show_text
from onfoot.cli.options import Download, Dtype, Engine, Threads, parse_tokens
from onfoot.formats.files import read_text
from onfoot.terminal import for_terminal

if TYPE_CHECKING:
    from onfoot.generate.sampling import Sampling
    from onfoot.models.model import Model


def generate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model folder, run folder, GGUF file, smollm2, or org/name.")
    ],
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
    system: Annotated[str | None, typer.Option(help="The system message of a chat.", show_default=False)] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens to generate; by default 200 (512 in a conversation), or what fits in the context.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; 0 is greedy decoding; by default 0.8, 0.2 with --chat.", show_default=False
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens with total probability p; by default 0.9 with --chat, else all.",
            show_default=False,
        ),
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
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    threads: Threads = None,
    download: Download = False,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Use 8-bit weights, or a GGUF file's own blocks: faster, less memory.")
    ] = False,
) -> None:
    """Generate text with a model, or chat with it (--chat)."""
    from onfoot import load
    from onfoot.generate.chat import CHAT_SAMPLING, Chat
    from onfoot.generate.sampling import Sampling
    from onfoot.generate.stop import cut

    default = CHAT_SAMPLING if chat else Sampling(0.8)
    temperature = default.temperature if temperature is None else temperature
    top_p = default.top_p if top_p is None else top_p
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    inputs = [
        name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--tokens", tokens)) if value
    ]
    if len(inputs) > 1:
        raise ValueError(f"give only one of {' and '.join(inputs)}")
    if chat and (tokens or slide):
        raise ValueError(f"--chat cannot be used with {'--tokens' if tokens else '--slide'}; remove one of them")
    if system is not None and not chat:
        raise ValueError("--system needs --chat: only a conversation has a system message")
    if "" in (stop or []):
        raise ValueError("--stop must not be empty")
    loaded = load(model, dtype, engine, quantized=quantized, download=download)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if chat:
        from onfoot.cli.chat import ANSWER_TOKENS, answer_prompts, converse

        conversation = Chat(loaded, sampling, system=system, seed=seed, stop=stop or [])
        if prompt or prompt_file:
            answer_prompts(
                conversation, [read_text(prompt_file)] if prompt_file else prompt or [], max_new_tokens or 200
            )
        else:
            converse(conversation, str(model), max_new_tokens or ANSWER_TOKENS)
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
        if loaded.tokenizer is None:
            text = " ".join(map(str, ids.tolist()))
        else:
            text = cut(loaded.tokenizer, ids.tolist(), len(prompts[i]), stop or [])
        show_text((f"--- {i + 1} ---\n" if len(outputs) > 1 else "") + text)


def _encode(model: Model, texts: list[str]) -> list[np.ndarray]:
    if model.tokenizer is None:
        raise ValueError('this model has no tokenizer; give token ids, as in --tokens "3 1 4"')
    if not texts:  # the start of a document
        start = model.tokenizer.bos_ids or ([] if model.tokenizer.eos_id is None else [model.tokenizer.eos_id])
        if not start:
            raise ValueError("no prompt; give --prompt, --prompt-file or --tokens")
        return [np.asarray(start)]
    prompts = [np.asarray(model.tokenizer.encode(text, add_special_tokens=True), dtype=np.int64) for text in texts]
    if any(p.size == 0 for p in prompts):
        raise ValueError("an empty prompt has no tokens; omit --prompt to start a new document, or give some text")
    return prompts


def _stream(
    model: Model, prompt: np.ndarray, max_new_tokens: int, sampling: Sampling, seed: int, stop: list[str], slide: bool
) -> None:
    """Prints the prompt, and then text while it is generated."""
    from onfoot.generate.loop import stream_text

    assert model.tokenizer is not None
    pieces = stream_text(model, prompt.tolist(), max_new_tokens, sampling, seed, stop, slide)
    print(for_terminal(model.tokenizer.decode(prompt.tolist())), end="", flush=True)
    for text in pieces:
        print(for_terminal(text), end="", flush=True)
    print()
