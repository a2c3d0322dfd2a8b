"""`onfoot curvature`: eigenvalues, trace and sharpness of the loss at a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onfoot.cli.options import Engine, Threads, check_writable
from onfoot.cli.table import TableFormat

if TYPE_CHECKING:
    from onfoot.cli.console import Sheet
    from onfoot.curvature import Curvature, Estimate
    from onfoot.models.model import Model

TITLES = {"hessian": "Hessian", "gauss-newton": "Gauss–Newton"}


class Kind(str, Enum):
    """Which matrix to measure."""

    hessian = "hessian"
    gauss_newton = "gauss-newton"
    both = "both"


def curvature(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, run folder, GGUF file, or smollm2.")],
    data: Annotated[Path, typer.Option(help="A .txt or .jsonl file, encoded with the model's tokenizer.")],
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to load and to measure: its folder or run.", show_default=False)
    ] = None,
    kind: Annotated[Kind, typer.Option(help="Which matrix to measure.")] = Kind.both,
    top: Annotated[int, typer.Option(help="Number of eigenvalues at each end of the spectrum.")] = 5,
    probes: Annotated[int, typer.Option(help="Random vectors for the trace; 0 omits it.")] = 10,
    batches: Annotated[int, typer.Option(help="Batches of the data, in a shuffled order; 0 uses all.")] = 4,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per row; by default 256 for texts, 1024 for examples, or what the model allows.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 8,
    per_layer: Annotated[bool, typer.Option("--per-layer/--no-per-layer", help="Measure each layer as well.")] = True,
    steps: Annotated[int, typer.Option(help="Maximum Lanczos steps per set of eigenvalues.")] = 100,
    tolerance: Annotated[
        float, typer.Option(help="Stop when error bounds are below this fraction of the largest eigenvalue.")
    ] = 1e-3,
    seed: Annotated[int, typer.Option(help="Random seed of the order of the data and of all vectors.", min=0)] = 0,
    output: Annotated[TableFormat, typer.Option("--format", help="Output format.")] = TableFormat.rich,
    plot: Annotated[
        Path | None, typer.Option(help="Write the eigenvalues and layers as a picture, FILE.png.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type: float32 or float64.")] = "float32",
    engine: Engine = "auto",
    threads: Threads = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Quantize the frozen base of an adapter to 8 bits.")
    ] = False,
) -> None:
    """Measure how sharp the loss is around a model's weights.

    Shows the largest and smallest eigenvalues of the Hessian and of Gauss–Newton, their trace, the curvature along the
    gradient, the same for each layer, and the largest stable learning rate of plain gradient descent.
    """
    from onfoot.curvature import KINDS, measure
    from onfoot.data.file_batches import read_batches
    from onfoot.generate.chat import template_of

    _check_plot(plot)
    loaded = _load(model, adapter, dtype, engine, quantized)
    assert loaded.tokenizer is not None
    found = read_batches(
        data, loaded.tokenizer, template_of(loaded), loaded.config.n_positions, context=context,
        batch_size=batch_size, batches=batches, seed=seed,
    )  # fmt: skip
    results = []
    with _progress() as report:
        for one in KINDS if kind is Kind.both else [kind.value]:

            def on_product(what: str, title: str = TITLES[one]) -> None:
                report(f"{title}, {what}")

            results.append(
                measure(
                    loaded, found.batches, one, top=top, probes=probes, per_layer=per_layer, steps=steps,
                    tolerance=tolerance, seed=seed, on_product=on_product,
                )
            )  # fmt: skip
    if plot is not None:
        from onfoot.cli.curvature_picture import picture
        from onfoot.formats.write import atomic_write

        with atomic_write(plot) as file:
            file.write(picture(results))
    used = f"{found.n_rows:,} of {found.n_all_rows:,} rows of {data.name}"
    _report(results, used, output)
    if plot is not None and output is TableFormat.rich:
        from onfoot.cli.console import show_text

        show_text(f"\npicture {plot}")


def _check_plot(plot: Path | None) -> None:
    """Raises ValueError for a picture that could not be written, before anything is computed."""
    if plot is None:
        return
    if plot.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a .png file, got {plot.name!r}; rename it")
    check_writable(plot, "--plot")


def _load(path: Path, adapter: Path | None, dtype: str, engine: str, quantized: bool) -> Model:
    """The model with its adapter, or an error if there is nothing to measure."""
    from onfoot.models.load import load

    loaded = load(path, dtype, engine, quantized=quantized)
    if adapter is not None:
        loaded.load_adapter(adapter)
    if loaded.quantized and loaded.active_adapter is None:
        raise ValueError(
            f"--quantized freezes the weights of {path}, which leaves no curvature to measure; "
            f"give an adapter with --adapter, or omit --quantized"
        )
    if loaded.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer to encode the data; put tokenizer.json next to its config.json")
    return loaded


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Counts the products with the matrix, on stderr: live on a terminal, one line every 10 seconds elsewhere."""
    import time

    from rich.console import Console

    from onfoot.train.progress import PLAIN_EVERY

    console = Console(stderr=True, highlight=False)
    count, last = 0, time.monotonic()
    with console.status("first product with the matrix") as status:

        def report(what: str) -> None:
            nonlocal count, last
            count += 1
            status.update(f"{what}: {count} products")
            if not console.is_terminal and time.monotonic() - last >= PLAIN_EVERY:
                last = time.monotonic()
                console.print(f"{what}: {count} products", markup=False, soft_wrap=True)

        yield report


def _report(results: list[Curvature], used: str, output: TableFormat) -> None:
    from onfoot.cli.console import markdown, show_json, show_sheet, show_text

    if output is TableFormat.json:
        show_json({"data": used, "results": [{**asdict(result), "max_lr": result.max_lr} for result in results]})
        return
    for sheet in sheets(results, used):
        if output is TableFormat.markdown:
            print(markdown(sheet))
        else:
            show_sheet(sheet)
    if output is TableFormat.rich:
        show_text(f"\n{stability(results[0])}")


def sheets(results: list[Curvature], used: str) -> list[Sheet]:
    """The tables: a summary, the eigenvalues, and the layers."""
    return [_summary(results, used), _eigenvalues(results), *([_layers(results)] if results[0].layers else [])]


def stability(result: Curvature) -> str:
    """What the largest eigenvalue means for the learning rate of plain gradient descent."""
    largest = result.spectrum.largest[0].value
    if result.max_lr is None:
        return f"the largest eigenvalue is {largest:.4g}: no learning rate is too large for the curvature here"
    return (
        f"plain gradient descent is stable for lr < 2/λ_max = {result.max_lr:.4g} "
        f"(λ_max = {largest:.4g}, {TITLES[result.kind]})"
    )


def _summary(results: list[Curvature], used: str) -> Sheet:
    from onfoot.cli.console import Sheet

    first = results[0]
    rows: list[tuple[str, ...]] = [
        ("trace ± standard error", *(_estimate(r.trace) for r in results)),
        ("mean eigenvalue", *("–" if r.trace is None else f"{r.trace.value / r.n_params:.4g}" for r in results)),
        ("along the gradient, gᵗHg/gᵗg", *(_number(r.along_gradient) for r in results)),
        ("2/λ_max", *(_number(r.max_lr) for r in results)),
        ("Lanczos steps", *(f"{r.spectrum.steps}{'' if r.spectrum.converged else ' (limit)'}" for r in results)),
    ]
    notes = [
        f"loss {first.loss:.6f}, gradient norm {first.gradient_norm:.4g}, {first.n_params:,} trainable parameters",
        f"{used}, {first.n_targets:,} targets",
    ]
    if not all(r.spectrum.converged for r in results):
        notes.append("the limit of --steps was reached: some eigenvalues below have larger error bounds")
    return Sheet("Curvature", ["", *(f">{TITLES[r.kind]}" for r in results)], rows, notes)


def _eigenvalues(results: list[Curvature]) -> Sheet:
    from onfoot.cli.console import Sheet

    top = len(results[0].spectrum.largest)
    rows = [(f"{i + 1}", *(_estimate(r.spectrum.largest[i]) for r in results)) for i in range(top)]
    ends = set()
    if any(r.spectrum.smallest for r in results):
        ends = {top - 1}
        for i in reversed(range(top)):
            shown = (_estimate(r.spectrum.smallest[i]) if r.spectrum.smallest else "" for r in results)
            rows.append((f"-{i + 1}", *shown))
    notes = ["± bounds the distance to an eigenvalue; -1 is the smallest, most negative one"] if ends else []
    return Sheet("Eigenvalues", [">", *(f">{TITLES[r.kind]}" for r in results)], rows, notes, section_ends=ends)


def _layers(results: list[Curvature]) -> Sheet:
    from onfoot.cli.console import Sheet

    rows = []
    for i, layer in enumerate(results[0].layers):
        cells = [(_estimate(r.layers[i].largest), _estimate(r.layers[i].trace)) for r in results]
        rows.append((layer.name, f"{layer.n_params:,}", *(text for pair in cells for text in pair)))
    headings = [f">{TITLES[r.kind]} {what}" for r in results for what in ("λ_max", "trace")]
    return Sheet("Layers", ["layer", ">parameters", *headings], rows)


def _number(value: float | None, digits: int = 4) -> str:
    """So many digits, or more where the integer part has more: 1235 and not 1.2e+03."""
    if value is None:
        return "–"
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e6 else f"{value:.{digits}g}"


def _estimate(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{_number(estimate.value)} ± {_number(estimate.error, 2)}"
