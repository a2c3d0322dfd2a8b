"""`onfoot eval`: loss, perplexity and bits per byte of models on a data file, or lm-eval's tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onfoot.cli.options import Dtype, Engine, Threads, check_writable

if TYPE_CHECKING:
    from onfoot.cli.console import Sheet
    from onfoot.evaluation import Evaluation
    from onfoot.models.model import Model


def evaluate(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL", help="Model folders, run folders, GGUF files, or smollm2.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="A text file, or a .jsonl file of texts or examples.", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="lm-eval's tasks instead of --data: names or .yaml files, with commas.", show_default=False),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to load: adapter folder or run folder.", show_default=False)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per window; by default 1024, or what the model allows.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window to the next; by default half of the context.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per batch.", min=1)] = 8,
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first N bytes of the data, or N examples per task.", min=1, show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON to this file; - prints them instead.")
    ] = None,
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    threads: Threads = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Use 8-bit weights, or a GGUF file's own blocks: faster, less memory.")
    ] = False,
) -> None:
    """Measure how well models predict a text, or run lm-eval's tasks with them.

    Shows the loss in nats per token, the perplexity and the bits per byte over sliding windows, models side by side.
    """
    _check_options(models, data, tasks, adapter, stride, json_file)
    results: dict[str, Any] = {}
    for path in models:
        loaded = _load(path, adapter, dtype, engine, quantized)
        if tasks is not None:
            results[str(path)] = _run_tasks(loaded, tasks.split(","), context, batch_size, limit)
        else:
            assert data is not None
            with _progress(str(path)) as report:
                results[str(path)] = _evaluate(loaded, data, context, stride, batch_size, limit, report)
        del loaded  # before the next one is loaded
    if tasks is not None:
        _report(results, task_sheet(results), json_file)
    else:
        assert data is not None
        values = {name: as_json(result) for name, result in results.items()}
        _report({"data": str(data), "models": values}, sheet(results, data.name), json_file)


def _check_options(
    models: list[Path],
    data: Path | None,
    tasks: str | None,
    adapter: Path | None,
    stride: int | None,
    json_file: Path | None,
) -> None:
    """Raises ValueError for options that do not go together, before anything is loaded."""
    if (data is None) == (tasks is None):
        raise ValueError("give either --data FILE or --tasks NAME")
    if tasks is not None and stride is not None:
        raise ValueError("--stride cannot be used with --tasks: lm-eval's windows do not overlap")
    if adapter is not None and len(models) > 1:
        raise ValueError("--adapter needs exactly one MODEL; to compare adapters, give their folders as MODELs")
    repeated = next((path for path in models if models.count(path) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated} is given twice")
    if str(json_file) != "-":
        check_writable(json_file, "--json")


def _load(path: Path, adapter: Path | None, dtype: str, engine: str, quantized: bool) -> Model:
    from onfoot import load

    loaded = load(path, dtype, engine, quantized=quantized)
    if adapter is not None:
        loaded.load_adapter(adapter)
    return loaded


def _evaluate(
    model: Model,
    data: Path,
    context: int | None,
    stride: int | None,
    batch_size: int,
    limit: int | None,
    report: Callable[[int, int, float], None],
) -> Evaluation:
    from onfoot.evaluation import evaluate

    settings = {"context": context, "stride": stride, "batch_size": batch_size, "limit": limit}
    return evaluate(model, data, **settings, on_progress=report)  # type: ignore[arg-type]


def _run_tasks(
    model: Model, tasks: list[str], context: int | None, batch_size: int, limit: int | None
) -> dict[str, Any]:
    try:
        from onfoot.lm_eval import run_tasks
    except ImportError as error:
        raise ValueError(f'--tasks needs lm-eval ({error}); install it with: pip install "onfoot[lm-eval]"') from None
    return run_tasks(model, tasks, context=context, batch_size=batch_size, limit=limit)


def as_json(result: Evaluation) -> dict[str, Any]:
    """The figures of one model by name."""
    perplexity = None if result.perplexity == float("inf") else result.perplexity
    return {**vars(result), "perplexity": perplexity, "bits_per_byte": result.bits_per_byte}


def sheet(results: dict[str, Evaluation], data: str) -> Sheet:
    """The table: a row per model."""
    from onfoot.cli.console import Sheet

    rows: list[tuple[str, ...]] = [
        (
            name, f"{r.loss:.4f}", f"{r.perplexity:.4g}" if r.perplexity >= 1e6 else f"{r.perplexity:,.3f}",
            "–" if r.bits_per_byte is None else f"{r.bits_per_byte:.4f}", f"{r.n_tokens:,}", f"{r.n_bytes:,}",
        )
        for name, r in results.items()
    ]  # fmt: skip
    windows = {(r.context, r.stride) for r in results.values()}
    context, stride = min(windows)
    notes = [f"windows of {context:,} tokens, stride {stride:,}"]
    if len(windows) > 1:
        contexts = " and ".join(f"{c:,}" for c, _ in sorted(windows))
        notes = [f"windows of {contexts} tokens; to compare the models, give --context {context}"]
    if len({r.tokens_sha256 for r in results.values()}) > 1:
        notes.append("the models have different tokenizers: compare bits per byte; nats per token are not comparable")
    columns = ["model", ">loss (nats per token)", ">perplexity", ">bits per byte", ">tokens", ">bytes"]
    return Sheet(f"Evaluation on {data}", columns, rows, notes)


def task_sheet(results: dict[str, dict[str, Any]]) -> Sheet:
    """The table of lm-eval's metrics: a row per metric, a column per model."""
    from onfoot.cli.console import Sheet

    names = {(task, metric): None for model in results.values() for task in model for metric in model[task]}
    rows = []
    for task, metric in names:
        if metric.endswith("_stderr"):
            continue
        cells = (_metric(model.get(task, {}), metric) for model in results.values())
        rows.append((task, metric, *cells))
    return Sheet("Tasks of lm-eval", ["task", "metric", *(f">{name}" for name in results)], rows)


def _metric(metrics: dict[str, float], name: str) -> str:
    if name not in metrics:
        return "–"
    error = metrics.get(f"{name}_stderr")
    return f"{metrics[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _report(values: dict[str, Any], table: Sheet, json_file: Path | None) -> None:
    """Prints the table, or the JSON with --json -; otherwise writes the file."""
    from onfoot.cli.console import show_json, show_sheet, show_text
    from onfoot.formats.write import write_text

    if str(json_file) == "-":
        show_json(values)
        return
    show_sheet(table)
    if json_file is not None:
        write_text(json_file, json.dumps(values, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
        show_text(f"\nJSON {json_file}")


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int, float], None]]:
    """Shows targets and the loss so far on stderr: a bar on a terminal, one line every 10 seconds elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from onfoot.terminal import printable
    from onfoot.train.progress import PLAIN_EVERY

    console = Console(stderr=True, highlight=False)
    last, shown = time.monotonic(), printable(name)
    columns = (
        TextColumn("{task.fields[model]}", markup=False), BarColumn(), TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("eval", total=None, model=shown, figures="")

        def report(done: int, total: int, loss: float) -> None:
            nonlocal last
            figures = f"{done:,}/{total:,} tokens  loss {loss:.4f}"
            bar.update(task, completed=done, total=total, figures=figures)
            if not console.is_terminal and time.monotonic() - last >= PLAIN_EVERY:
                last = time.monotonic()
                console.print(f"{shown}  {figures}", markup=False, soft_wrap=True)

        yield report
