"""`onfoot walk`: every number of the forward and backward pass of a small network, with every gradient checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onfoot.cli import options
from onfoot.config import GPT2Config

if TYPE_CHECKING:
    from rich.text import Text

    from onfoot.explore.walk import Line, Walk
    from onfoot.explore.walk_model import ModelWalk

TOKENS = "3 1 4 1 5"  # of a walk without a model
LIMIT = 12  # rows and columns of a printed matrix
WIDTH = 80  # columns of the printed walk, unless it is --full
SMALL = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=8, tie_word_embeddings=True)


def walk(
    model: Annotated[
        Path | None,
        typer.Argument(help="Your own model; by default a small network with random parameters.", show_default=False),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="The text that your model reads.", show_default=False)
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Token ids; the target of each is the next one.", show_default=TOKENS),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the parameters and of the directions of the checks.")
    ] = 0,
    summed: Annotated[
        bool, typer.Option("--sum", help="Sum the loss over the targets, as the paper does, instead of averaging.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Print large matrices in full.")] = False,
    output: Annotated[options.Format, typer.Option("--format", help="Output format.")] = options.Format.rich,
    n_layer: options.NLayer = None,
    n_embd: options.NEmbd = None,
    n_head: options.NHead = None,
    vocab_size: options.VocabSize = None,
    n_positions: options.NPositions = None,
    n_inner: options.NInner = None,
    head_dim: options.HeadDim = None,
    qk_head_dim: options.QkHeadDim = None,
    tied: options.Tied = None,
    lm_head_bias: options.LmHeadBias = None,
    causal: options.Causal = None,
    activation: options.Activation = None,
) -> None:
    """Print every activation and gradient of a small network, with every gradient checked.

    Each gradient is checked against a finite difference of the loss along a random direction: an error signal Δ_i by
    perturbing a_i and running the rest of the network, a parameter's gradient by perturbing the parameter. All in
    float64. The default is one block of hidden size 8 with 2 heads, a vocabulary of 10 and 8 positions; a MODEL has its
    own configuration, and reads your --text or --tokens. Exit status 1 if a check fails.
    """
    import numpy as np

    from onfoot.explore.walk import Walk

    changes: dict[str, Any] = {
        "n_layer": n_layer,
        "n_embd": n_embd,
        "n_head": n_head,
        "vocab_size": vocab_size,
        "n_positions": n_positions,
        "n_inner": n_inner,
        "head_dim": head_dim,
        "qk_head_dim": qk_head_dim,
        "tie_word_embeddings": tied,
        "lm_head_bias": lm_head_bias,
        "causal": causal,
        "activation_function": activation,
    }
    walked: Walk | ModelWalk
    if model is None:
        if text is not None:
            raise ValueError("--text needs a model with a tokenizer: onfoot walk MODEL --text …")
        config = options.configure(SMALL, **changes)
        walked = Walk(config, np.array([options.parse_tokens(tokens or TOKENS)]), seed, summed)
    else:
        if summed or any(value is not None for value in changes.values()):
            raise ValueError("a model has its own configuration; leave out --sum and the options of the small network")
        walked = _own_walk(model, text, tokens, seed)
    if output is options.Format.json:
        _show_json(walked)
    else:
        _show(walked, limit=10**9 if full else LIMIT)
    if walked.failed:
        raise typer.Exit(1)


def _own_walk(folder: Path, text: str | None, tokens: str | None, seed: int) -> ModelWalk:
    from onfoot.explore import texts
    from onfoot.explore.loading import load_model
    from onfoot.explore.walk_model import ModelWalk

    if (text is None) == (tokens is None):
        raise ValueError('a model needs an input; give --text "…", or --tokens "3 1 4 1 5"')
    model = load_model(folder)
    ids = texts.read_text(model, text) if text is not None else texts.read_ids(model, tokens or "")
    return ModelWalk(model, ids, seed)


def _wrapped(text: str, style: str = "") -> None:
    import textwrap

    from onfoot.cli.console import show_text

    show_text("\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False)), style)


def _show(walked: Walk | ModelWalk, limit: int) -> None:
    from rich.text import Text

    from onfoot.cli.console import show_text

    c = walked.config
    n_tokens = walked.tokens.shape[1]
    blocks, heads = (f"{n} {noun}{'s' if n != 1 else ''}" for n, noun in ((c.n_layer, "block"), (c.n_head, "head")))
    logits = (
        "tied logits"
        if c.tie_word_embeddings
        else "untied logits" + (" with a bias" if getattr(c, "lm_head_bias", False) else "")
    )
    _wrapped(
        f"{blocks}, hidden size d = {c.n_embd}, {heads} with d_ρ = {c.key_width} and d_h = {c.value_width}, "
        f"vocabulary {c.vocab_size}, {logits}; {n_tokens} tokens, n = {walked.divisor}; float64, seed {walked.seed}"
    )
    unchecked = getattr(walked, "unchecked", "")
    _wrapped(
        "~ broadcasts over tokens, ∘ multiplies elementwise, ⊖ is the dot product of rows, ᵗ transposes; "
        "0 is exactly 0",
        "dim",
    )
    _wrapped(
        unchecked
        or "✓ relative error between the formula and a finite difference of the loss along a random direction",
        "dim",
    )
    width = WIDTH if limit == LIMIT else None
    for section in walked.sections():
        arrow, style = ("↓", "bold cyan") if section.direction == "forward" else ("↑", "bold magenta")
        show_text(f"\n{arrow} {section.direction} · {section.title} ".ljust(WIDTH, "─"), style)
        text = Text()
        for line in section.lines:
            _write(line, text, limit, width)
        show_text(text)
    n = len(walked.errors)
    show_text(f"loss {walked.loss:.6f}", "bold")
    if not n:
        show_text(unchecked, "dim")
    elif walked.failed:
        show_text(f"✗ {len(walked.failed)} of {n} checks failed: {', '.join(walked.failed)}", "bold red")
    else:
        show_text(f"✓ all {n} checks passed; largest relative error {max(walked.errors):.0e}", "bold green")


def _write(line: Line, text: Text, limit: int, width: int | None) -> None:
    """Appends one line that describes the array, or two if one is too short for it, then its numbers."""
    from onfoot.cli.matrix import matrix_lines

    shape = " × ".join(str(n) for n in line.value.shape)
    equations = f"eq {', '.join(line.formula.equations)}" if line.formula.equations else ""
    text.append("\n")
    title = line.formula.text or line.symbol
    text.append(f"{title:<40}", "bold")
    if len(title) > 40:
        text.append("\n" + 40 * " ")
    text.append(f"  {equations:<14} {shape:>10}", "dim")
    if line.check is not None:
        mark, style = ("✓", "green") if line.check.passed else ("✗", "bold red")
        text.append(f"  {mark} {f'{line.check.error:.0e}' if line.check.error else '0':<5}", style)
        if not line.check.passed:
            text.append(f"\n  formula {line.check.formula:.8g}, difference {line.check.difference:.8g}", style)
    text.append("\n")
    if line.parameter is not None:
        text.append(f"  of {line.parameter}\n", "dim")
    if line.formula.where:
        short = len(line.formula.where) <= WIDTH - 2
        for part in [line.formula.where] if short else line.formula.where.split(",  "):
            text.append(f"  {part}\n", "bold")
    room = None if width is None else width - 4
    for row in matrix_lines(line.value, line.margin, limit, limit, room):
        text.append(f"    {row}\n")


def _show_json(walked: Walk | ModelWalk) -> None:
    from onfoot.cli.console import show_json

    sections = [
        {
            "title": section.title,
            "direction": section.direction,
            "block": section.block,
            "head": section.head,
            "steps": [_line_json(line) for line in section.lines],
        }
        for section in walked.sections()
    ]
    show_json(
        {
            "config": walked.config.to_dict(),
            "seed": walked.seed,
            "tokens": walked.tokens[0].tolist(),
            "divisor": walked.divisor,
            "sections": sections,
            "loss": walked.loss,
            "checks": len(walked.errors),
            "failed": walked.failed,
        }
    )


def _line_json(line: Line) -> dict[str, Any]:
    """One array as a JSON object; values that are not finite, such as masked scores, are null."""
    import numpy as np

    value = line.value.astype(object)
    value[~np.isfinite(line.value)] = None
    out: dict[str, Any] = {
        "symbol": line.symbol,
        "formula": line.formula.text,
        "where": line.formula.where,
        "equations": list(line.formula.equations),
        "shape": list(line.value.shape),
        "value": value.tolist(),
    }
    if line.parameter is not None:
        out["parameter"] = line.parameter
    if line.margin is not None:
        out["margin"] = {"label": line.margin[0], "values": line.margin[1].tolist()}
    if line.check is not None:
        out["check"] = {**line.check._asdict(), "error": line.check.error, "passed": line.check.passed}
    return out
