"""`onfoot info`: what a model folder, a GGUF file or a run holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.cli.fields import refuse_without

if TYPE_CHECKING:
    from onfoot.config import Config
    from onfoot.formats.tokenizer import Tokenizer


def info(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A model folder, a run, a GGUF file, or smollm2; with --memory also a preset."
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Say what training it would need, and what would fit.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="With --memory: sequences a microbatch.")] = 12,
    tokens: Annotated[
        int | None, typer.Option(help="With --memory: tokens a sequence; all positions.", show_default=False)
    ] = None,
    lora: Annotated[int, typer.Option(help="With --memory: the rank of a fine-tuning; 0 trains all weights.")] = 0,
    quantized: Annotated[bool, typer.Option("--quantized", help="With --memory: the frozen base in 8 bits.")] = False,
    clip: Annotated[float, typer.Option(help="With --memory: as in training; 0 means no clipping.")] = 1.0,
    recompute: Annotated[str, typer.Option(help="With --memory: as in training; none or block.")] = "none",
) -> None:
    """Show what a model folder, a GGUF file or a run holds, or with --memory what training it needs."""
    from onfoot.formats.gguf_model import find_file
    from onfoot.formats.peft import is_adapter_folder
    from onfoot.formats.run_folder import checkpoints, model_folder

    if memory:
        from onfoot.cli.info_memory import planned_job, show_memory

        show_memory(planned_job(folder, batch_size, tokens, lora, quantized, clip, recompute))
        return
    refuse_without(context, "--memory", ("batch_size", "tokens", "lora", "quantized", "clip", "recompute"))
    file = find_file(folder)
    if file is not None:
        _show_model(_read_file(file), tensors)
        return
    if (folder / "run.json").is_file():
        _show_run(folder)
        if not checkpoints(folder):
            show_text("  it has no checkpoint yet, so there is no model to show; the first is written by its training")
            return
    model = model_folder(folder)
    if is_adapter_folder(model):
        _show_adapter(model)
    else:
        _show_model(_read_folder(model), tensors)


class _Found(NamedTuple):
    """A model, without its weights."""

    where: tuple[str, str]
    config: Config
    tensors: list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
    tokenizer: Tokenizer | None


def _read_folder(folder: Path) -> _Found:
    from onfoot.formats.huggingface import Params, load_config, tensor_summary
    from onfoot.formats.tokenizer import Tokenizer, check_fits

    config = load_config(folder)
    Params(folder, config)  # refuses what does not fit
    tokenizer = Tokenizer.find(folder)
    if tokenizer is not None:
        check_fits(tokenizer, config, folder)
    return _Found(("folder", str(folder)), config, tensor_summary(folder), tokenizer)


def _read_file(path: Path) -> _Found:
    from onfoot.formats.gguf import GgufFile
    from onfoot.formats.gguf_model import Params, read_config
    from onfoot.formats.gguf_tokenizer import find_tokenizer

    file = GgufFile(path)
    config = read_config(file)
    Params(file, config, quantized=True)
    listed = [(name, entry.shape, entry.type) for name, entry in file.tensors.items()]
    return _Found(("file", str(path)), config, listed, find_tokenizer(file.metadata, path, config))


def _show_model(found: _Found, tensors: bool) -> None:
    from onfoot.models.params import count, shapes

    config, tokenizer, listed = found.config, found.tokenizer, found.tensors
    dtypes = sorted({dtype for _, _, dtype in listed})
    cache = config.n_layer * config.n_kv_head * (config.key_width + config.value_width)
    shared = f", {config.n_kv_head} of keys and values" if config.n_kv_head != config.n_head else ""
    rows: list[tuple[str, ...]] = [
        found.where,
        ("architecture", config.model_type),
        ("parameters", f"{count(shapes(config)):,}"),
        ("blocks", str(config.n_layer)),
        ("width", str(config.n_embd)),
        ("heads", f"{config.n_head} of {config.value_width}{shared}"),
        ("between expand and contract", f"{config.inner_width}, {config.activation_function}"),
        ("positions", f"{config.n_positions:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("logits", "tied to the token table" if config.tie_word_embeddings else "with their own weight"),
        ("tensors", f"{len(listed)}, {', '.join(dtypes)}, {sum(math.prod(s) for _, s, _ in listed):,} numbers"),
        (
            "KV cache",
            f"{cache:,} numbers per token, {4 * cache * config.n_positions / 2**20:,.1f} MiB when full (float32)",
        ),
        ("tokenizer", "none" if tokenizer is None else f"{tokenizer.size:,} tokens, end {tokenizer.eos!r}"),
    ]
    show_sheet(Sheet("Model", ["", ""], rows))
    if tensors:
        rows = [(name, " × ".join(map(str, shape)), dtype) for name, shape, dtype in listed]
        show_sheet(Sheet("Tensors", ["name", ">shape", "dtype"], rows))


def _show_adapter(folder: Path) -> None:
    from onfoot.formats.peft import TENSORS, read_config
    from onfoot.formats.tensors import TensorFile

    config = read_config(folder)
    tensors = TensorFile(folder / TENSORS)
    rows: list[tuple[str, ...]] = [
        ("folder", str(folder)),
        ("base", str(config.get("base_model_name_or_path"))),
        ("rank, alpha", f"{config['r']}, {config['lora_alpha']}"),
        ("layers", f"{len(tensors) // 2}"),
        ("parameters", f"{sum(math.prod(tensors.shape(name)) for name in tensors):,}"),
    ]
    show_sheet(Sheet("LoRA adapter", ["", ""], rows))


def _show_run(folder: Path) -> None:
    from onfoot.formats.files import read_json
    from onfoot.formats.run_folder import checkpoints, read_state, validate
    from onfoot.train.log import Log
    from onfoot.train.options import FinetuneOptions, TrainOptions

    kind = FinetuneOptions if read_json(folder / "run.json").get("command") == "finetune" else TrainOptions
    options = kind.load(folder / "run.json")
    records = Log(folder / "log.jsonl").read()
    losses, validation = _with_number(records, "loss"), _with_number(records, "val_loss")
    done = losses[-1]["step"] if losses else 0
    data = options.data if isinstance(options, FinetuneOptions) else options.texts
    rows: list[tuple[str, ...]] = [
        ("command", f"onfoot {options.command}"),
        ("steps", f"{done:,} of {options.steps:,}"),
        ("data", ", ".join(data or ["pydoc_data.topics"])),
    ]
    if validation:
        best = min(validation, key=lambda r: r["val_loss"])
        rows.append(
            ("validation loss", f"{validation[-1]['val_loss']:.4f}, best {best['val_loss']:.4f} at {best['step']}")
        )
    for checkpoint in checkpoints(folder):
        wrong = validate(checkpoint)
        rows.append((checkpoint.name, f"step {read_state(checkpoint)['step']}, sound" if wrong is None else wrong))
    show_sheet(Sheet(f"Run {folder}", ["", ""], rows))
    if done < options.steps:
        show_text(f"  go on with: onfoot {options.command} --resume {folder}", "dim")


def _with_number(records: list[Any], name: str) -> list[dict[str, Any]]:
    """The records that have a step and a number of that name."""
    found = [r for r in records if isinstance(r, dict) and type(r.get("step")) is int and abs(r["step"]) < 1 << 63]
    return [r for r in found if isinstance(r.get(name), float) or (type(r.get(name)) is int and abs(r[name]) < 1 << 63)]
