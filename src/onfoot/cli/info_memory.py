"""`onfoot info --memory`: what a run would need."""

from __future__ import annotations

import os
from pathlib import Path

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.config import PRESETS, Config, preset
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_model import find_file, read_config
from onfoot.formats.huggingface import load_config
from onfoot.formats.run_folder import model_folder
from onfoot.memory import Job, advice, plan
from onfoot.train.options import RECOMPUTE


def planned_job(
    model: Path, batch: int, tokens: int | None, lora: int, quantized: bool, clip: float, recompute: str
) -> Job:
    """What is to be planned, or a ValueError that names what makes no sense. `model`: a folder, a file or a preset."""
    if batch < 1 or lora < 0 or clip < 0 or (tokens is not None and tokens < 1):
        raise ValueError("--batch-size and --tokens are at least 1, --lora and --clip at least 0")
    if recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {recompute!r}; known are {', '.join(RECOMPUTE)}")
    if quantized and not lora:
        raise ValueError("--quantized weights are frozen: give the rank of a fine-tuning with --lora")
    known = str(model) in PRESETS and not model.exists()
    config = preset(str(model)) if known else _config(model)
    length = config.n_positions if tokens is None else tokens
    if length > config.n_positions:
        raise ValueError(f"--tokens {length} exceeds n_positions={config.n_positions}")
    return Job(config, batch, length, lora, quantized, clip > 0, recompute == "block")


def _config(model: Path) -> Config:
    file = find_file(model)
    return load_config(model_folder(model)) if file is None else read_config(GgufFile(file))


def show_memory(job: Job) -> None:
    """The peak of a run by what it is for, and, where this machine has less, what would make it fit."""
    planned = plan(job)
    parts = [
        ("weights", planned.weights),
        ("AdamW's running means", planned.moments),
        ("activations and working memory", planned.arena),
        ("gradients at the peak", planned.gradients),
        ("Python and the kernels", planned.program),
        ("peak", planned.peak),
    ]
    what = f"LoRA of rank {job.lora}" if job.lora else "all weights"
    title = f"A training step of {job.batch} × {job.tokens} tokens, {what}, float32"
    show_sheet(Sheet(title, ["", ">MB"], [(name, f"{size / 1e6:,.0f}") for name, size in parts]))
    there = machine_memory()
    if there is None:
        return
    if planned.peak < 0.9 * there:
        show_text(f"  this machine has {there / 1e9:,.1f} GB: it fits", "dim")
        return
    show_text(f"  this machine has {there / 1e9:,.1f} GB: it does not fit. These would:")
    for text, size in advice(job, int(0.9 * there)) or [("nothing that onfoot has: a smaller model is needed", 0)]:
        show_text(f"    {text}" + (f" ({size / 1e9:,.1f} GB)" if size else ""))


def machine_memory() -> int | None:
    """Bytes of memory that this machine has, where the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
