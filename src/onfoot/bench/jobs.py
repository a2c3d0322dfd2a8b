"""The jobs to measure, and the contenders in each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onfoot.config import Config, GPT2Config, LlamaConfig, preset


@dataclass(frozen=True)
class Job:
    """One kind of work at one size. `contenders` are measured in this order, ours first."""

    name: str
    about: str
    config: Config
    batch: int
    tokens: int  # per sequence; for generation, of the prompt
    contenders: tuple[str, ...]
    repeats: int = 3
    new_tokens: int = 0
    clip: float = 0.0  # gradient norm limit; 0: no clipping

    @property
    def unit(self) -> str:
        return "tokens/s" if self.new_tokens else "ms per step"


GPT2 = preset("gpt2")
SMALL = GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=65)
SMOLLM2 = LlamaConfig(  # its shape, with random weights
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=2048, rope_theta=100000.0, tie_word_embeddings=True,
)  # fmt: skip
SMALL_LLAMA = LlamaConfig(
    vocab_size=65, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
TRAINERS = ("onfoot", "eager", "compile")
LORA = ("onfoot-lora", "peft")

JOBS = {
    job.name: job
    for job in (
        Job("full-4x256", "full training step, GPT-2 124M, 4 × 256 tokens", GPT2, 4, 256, TRAINERS),
        Job("full-1x1024", "full training step, GPT-2 124M, 1 × 1024 tokens", GPT2, 1, 1024, TRAINERS),
        Job("lora-4x256", "LoRA r = 16 step, GPT-2 124M, 4 × 256 tokens", GPT2, 4, 256, LORA),
        Job("full-clipped", "full training step with clipping, 4 × 256 tokens", GPT2, 4, 256, TRAINERS, clip=1.0),
        Job("small-12x64", "training step, 4 blocks of width 128, 12 × 64 tokens", SMALL, 12, 64, TRAINERS, 120),
        Job("llama-full", "full training step, SmolLM2's shape (134.5M), 2 × 256 tokens", SMOLLM2, 2, 256, TRAINERS),
        Job("llama-lora", "LoRA r = 16 step, SmolLM2's shape, 2 × 256 tokens", SMOLLM2, 2, 256, LORA),
        Job(
            "llama-small", "training step, LLaMA of 4 blocks of width 128, 12 × 64", SMALL_LLAMA, 12, 64, TRAINERS, 120
        ),
        Job("llama-small-lora", "LoRA r = 16 step, small LLaMA, 12 × 64 tokens", SMALL_LLAMA, 12, 64, LORA, 120),
        Job(
            "llama-generate",
            "generation, SmolLM2's shape, batch 1",
            SMOLLM2,
            1,
            16,
            ("onfoot-generate", "transformers"),
            6,
            64,
        ),
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
    """A training step of a network of width 512 with variable depth, batch or length: `grow-BLOCKSxBATCHxTOKENS`."""
    config = GPT2Config(n_layer=blocks, n_head=8, n_embd=512, n_positions=1024, vocab_size=8192)
    about = f"training step, {blocks} blocks of width 512, {batch} × {tokens} tokens"
    return Job(f"grow-{blocks}x{batch}x{tokens}", about, config, batch, tokens, TRAINERS)


def find(name: str) -> Job:
    """The job of that name."""
    sizes = re.fullmatch(r"grow-(\d+)x(\d+)x(\d+)", name)
    if sizes:
        return growing(*map(int, sizes.groups()))
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; choose from {', '.join(JOBS)} or grow-BLOCKSxBATCHxTOKENS")
    return JOBS[name]
