"""`onfoot info --memory`: what a run would need."""

from __future__ import annotations

import os

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.memory import Job, advice, plan


def show_memory(job: Job) -> None:
    """The peak of a run by what it is for, and, where this machine has less, what would make it fit."""
    planned = plan(job)
    parts = [
        ("weights", planned.weights),
        ("AdamW's running means", planned.moments),
        ("activations for the backward pass", planned.activations),
        ("gradients at the peak", planned.gradients),
        ("working memory", planned.working),
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
