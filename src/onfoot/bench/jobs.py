"""What is measured: jobs, and who contends in each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onfoot.config import GPT2Config, preset


@dataclass(frozen=True)
class Job:
    """One kind of work at one size. `contenders` are measured in this order, ours first."""

    name: str
    about: str
    config: GPT2Config
    batch: int
    tokens: int  # a sequence; for generation the prompt
    contenders: tuple[str, ...]
    repeats: int = 3
    new_tokens: int = 0

    @property
    def unit(self) -> str:
        return "tokens/s" if self.new_tokens else "ms a step"


GPT2 = preset("gpt2")
SMALL = GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=65)
TRAINERS = ("onfoot", "eager", "compile")

JOBS = {
    job.name: job
    for job in (
        Job("full-4x256", "full training step, GPT-2 124M, 4 × 256 tokens", GPT2, 4, 256, TRAINERS),
        Job("full-1x1024", "full training step, GPT-2 124M, 1 × 1024 tokens", GPT2, 1, 1024, TRAINERS),
        Job("lora-4x256", "LoRA r = 16 step, GPT-2 124M, 4 × 256 tokens", GPT2, 4, 256, ("onfoot-lora", "peft")),
        Job("small-12x64", "training step, 4 blocks of width 128, 12 × 64 tokens", SMALL, 12, 64, TRAINERS, 120),
        Job("generate", "generation, GPT-2 124M, batch 1", GPT2, 1, 16, ("onfoot-generate", "transformers"), 6, 64),
        Job(
            "generate-int8",
            "generation with int8 weights, batch 1",
            GPT2,
            1,
            16,
            ("onfoot-int8", "transformers"),
            6,
            64,
        ),
    )
}


def growing(blocks: int, batch: int, tokens: int) -> Job:
    """A training step of a network of width 512 whose depth, batch or length varies: `grow-BLOCKSxBATCHxTOKENS`."""
    config = GPT2Config(n_layer=blocks, n_head=8, n_embd=512, n_positions=1024, vocab_size=8192)
    about = f"training step, {blocks} blocks of width 512, {batch} × {tokens} tokens"
    return Job(f"grow-{blocks}x{batch}x{tokens}", about, config, batch, tokens, TRAINERS)


def find(name: str) -> Job:
    """The job of that name."""
    sizes = re.fullmatch(r"grow-(\d+)x(\d+)x(\d+)", name)
    if sizes:
        return growing(*map(int, sizes.groups()))
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; known are {', '.join(JOBS)}, and grow-BLOCKSxBATCHxTOKENS")
    return JOBS[name]
