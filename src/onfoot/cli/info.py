"""`onfoot info`: describes a model folder, a GGUF file or a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.cli.fields import reject_without
from onfoot.cli.options import Download, download_model

if TYPE_CHECKING:
    from onfoot.config import Config
    from onfoot.formats.tokenizer import Tokenizer


def info(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model, adapter or run folder, GGUF file, smollm2, or org/name; with --memory also a preset.",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Estimate the memory that training needs, and what would fit.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="With --memory: sequences per microbatch.")] = 12,
    tokens: Annotated[
        int | None, typer.Option(help="With --memory: tokens per sequence; by default n_positions.", show_default=False)
    ] = None,
    lora: Annotated[int, typer.Option(help="With --memory: LoRA rank; 0 trains all weights.")] = 0,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="With --memory: quantize the frozen base to 8 bits.")
    ] = False,
    clip: Annotated[float, typer.Option(help="With --memory: maximum gradient norm; 0 disables clipping.")] = 1.0,
    recompute: Annotated[str, typer.Option(help="With --memory: activations to recompute, none or block.")] = "none",
    optimizer: Annotated[str, typer.Option(help="With --memory: adamw or muon.")] = "adamw",
    download: Download = False,
) -> None:
    """Describe a model, an adapter, a GGUF file or a run, or estimate the memory for training it (--memory)."""
    from onfoot.formats.gguf_model import find_file
    from onfoot.formats.hub import local_folder
    from onfoot.formats.huggingface import is_model_folder
    from onfoot.formats.peft import is_adapter_folder
    from onfoot.formats.run_folder import checkpoints, model_folder

    if download:
        download_model(folder)
    if memory:
        from onfoot.cli.info_memory import planned_job, show_memory

        show_memory(planned_job(folder, batch_size, tokens, lora, quantized, clip, recompute, optimizer))
        return
    reject_without(context, "--memory", ("batch_size", "tokens", "lora", "quantized", "clip", "recompute", "optimizer"))
    file = find_file(folder)
    if file is not None:
        _show_model(_read_file(file), tensors)
        return
    if (folder / "run.json").is_file():
        _show_run(folder)
        if not checkpoints(folder):
            show_text("  no checkpoint yet, so the model cannot be shown; training writes the first one")
            return
    model = model_folder(local_folder(folder))
    if is_adapter_folder(model) and not is_model_folder(model):  # as `load` chooses
        _show_adapter(model, tensors)
    else:
        _show_model(_read_folder(model), tensors)


class _ModelInfo(NamedTuple):
    """A model's config, tensors and tokenizer, without its weights."""

    location: tuple[str, str]  # "folder" or "file", and its path
    config: Config
    tensors: list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
    n_bytes: int  # of the files with the tensors
    tokenizer: Tokenizer | None


def _read_folder(folder: Path) -> _ModelInfo:
    from onfoot.formats.huggingface import Params, load_config, tensor_summary, weight_files
    from onfoot.formats.tokenizer import Tokenizer, check_fits

    config = load_config(folder)
    Params(folder, config)  # raises if the tensors do not match the config
    tokenizer = Tokenizer.find(folder)
    if tokenizer is not None:
        check_fits(tokenizer, config, folder)
    n_bytes = sum(path.stat().st_size for path in weight_files(folder))
    return _ModelInfo(("folder", str(folder)), config, tensor_summary(folder), n_bytes, tokenizer)


def _read_file(path: Path) -> _ModelInfo:
    from onfoot.formats.gguf import GgufFile
    from onfoot.formats.gguf_model import Params, read_config
    from onfoot.formats.gguf_tokenizer import find_tokenizer

    file = GgufFile(path)
    config = read_config(file)
    Params(file, config, quantized=True)
    listed = [(name, entry.shape, entry.type) for name, entry in file.tensors.items()]
    return _ModelInfo(("file", str(path)), config, listed, file.size, find_tokenizer(file.metadata, path, config))


def _show_model(model: _ModelInfo, tensors: bool) -> None:
    from onfoot.models.params import count, shapes

    config, tokenizer, listed = model.config, model.tokenizer, model.tensors
    dtypes = sorted({dtype for _, _, dtype in listed})
    cache = config.n_layer * config.n_kv_head * (config.key_width + config.value_width)
    window = getattr(config, "sliding_window", None)
    grouped = f", {config.n_kv_head} key/value heads" if config.n_kv_head != config.n_head else ""
    rows: list[tuple[str, ...]] = [
        model.location,
        ("architecture", config.model_type),
        ("parameters", f"{count(shapes(config)):,}"),
        ("blocks", str(config.n_layer)),
        ("hidden size", str(config.n_embd)),
        ("heads", f"{config.n_head} of size {config.value_width}{grouped}"),
        ("MLP hidden size", f"{config.inner_width}, {config.activation_function}"),
        ("positions", f"{config.n_positions:,}" + (f", sliding window of {window:,} tokens" if window else "")),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("logits", "tied to the token embedding" if config.tie_word_embeddings else "untied"),
        ("tensors", f"{len(listed)}, {', '.join(dtypes)}, {sum(math.prod(s) for _, s, _ in listed):,} elements"),
        ("file size", f"{model.n_bytes / 1e6:,.1f} MB"),
        (
            "KV cache",
            f"{cache:,} elements per token, {4 * cache * config.n_positions / 2**20:,.1f} MiB when full (float32)",
        ),
        ("tokenizer", _described(tokenizer)),
    ]
    show_sheet(Sheet("Model", ["", ""], rows))
    if tensors:
        _list_tensors(listed)


def _described(tokenizer: Tokenizer | None) -> str:
    return "none" if tokenizer is None else f"{tokenizer.size:,} tokens, eos {tokenizer.eos!r}"


def _list_tensors(listed: list[tuple[str, tuple[int, ...], str]]) -> None:
    rows: list[tuple[str, ...]] = [(name, " × ".join(map(str, shape)), dtype) for name, shape, dtype in listed]
    show_sheet(Sheet("Tensors", ["name", ">shape", "dtype"], rows))


def _show_adapter(folder: Path, list_tensors: bool) -> None:
    from onfoot.formats.peft import TENSORS, read_config
    from onfoot.formats.tensors import TensorFile
    from onfoot.formats.tokenizer import Tokenizer

    config = read_config(folder)
    tensors = TensorFile(folder / TENSORS)
    rows: list[tuple[str, ...]] = [
        ("folder", str(folder)),
        ("base", str(config.get("base_model_name_or_path"))),
        ("rank, alpha", f"{config['r']}, {config['lora_alpha']}"),
        ("layers", f"{len(tensors) // 2}"),
        ("parameters", f"{sum(math.prod(tensors.shape(name)) for name in tensors):,}"),
        ("tensors", f"{len(tensors)}, {', '.join(sorted({tensors.dtype(name) for name in tensors}))}"),
        ("file size", f"{(folder / TENSORS).stat().st_size / 1e6:,.1f} MB"),
        ("tokenizer", _described(Tokenizer.find(folder))),
    ]
    show_sheet(Sheet("LoRA adapter", ["", ""], rows))
    if list_tensors:
        _list_tensors([(name, tensors.shape(name), tensors.dtype(name)) for name in tensors])


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
            ("validation loss", f"{validation[-1]['val_loss']:.4f}, best {best['val_loss']:.4f} at step {best['step']}")
        )
    for checkpoint in checkpoints(folder):
        problem = validate(checkpoint)
        rows.append((checkpoint.name, f"step {read_state(checkpoint)['step']}, valid" if problem is None else problem))
    show_sheet(Sheet(f"Run {folder}", ["", ""], rows))
    if done < options.steps:
        show_text(f"  resume with: onfoot {options.command} --resume {folder}", "dim")


def _with_number(records: list[Any], name: str) -> list[dict[str, Any]]:
    """The records with an integer step and a number called `name`, both in the range of int64."""
    found = [r for r in records if isinstance(r, dict) and type(r.get("step")) is int and abs(r["step"]) < 1 << 63]
    return [r for r in found if isinstance(r.get(name), float) or (type(r.get(name)) is int and abs(r[name]) < 1 << 63)]
