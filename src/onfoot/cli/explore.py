"""`onfoot explore`: an interactive page that shows the forward and backward pass of a text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from socket import socket

    from onfoot.models.model import Model
    from onfoot.own_engine import OwnEngine


def explore(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Model folder, GGUF file or adapter; by default a small model that is included.", show_default=False
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="Initial text; by default a line of the run's data.", show_default=False),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Initial token ids, instead of a text.", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", help="A file of your own pairs: shows your gradients beside the right ones.", show_default=False
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write one self-contained HTML file instead of starting a server.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    tour: Annotated[
        Path | None,
        typer.Option("--tour", help="A text file with another tour of the page (docs/tours.md).", show_default=False),
    ] = None,
) -> None:
    """Show every activation, error signal and gradient of a text on an interactive page.

    The page is served on 127.0.0.1 only, to whoever has the printed address, and loads nothing from the network.
    --export writes one file that works offline and contains every number for one text.
    """
    from onfoot.cli.console import show_text

    if text is not None and tokens is not None:
        raise ValueError("give --text or --tokens, not both")
    # what can be wrong is found before a large model is read
    own = _own_engine(engine)
    stops = _tour(tour)
    listening = _listen(port) if export is None else None
    loaded = _load(model)
    opening = _opening(loaded, text, tokens, model)
    if own is not None:
        assert engine is not None
        own = _written(own, engine, loaded)
        opening["own"] = own.name
    if stops is not None:
        opening["tour"] = stops
    if listening is None:
        assert export is not None
        size = _export(loaded, opening, export, own)
        show_text(f"{export}: {size / 1e6:.1f} MB, one self-contained file")
        return
    from onfoot.explore.access import forwarding_hint, new_token, page_address
    from onfoot.explore.serve import serve
    from onfoot.explore.server import Explorer

    explorer = Explorer(loaded, opening, own)
    with _busy("forward and backward pass"):
        explorer.answer({opening["kind"]: opening["value"]})  # rejects a bad text before the server starts
    port, token = listening.getsockname()[1], new_token()
    print(f"{page_address(port, token)}   press Ctrl-C to stop", flush=True)
    print(forwarding_hint(port), flush=True)
    serve(explorer, listening, browser, token)


def _listen(port: int) -> socket:
    """The socket of the page."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError(
            'the server needs starlette and uvicorn: pip install "onfoot[explore]"; or use --export FILE'
        ) from None
    from onfoot.explore.serve import listen

    return listen(port)


def _tour(path: Path | None) -> list[dict[str, Any]] | None:
    """The stops of another tour, if one is given."""
    from onfoot.explore.tour import read

    return None if path is None else [vars(stop) for stop in read(path)]


def _load(folder: Path | None) -> Model:
    """The model in float64 on the NumPy engine, which is the reference."""
    from onfoot.explore.loading import load_model

    with _busy("reading the model"):
        model = load_model(folder)
    if folder is not None:
        model.source = str(folder)  # of a run, the page can show every checkpoint
    if model.quantized:
        n_bytes = sum(x.nbytes for x in model.params.values())
        _say(
            f"{model.n_params:,} parameters, {n_bytes / 1e6:,.0f} MB of weights as in the file; every activation, "
            f"error signal and gradient is computed in float64"
        )
    return model


def _busy(what: str) -> AbstractContextManager[Any]:
    """Shows on a terminal that something takes a while, and how long it has taken."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(what)
    return progress


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style="dim")


def _written(own: OwnEngine, source: str, model: Model) -> OwnEngine:
    """The engine without the pairs that are not written yet or do not run: onfoot's take their place."""
    if model.quantized:
        return own
    import numpy as np

    from onfoot.models.compare_pairs import compare_pairs
    from onfoot.models.model import Model
    from onfoot.own_engine import OwnEngine

    tokens = np.arange(4)[None] % model.config.vocab_size
    compared = compare_pairs(Model(model.config, model.params, "float64", own), tokens)
    unwritten = sorted({one.pair for one in compared.results if one.unwritten})
    failing = {one.pair: one.problem for one in reversed(compared.results) if one.problem and not one.unwritten}
    if not unwritten and not failing:
        return own
    kept = {name: f for name, f in own.functions.items() if name.rpartition("_")[0] not in (*unwritten, *failing)}
    if not kept and failing:
        raise ValueError(f"{source}: no pair runs; {next(iter(failing.values()))}")
    if not kept:
        raise ValueError(f"{source}: no pair is written yet ({', '.join(unwritten)}); write one first")
    if unwritten:
        _say(f"not written yet, so that onfoot's are shown: {', '.join(unwritten)}")
    for problem in failing.values():
        _say(f"{problem}; onfoot's pair is shown in its place")
    return OwnEngine(kept, own.files, own.name)


def _own_engine(name: str | None) -> OwnEngine | None:
    """The engine of the user's own pairs, if there are any."""
    from onfoot.own_engine import OwnEngine, is_own
    from onfoot.own_engine.load import find_functions

    if name is None:
        return None
    folder = Path(name).is_dir()
    if not folder and not is_own(name):
        raise ValueError(f"--engine takes a file of your own pairs here, as in my_ops.py, got {name!r}")
    _say(f"importing and running the pairs of {name}; Ctrl-C ends a loop that does not end")
    return _of_folder(Path(name)) if folder else OwnEngine(*find_functions(name))


def _of_folder(folder: Path) -> OwnEngine:
    """The engine of the files in a folder, without those that cannot be imported."""
    from onfoot.learn.folder import exercise_files
    from onfoot.learn.progress import FILE
    from onfoot.own_engine import OwnEngine
    from onfoot.own_engine.load import find_functions, import_folder

    files = exercise_files(folder) if (folder / FILE).is_file() else None
    modules, broken = import_folder(folder, files)
    if not modules:
        raise ValueError(next(iter(broken.values()), f"{folder} has no Python files"))
    for why in broken.values():
        _say(f"{why}; onfoot's pairs are shown in its place")
    found = find_functions(list(modules.values()))
    return OwnEngine(found.functions, found.files, folder.name or str(folder))


def _opening(model: Model, text: str | None, tokens: str | None, folder: Path | None) -> dict[str, Any]:
    """The initial input of the page."""
    from onfoot.explore.opening import choose_input

    ids_only = model.tokenizer is None
    if tokens is not None:
        return {"kind": "ids", "value": tokens, "ids_only": ids_only}
    if text is None:
        return {**choose_input(model, folder), "ids_only": ids_only}
    if ids_only:
        raise ValueError("this model has no tokenizer, so it cannot read --text; give token ids: --tokens '3 1 4 1 5'")
    return {"kind": "text", "value": text, "ids_only": ids_only}


def _track(items: list[str], what: str) -> Iterable[str]:
    from rich.console import Console
    from rich.progress import track

    return track(items, description=f"{what:<12}", transient=True, disable=not Console().is_terminal)


def _export(model: Model, opening: dict[str, Any], path: Path, own: OwnEngine | None = None) -> int:
    from onfoot.cli.console import show_text
    from onfoot.explore import texts
    from onfoot.explore.page import export
    from onfoot.explore.study import Study

    read = texts.read_text if opening["kind"] == "text" else texts.read_ids
    page = export(Study(model, read(model, opening["value"]), own), opening, _track, show_text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return len(page.encode())
