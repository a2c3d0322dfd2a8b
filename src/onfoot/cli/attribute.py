"""`onfoot attribute`: how much each token contributes to the loss, and which replacements would lower it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onfoot.cli import options
from onfoot.cli.fields import reject_with
from onfoot.config import GPT2Config, preset

if TYPE_CHECKING:
    from onfoot.attribution import Attribution
    from onfoot.formats.tokenizer import Tokenizer

BYTES = 256  # vocabulary size of a byte-level model
BAR_WIDTH = 24  # of the largest contribution
SIZES = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
SMALL = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=BYTES, n_positions=256)


def attribute(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, run folder, GGUF file, smollm2, or org/name; by default a small untrained byte-level "
            "model.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Token ids; the target of each is the next one.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="Text, encoded with the model's tokenizer.")] = None,
    top: Annotated[int, typer.Option("--top", help="Number of swaps to evaluate.")] = 10,
    preset_name: Annotated[
        str | None, typer.Option("--preset", help="Name of a configuration; by default a small byte-level model.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weight initialization.")] = 0,
    download: options.Download = False,
    output: Annotated[options.Format, typer.Option("--format", help="Output format.")] = options.Format.rich,
    n_layer: options.NLayer = None,
    n_embd: options.NEmbd = None,
    n_head: options.NHead = None,
    vocab_size: options.VocabSize = None,
    n_positions: options.NPositions = None,
) -> None:
    """Attribute the loss to the input tokens, and find token swaps that would lower it.

    Shows gradient × input of each token, Δ_0[t, id], and the swaps with the most negative Δ_0[t, new] − Δ_0[t, old],
    together with the actual change of the loss. The targets stay those of the original text.
    """
    from onfoot.attribution import attribute as attribute_tokens
    from onfoot.models.load import create, load

    if (tokens is None) == (text is None):
        raise ValueError('give either --tokens "3 1 4 1 5" or --text "…"')
    names: Callable[[int], str] = str
    if model is not None:
        if preset_name is not None:
            raise ValueError("give either MODEL or --preset, not both")
        reject_with(context, "MODEL", (*SIZES, "seed"), f"{model} has its own configuration and weights")
        loaded = load(model, download=download)
        if text is not None and loaded.tokenizer is None:
            raise ValueError(f'{model} has no tokenizer; give token ids, as in --tokens "3 1 4 1 5"')
        if loaded.tokenizer is not None:
            names = _token_names(loaded.tokenizer)
        ids = (
            loaded.tokenizer.encode(text, add_special_tokens=True)
            if loaded.tokenizer and text is not None
            else options.parse_tokens(tokens or "")
        )
        _report(attribute_tokens(loaded, _check_length(ids), n_swaps=top), names, output)
        return
    config = options.configure(
        SMALL if preset_name is None else preset(preset_name),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        vocab_size=vocab_size,
        n_positions=n_positions,
    )
    if text is not None and config.vocab_size != BYTES:
        raise ValueError(
            f"--text is encoded as bytes and needs vocab_size={BYTES}, got {config.vocab_size}; give --tokens instead"
        )
    ids = list(text.encode()) if text is not None else options.parse_tokens(tokens or "")
    dtype = "float64" if preset_name is None else "float32"  # a preset may be large: float32 halves the memory
    names = _byte_name if text is not None else str
    _report(attribute_tokens(create(config, seed, dtype), _check_length(ids), n_swaps=top), names, output)


def _check_length(ids: list[int]) -> list[int]:
    if len(ids) < 2:
        raise ValueError(f"at least 2 tokens are needed to have a target, got {len(ids)}")
    return ids


def _report(result: Attribution, names: Callable[[int], str], output: options.Format) -> None:
    if output is options.Format.json:
        from onfoot.cli.console import show_json

        lists = {"tokens": result.tokens.tolist(), "contributions": result.contributions.tolist()}
        show_json({**asdict(result), **lists})
    else:
        _show(result, names)


def _show(result: Attribution, name: Callable[[int], str]) -> None:
    from onfoot.cli.console import Sheet, show_sheet, show_text

    largest = max(abs(result.contributions).max(), 1e-300)
    show_text(f"loss {result.loss:.6f}", "bold")
    show_sheet(
        Sheet(
            "Gradient × input: Δ_0[t, id]",
            [">t", "token", ">Δ_0[t, id]", "raises (+) or lowers (−) the loss"],
            [
                (str(t), name(int(token)), f"{value:+.6f}", _bar(value / largest))
                for t, (token, value) in enumerate(zip(result.tokens, result.contributions, strict=True))
            ],
        )
    )
    show_sheet(
        Sheet(
            "Best swaps to first order: Δ_0[t, new] − Δ_0[t, id]",
            [">t", "token", "new", ">predicted change", ">actual change of the loss"],
            [
                (str(s.position), name(s.old), name(s.new), f"{s.predicted:+.6f}", f"{s.actual:+.6f}")
                for s in result.swaps
            ],
            ["Each swap is applied on its own; the targets stay those of the original text."],
        )
    )


def _byte_name(token: int) -> str:
    return f"{token}  " + (repr(chr(token)) if 32 <= token < 127 else f"0x{token:02x}")


def _token_names(tokenizer: Tokenizer) -> Callable[[int], str]:
    return lambda token: f"{token}  {tokenizer.decode([token])!r}"


def _bar(fraction: float) -> str:
    return ("+" if fraction > 0 else "−") * round(abs(fraction) * BAR_WIDTH)
