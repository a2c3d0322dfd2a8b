"""`onfoot check`: a backward pass against the exact gradients, with a diagnosis; or this installation itself."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

LAYER_OPTIONS = "Options of layers"


class Arrays(str, Enum):
    """What the function is given."""

    auto = "auto"
    numpy = "numpy"
    torch = "torch"


class Dtype(str, Enum):
    """In what precision."""

    both = "both"
    float64 = "float64"
    float32 = "float32"


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=LAYER_OPTIONS, show_default=False)


def check(
    target: Annotated[
        str | None,
        typer.Argument(metavar="FUNCTION", help="module:function, or file.py:function.", show_default=False),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="attention, head, head_dropout, multi_head, layer_norm, rms_norm, linear, lora, embedding, "
            "tied_embedding, softmax_cross_entropy, next_token_loss, gelu, swiglu, rope, block or adamw. "
            "Without a function: what is expected of one, and the mistakes that are known.",
            show_default=False,
        ),
    ] = None,
    arrays: Annotated[
        Arrays, typer.Option(help="What to pass: NumPy arrays, and with auto PyTorch tensors if it raises with those.")
    ] = Arrays.auto,
    dtype: Annotated[Dtype, typer.Option(help="float64, float32 or both.")] = Dtype.both,
    seed: Annotated[int, typer.Option(help="Of the random inputs and their sizes.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Count the cases beyond the plain contract as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report for programs.")] = False,
    causal: Annotated[
        bool | None, _option("--causal/--no-causal", text="A token sees what came before, or all.")
    ] = None,
    rotary: Annotated[
        bool | None, _option("--rotary/--no-rotary", text="A head's queries and keys turned by their positions.")
    ] = None,
    eps: Annotated[float | None, _option("--eps", text="Of the norms and of AdamW.")] = None,
    n_head: Annotated[int | None, _option("--n-head", text="Heads of multi_head and block; 2 by default.")] = None,
    form: Annotated[str | None, _option("--form", text="Of GELU: tanh (the default) or erf.")] = None,
    theta: Annotated[float | None, _option("--theta", text="Of RoPE; 10000 by default.")] = None,
    reduction: Annotated[str | None, _option("--reduction", text="Of the loss: mean (the default) or sum.")] = None,
) -> None:
    """Is a gradient right, and if not, which mistake is it?

    The function takes what the layer's forward takes and the upstream gradient last, and returns the gradients in the
    same order: `--layer attention` calls `f(q, k, v, dout)` with arrays (batch, heads, tokens, width) and expects
    `dq, dk, dv`. It is compared with the exact formula on a battery of shapes. A wrong result is compared with every
    known mistake, run on the same data, and with pairs of them.

    Exit status: 0 if all gradients are right, 1 if not, 2 if the call itself makes no sense. Without arguments, every
    op and engine of this installation is checked.
    """
    from onfoot.cli import console

    asked = {
        "causal": causal,
        "rotary": rotary,
        "eps": eps,
        "n_head": n_head,
        "form": form,
        "theta": theta,
        "reduction": reduction,
    }
    options = {name: value for name, value in asked.items() if value is not None}
    if target is None:
        of_function = {"arrays": arrays != "auto", "dtype": dtype != "both", "seed": seed != 0, "strict": strict}
        report: Any = _without_function(layer, options, [name for name, given in of_function.items() if given])
    else:
        report = _with_function(target, layer, arrays.value, dtype.value, seed, strict, options)
    if as_json:
        console.show_json(report.to_dict())
    else:
        console.show_text(_coloured(str(report)))
    raise typer.Exit(0 if report.passed else 1)


def _with_function(
    target: str, layer: str | None, arrays: str, dtype: str, seed: int, strict: bool, options: dict[str, Any]
) -> Any:
    from onfoot.check.known import DTYPES, check_layer
    from onfoot.check.layers import LAYERS, get_layer
    from onfoot.check.load import load_function

    if layer is None and target in LAYERS:
        raise ValueError(f"{target} is a layer: give a function and --layer {target}, or --layer {target} alone")
    if layer is None:
        raise ValueError(f"which layer is {target}? Give --layer with one of {', '.join(LAYERS)}")
    found = get_layer(layer)
    function = load_function(target, layer)
    target = target.rstrip(":")
    name = target if ":" in target else f"{target}:{getattr(function, '__name__', '')}"
    dtypes = DTYPES if dtype == "both" else (dtype,)
    return check_layer(found, function, dtypes=dtypes, arrays=arrays, seed=seed, strict=strict, name=name, **options)


def _without_function(layer: str | None, options: dict[str, Any], of_function: list[str]) -> Any:
    from onfoot.check.contract import Contract
    from onfoot.check.engines import installation
    from onfoot.check.layers import get_layer

    if of_function:
        raise ValueError(f"--{of_function[0]} is for a function; give one as module:function or file.py:function")
    if layer is not None:
        found = get_layer(layer)
        return Contract(found, found.with_options(options))
    if options:
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} is for a layer; give a function and --layer")
    return installation()


def _coloured(text: str) -> Any:
    from rich.text import Text

    out = Text(text)
    out.highlight_regex(r"✓( passes.*| all.*)?", "green")
    out.highlight_regex(r"\S+ ✗", "red")
    out.highlight_regex(r"(?m)^✗.*$", "bold red")
    out.highlight_regex(r"(?m)^Diagnosis.*$", "bold")
    out.highlight_regex(r"(?m)^  \d\. .*$", "bold yellow")
    out.highlight_regex(r"(?m)^     (violates|fix|see) ", "cyan")
    out.highlight_regex(r"\A.*", "bold cyan")
    return out
