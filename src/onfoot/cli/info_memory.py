"""`onfoot info --memory`: estimates the memory that training needs."""

from __future__ import annotations

import math
import os
from pathlib import Path

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.config import PRESETS, Config, preset
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_model import find_file, read_config
from onfoot.formats.hub import local_folder
from onfoot.formats.huggingface import load_config, tensor_summary
from onfoot.formats.run_folder import model_folder
from onfoot.memory import Job, advice, plan
from onfoot.train.options import OPTIMIZERS, RECOMPUTE


def planned_job(
    model: Path,
    batch: int,
    tokens: int | None,
    lora: int,
    quantized: bool,
    clip: float,
    recompute: str,
    optimizer: str = "adamw",
) -> Job:
    """The job to plan; ValueError if an option is invalid. `model` is a folder, a file or the name of a preset."""
    if batch < 1 or lora < 0 or clip < 0 or (tokens is not None and tokens < 1):
        raise ValueError("--batch-size and --tokens must be >= 1, --lora and --clip >= 0")
    if recompute not in RECOMPUTE:
        raise ValueError(f"unknown --recompute {recompute!r}; choose from {', '.join(RECOMPUTE)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown --optimizer {optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
    if optimizer == "muon" and lora:
        raise ValueError("--optimizer muon is for the matrices of the blocks, which --lora freezes: choose one")
    if quantized and not lora:
        raise ValueError("--quantized weights are frozen; give a LoRA rank with --lora")
    is_preset = str(model) in PRESETS and not model.exists()
    config = preset(str(model)) if is_preset else _config(model)
    length = config.n_positions if tokens is None else tokens
    if length > config.n_positions:
        raise ValueError(f"--tokens {length} exceeds n_positions={config.n_positions}")
    half = bool(lora) and not is_preset and not quantized and _in_16_bits(model)
    return Job(config, batch, length, lora, quantized, clip > 0, recompute == "block", half, optimizer == "muon")


def _in_16_bits(model: Path) -> bool:
    """Whether most numbers of a model's files are in 16 bits, in which `onfoot finetune` then keeps them."""
    file = find_file(model)
    if file is None:
        listed = tensor_summary(model_folder(model))
    else:
        listed = [(name, entry.shape, entry.type) for name, entry in GgufFile(file).tensors.items()]
    sizes = [(math.prod(shape), dtype in ("F16", "BF16")) for _, shape, dtype in listed]
    return 2 * sum(n for n, half in sizes if half) > sum(n for n, _ in sizes)


def _config(model: Path) -> Config:
    file = find_file(model)
    return load_config(model_folder(local_folder(model))) if file is None else read_config(GgufFile(file))


def show_memory(job: Job) -> None:
    """Prints the peak memory of a training step by category, and what would make it fit if this machine has less."""
    planned = plan(job)
    parts = [
        ("weights", planned.weights),
        ("Muon's and AdamW's moments" if job.muon else "AdamW moments", planned.moments),
        ("activations and workspace", planned.arena),
        ("gradients at the peak", planned.gradients),
        ("Python and the kernels", planned.program),
        ("peak", planned.peak),
    ]
    trained = f"LoRA of rank {job.lora}" if job.lora else "all weights"
    base = ", base in 16 bits" if job.half else ""
    title = f"Training step of {job.batch} × {job.tokens} tokens, {trained}, float32{base}"
    show_sheet(Sheet(title, ["", ">MB"], [(name, f"{size / 1e6:,.0f}") for name, size in parts]))
    available = machine_memory()
    if available is None:
        return
    if planned.peak < 0.9 * available:
        show_text(f"  this machine has {available / 1e9:,.1f} GB: it fits", "dim")
        return
    show_text(f"  this machine has {available / 1e9:,.1f} GB: it does not fit. These changes would make it fit:")
    for text, size in advice(job, int(0.9 * available)) or [("none; use a smaller model", 0)]:
        show_text(f"    {text}" + (f" ({size / 1e9:,.1f} GB)" if size else ""))


def machine_memory() -> int | None:
    """The physical memory of this machine in bytes, or None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
