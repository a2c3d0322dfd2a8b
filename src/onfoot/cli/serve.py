"""`onfoot serve`: a server with OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.options import Threads

MAX_BATCH = 8  # rows that the products for a few rows compute together


def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, run folder, GGUF file, or smollm2.")],
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to load: adapter folder or run folder.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; if others reach it, a key is needed.")] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; better set ONFOOT_API_KEY.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; by default that of its file.", show_default=False)
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, max=MAX_BATCH, help="Answers that are generated at the same time.")
    ] = MAX_BATCH,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait for the others.")] = 64,
    context: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a prompt and its answer; by default the model's, at most 4096.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; by default the context.", show_default=False)
    ] = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Use 8-bit weights, or a GGUF file's own blocks: faster, less memory.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Serve a model with OpenAI's API: /v1/chat/completions, /v1/completions and /v1/models.

    Requests are generated together, each with the answer that it would get alone. Ctrl-C stops the server.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError('the server needs starlette and uvicorn: pip install "onfoot[serve]"') from None
    from onfoot import load
    from onfoot.serve.protocol import Limits, Served
    from onfoot.serve.run import is_loopback, listen
    from onfoot.serve.run import serve as run
    from onfoot.serve.scheduler import Scheduler

    key = api_key or os.environ.get("ONFOOT_API_KEY") or None
    if key is None and not is_loopback(host):
        raise ValueError(f"--host {host} can be reached from other machines: set ONFOOT_API_KEY, or give --api-key")
    listening = listen(host, port)
    loaded = load(model, "auto", quantized=quantized)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, which the server needs")
    if not loaded.config.causal:
        raise ValueError("cannot generate with causal=False: tokens would attend to later tokens")
    limit = loaded.config.n_positions
    if context is not None and context > limit:
        raise ValueError(f"--context {context} exceeds n_positions={limit} of the model; choose at most {limit}")
    size = context or min(limit, 4096)
    served = Served(loaded, name or model.stem or str(model), Limits(size, min(max_tokens or size, size)))
    scheduler = Scheduler(loaded, max_batch, size, max_queue)
    where = f"[{host}]" if ":" in host else host
    print(
        f"{served.name}: http://{where}:{listening.getsockname()[1]}/v1   context {size} tokens, up to {max_batch} "
        f"answers at the same time   press Ctrl-C to stop",
        flush=True,
    )
    run(served, scheduler, listening, key)
