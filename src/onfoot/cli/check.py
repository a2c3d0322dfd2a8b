"""`onfoot check`: checks a backward function, with a diagnosis of what is wrong, or checks this installation."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

LAYER_OPTIONS = "Layer options"


class Arrays(str, Enum):
    """The array type passed to the function."""

    auto = "auto"
    numpy = "numpy"
    torch = "torch"


class Dtype(str, Enum):
    """The precision of the inputs."""

    both = "both"
    float64 = "float64"
    float32 = "float32"


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=LAYER_OPTIONS, show_default=False)


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FUNCTION", help="Backward function, as module:function or file.py:function.", show_default=False
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="Layer of the function: attention, head, head_dropout, multi_head, layer_norm, rms_norm, linear, "
            "lora, embedding, tied_embedding, softmax_cross_entropy, next_token_loss, gelu, swiglu, rope, block or "
            "adamw. Without a function: shows the expected signature and the known mistakes.",
            show_default=False,
        ),
    ] = None,
    arrays: Annotated[
        Arrays, typer.Option(help="Input type; auto tries NumPy arrays, then PyTorch tensors if the function raises.")
    ] = Arrays.auto,
    dtype: Annotated[Dtype, typer.Option(help="Precision: float64, float32 or both.")] = Dtype.both,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs and their shapes.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also require the cases beyond the basic contract to pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    causal: Annotated[
        bool | None, _option("--causal/--no-causal", text="Causal attention, or attention to all tokens.")
    ] = None,
    rotary: Annotated[
        bool | None, _option("--rotary/--no-rotary", text="Apply RoPE to the queries and keys of a head.")
    ] = None,
    eps: Annotated[float | None, _option("--eps", text="Epsilon of the norms and of AdamW.")] = None,
    n_head: Annotated[
        int | None, _option("--n-head", text="Number of heads of multi_head and block; 2 by default.")
    ] = None,
    form: Annotated[str | None, _option("--form", text="Form of GELU: tanh (default) or erf.")] = None,
    theta: Annotated[float | None, _option("--theta", text="Base of RoPE; 10000 by default.")] = None,
    reduction: Annotated[
        str | None, _option("--reduction", text="Reduction of the loss: mean (default) or sum.")
    ] = None,
) -> None:
    """Check whether a backward function is right, and if not, which mistake it makes.

    The function takes the inputs of the layer's forward, then the upstream gradient, and returns the gradients in the
    same order: `--layer attention` calls `f(q, k, v, dout)` with arrays (batch, heads, tokens, head_dim) and expects
    `dq, dk, dv`. The result is compared with the exact formula on many shapes. A wrong result is compared with every
    known mistake on the same data, and with pairs of them.

    Exit status: 0 if all gradients are right, 1 if not, 2 if the arguments are invalid. Without arguments, every op and
    engine of this installation is checked.
    """
    from onfoot.cli import console

    layer_options = {
        "causal": causal,
        "rotary": rotary,
        "eps": eps,
        "n_head": n_head,
        "form": form,
        "theta": theta,
        "reduction": reduction,
    }
    options = {name: value for name, value in layer_options.items() if value is not None}
    if target is None:
        function_options = {"arrays": arrays != "auto", "dtype": dtype != "both", "seed": seed != 0, "strict": strict}
        report: Any = _without_function(layer, options, [name for name, given in function_options.items() if given])
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
        raise ValueError(
            f"{target} is a layer, not a function; give a function and --layer {target}, or --layer {target} alone"
        )
    if layer is None:
        raise ValueError(f"which layer does {target} compute? Give --layer with one of {', '.join(LAYERS)}")
    found = get_layer(layer)
    function = load_function(target, layer)
    target = target.rstrip(":")
    name = target if ":" in target else f"{target}:{getattr(function, '__name__', '')}"
    dtypes = DTYPES if dtype == "both" else (dtype,)
    return check_layer(found, function, dtypes=dtypes, arrays=arrays, seed=seed, strict=strict, name=name, **options)


def _without_function(layer: str | None, options: dict[str, Any], function_options: list[str]) -> Any:
    from onfoot.check.contract import Contract
    from onfoot.check.engines import installation
    from onfoot.check.layers import get_layer

    if function_options:
        raise ValueError(f"--{function_options[0]} needs a function; give one as module:function or file.py:function")
    if layer is not None:
        found = get_layer(layer)
        return Contract(found, found.with_options(options))
    if options:
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} needs a layer; give a function and --layer")
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
