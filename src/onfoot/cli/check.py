"""`onfoot check`: checks a backward function, with a diagnosis of what is wrong, or checks this installation."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Annotated, Any

import typer

LAYER_OPTIONS = "Layer options"
SIZES = "Sizes: a number, or several with commas"
PROCESS = "Process"
TIMEOUT = 30.0


class Arrays(str, Enum):
    """The array type passed to the function."""

    auto = "auto"
    numpy = "numpy"
    torch = "torch"
    jax = "jax"


class Dtype(str, Enum):
    """The precision of the inputs."""

    both = "both"
    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def _size(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SIZES, show_default=False, metavar="N")


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=LAYER_OPTIONS, show_default=False)


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FUNCTION",
            help="Backward function, forward/backward pair or class, as module:name or file.py:name.",
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="Layer of the function: attention, attention_dropout, rope_attention, grouped_query_attention, head, "
            "head_dropout, multi_head, self_attention, self_attention_separate, cross_attention, layer_norm, rms_norm, "
            "linear, lora, embedding, tied_embedding, tied_head, loss_head, softmax_cross_entropy, next_token_loss, "
            "dpo, softmax, gelu, relu, silu, swiglu, rope, block, relu_block, post_norm_block, adamw or adamw_step. "
            "Without a function: shows the expected signature and the known mistakes.",
            show_default=False,
        ),
    ] = None,
    arrays: Annotated[
        Arrays, typer.Option(help="Input type; auto tries NumPy arrays, then PyTorch tensors if the function raises.")
    ] = Arrays.auto,
    dtype: Annotated[
        Dtype, typer.Option(help="Precision: float64, float32, both of these, or 16 bits, judged by their rounding.")
    ] = Dtype.both,
    layout: Annotated[
        str,
        typer.Option(
            help="Layout of the arrays: auto recognises it; contract, bthd, rows, sequence, single_head or transposed, "
            "also with a plus sign, chooses it.",
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs and their shapes.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also require the cases beyond the basic contract to pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated/--no-isolated",
            help="Run the function in its own process, where it may crash, hang or exit, or in this one.",
            rich_help_panel=PROCESS,
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a call may take, if isolated.", rich_help_panel=PROCESS)
    ] = TIMEOUT,
    template: Annotated[
        bool,
        typer.Option(
            "--template", help="Print the layer's function to fill in, or write it to the new file given as FUNCTION."
        ),
    ] = False,
    tokens: Annotated[str | None, _size("--tokens", text="Tokens per sequence.")] = None,
    width: Annotated[
        str | None, _size("--width", text="Features per token; the size of the vocabulary of a loss.")
    ] = None,
    heads: Annotated[str | None, _size("--heads", text="Heads.")] = None,
    head_dim: Annotated[str | None, _size("--head-dim", text="Features per head.")] = None,
    batch: Annotated[str | None, _size("--batch", text="Sequences.")] = None,
    causal: Annotated[
        bool | None, _option("--causal/--no-causal", text="Causal attention, or attention to all tokens.")
    ] = None,
    rotary: Annotated[
        bool | None, _option("--rotary/--no-rotary", text="Apply RoPE to the queries and keys of a head.")
    ] = None,
    eps: Annotated[float | None, _option("--eps", text="Epsilon of the norms and of AdamW.")] = None,
    n_head: Annotated[
        int | None, _option("--n-head", text="Number of heads of a layer with projections; 2 by default.")
    ] = None,
    form: Annotated[str | None, _option("--form", text="Form of GELU: tanh (default) or erf.")] = None,
    beta: Annotated[float | None, _option("--beta", text="Strength of DPO; 0.1 by default.")] = None,
    lr: Annotated[float | None, _option("--lr", text="Learning rate of AdamW.")] = None,
    beta1: Annotated[float | None, _option("--beta1", text="β₁ of AdamW.")] = None,
    beta2: Annotated[float | None, _option("--beta2", text="β₂ of AdamW.")] = None,
    weight_decay: Annotated[float | None, _option("--weight-decay", text="Weight decay of AdamW; may be 0.")] = None,
    max_norm: Annotated[
        float | None, _option("--max-norm", text="Largest norm of all gradients together, in a step of AdamW.")
    ] = None,
    theta: Annotated[float | None, _option("--theta", text="Base of RoPE; 10000 by default.")] = None,
    reduction: Annotated[
        str | None, _option("--reduction", text="Reduction of the loss: mean (default) or sum.")
    ] = None,
) -> None:
    """Check whether a backward pass is right, and if not, which mistake it makes.

    The function takes the inputs of the layer's forward, then the upstream gradient, and returns the gradients in the
    same order: `--layer attention` calls `f(q, k, v, dout)` with arrays (batch, heads, tokens, head_dim) and expects
    `dq, dk, dv`. Other names, orders and layouts are recognised, and so are a torch.autograd.Function, an nn.Module, a
    class with forward and backward, a forward/backward pair and a JAX function. The result is compared with the exact
    formula on many shapes. A wrong result is compared with every known mistake on the same data, and with
    pairs of them.

    Exit status: 0 if all gradients are right; 1 if one is wrong or the function raises, crashes, exits or takes longer
    than the timeout; 2 if the arguments are invalid or the file cannot be imported. Without arguments, every op and
    engine of this installation is checked.
    """
    from onfoot.cli import console

    layer_options = {
        "causal": causal,
        "rotary": rotary,
        "eps": eps,
        "n_head": n_head,
        "form": form,
        "beta": beta,
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "max_norm": max_norm,
        "theta": theta,
        "reduction": reduction,
    }
    options = {name: value for name, value in layer_options.items() if value is not None}
    every_size = {"tokens": tokens, "width": width, "heads": heads, "head_dim": head_dim, "batch": batch}
    sizes = {name: value for name, value in every_size.items() if value is not None}
    settings = {"arrays": arrays != "auto", "dtype": dtype != "both", "layout": layout != "auto"}
    settings |= {"seed": seed != 0, "strict": strict}
    settings |= {"no-isolated": not isolated, "timeout": timeout != TIMEOUT}
    given = [name.replace("_", "-") for name in (*(name for name, given in settings.items() if given), *sizes)]
    if template:
        _template(target, layer, options, [*given, *(["json"] if as_json else [])])
        return
    if target is None:
        report: Any = _without_function(layer, options, given)
    else:
        numbers = {name: _numbers(name, value) for name, value in sizes.items()}
        seconds = timeout if isolated else None
        if not isolated and timeout != TIMEOUT:
            raise ValueError("--timeout needs --isolated: a call in this process cannot be ended")
        chosen = {**options, **numbers, "layout": layout}
        report = _with_function(target, layer, arrays.value, dtype.value, seed, strict, seconds, chosen)
    if as_json:
        console.show_json(report.to_dict())
    else:
        console.show_text(_coloured(str(report)))
    raise typer.Exit(0 if report.passed else 1)


def _numbers(name: str, text: str) -> list[int]:
    """Reads one size or several."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} must be a number or several with commas, got {text!r}") from None


def _template(target: str | None, layer: str | None, options: dict[str, Any], given: list[str]) -> None:
    """Prints the function to fill in, or writes it to a new file."""
    from onfoot.check.layers import LAYERS, get_layer
    from onfoot.check.template import template, write_template
    from onfoot.cli import console
    from onfoot.terminal import shell_word

    if layer is None:
        raise ValueError(f"--template needs a layer; give --layer with one of {', '.join(LAYERS)}")
    if given:
        raise ValueError(f"--{given[0]} has no effect on a template; leave it out")
    found = get_layer(layer)
    if target is None:
        print(template(found, found.with_options(options)), end="")
    else:
        path = write_template(found, found.with_options(options), target)
        console.show_text(f"wrote {path}; fill it in, then run: onfoot check {shell_word(path)} --layer {layer}")


def _with_function(
    target: str,
    layer: str | None,
    arrays: str,
    dtype: str,
    seed: int,
    strict: bool,
    timeout: float | None,
    options: dict[str, Any],
) -> Any:
    from onfoot.check.budget import DTYPES
    from onfoot.check.known import check_layer
    from onfoot.check.layers import LAYERS, get_layer

    if layer is None and target in LAYERS:
        raise ValueError(
            f"{target} is a layer, not a function; give a function and --layer {target}, or --layer {target} alone"
        )
    if layer is None:
        raise ValueError(f"which layer does {target} compute? Give --layer with one of {', '.join(LAYERS)}")
    found = get_layer(layer)
    with _loaded(target, layer, timeout) as function:
        target = target.rstrip(":")
        name = target if ":" in target else f"{target}:{getattr(function, '__name__', '')}"
        dtypes = DTYPES if dtype == "both" else (dtype,)
        return check_layer(
            found, function, dtypes=dtypes, arrays=arrays, seed=seed, strict=strict, name=name, **options
        )


def _loaded(target: str, layer: str, timeout: float | None) -> contextlib.AbstractContextManager[Any]:
    """The function, in its own process if there is a timeout."""
    if timeout is not None:
        from onfoot.check.isolated import IsolatedFunction

        return IsolatedFunction(target, layer, timeout)
    from onfoot.check.load import load_object

    return contextlib.nullcontext(load_object(target, layer))


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
