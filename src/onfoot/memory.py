"""How much memory a run will need, counted on paper: the peak of a step on the engine "numba" in float32.

What is always there (weights, running means) and what a step makes: the activations that its backward pass needs, the
gradients until they are used up, and the working memory of the head. The peak of a step is at one of two moments: at
the end of the forward pass, when all activations exist, or at the end of the backward pass, when all gradients do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onfoot.config import Config, GPT2Config
from onfoot.kernels import LOGITS, done_in_one
from onfoot.kernels.pool import threads
from onfoot.models.params import (
    block_shapes,
    count,
    default_targets,
    linear_shapes,
    lora_count,
    quantizable,
    shapes,
    token_table,
)
from onfoot.models.run import LARGE
from onfoot.ops.activation import ACTIVATIONS

FLOAT = 4  # bytes
GELU = "gelu_tanh"  # the only one that is done in one
PROGRAM = 115 << 20  # Python, NumPy, LLVM and the machine code of the kernels
BLOCK_BYTES = 1 + 2 / 32 + 4 / 32  # of a number in 8-bit blocks: the code, its share of the scale and of its float


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    config: Config
    batch: int
    tokens: int
    lora: int = 0  # the rank of companions beside all linear layers of the blocks; 0: all weights train
    quantized: bool = False
    clip: bool = True  # gradients are kept until their norm is known
    recompute: bool = False


@dataclass(frozen=True)
class Plan:
    """Bytes, by what they are for."""

    weights: int
    moments: int
    activations: int
    gradients: int
    working: int
    program: int = PROGRAM

    @property
    def peak(self) -> int:
        return self.weights + self.moments + self.activations + self.gradients + self.working + self.program


def plan(job: Job) -> Plan:
    """The memory of one step at its peak."""
    config, rows = job.config, job.batch * job.tokens
    sizes = {name: math.prod(shape) for name, shape in shapes(config).items()}
    total = count(shapes(config))
    table = sizes[token_table(config)]
    small = sum(sizes[name] for name in quantizable(config)) if job.quantized else 0
    companions = _companions(job)
    trainable = companions if job.lora else total
    weights = FLOAT * (total - small + companions) + int(BLOCK_BYTES * small)
    moments = 2 * FLOAT * trainable
    if _in_one(job):
        kept, passing = _in_one_numbers(config, rows)
        gradients = threads() * trainable  # every thread's part of them
        return Plan(weights, moments, FLOAT * config.n_layer * kept, FLOAT * gradients, FLOAT * passing)
    kept, passing = _block(config, rows, job.lora)
    activations = config.n_layer * rows * config.n_embd + kept if job.recompute else config.n_layer * kept
    part = min(LOGITS, rows * config.vocab_size)
    head = 0 if job.lora else (table if config.tie_word_embeddings else sizes["lm_head.weight"])
    written = min(2 << 20, table) if job.quantized else 0
    forward_end = FLOAT * (activations + part + 2 * rows * config.n_embd + written), FLOAT * head
    block = (trainable - head) // max(config.n_layer, 1)
    all_made = trainable if job.clip else max(head, block)
    beside = config.n_layer * rows * config.n_embd if job.recompute else 0
    backward_end = FLOAT * (kept + passing + beside), FLOAT * all_made
    working, gradients = max(forward_end, backward_end, key=sum)
    held = FLOAT * activations if (working, gradients) == forward_end else FLOAT * kept
    return Plan(weights, moments, held, gradients, working - held)


def _companions(job: Job) -> int:
    if not job.lora:
        return 0
    ends = default_targets(job.config)
    layers = [size for name, size in linear_shapes(job.config).items() if name.endswith(ends)]
    return lora_count(layers, job.lora)


def _in_one(job: Job) -> bool:
    """Whether the whole pass is done in one: the model is small, and no adapter or recomputation comes between."""
    config = job.config
    if not isinstance(config, GPT2Config) or job.lora or job.recompute:
        return False
    drops = config.attn_pdrop or config.embd_pdrop or config.resid_pdrop
    if ACTIVATIONS[config.activation_function] != GELU or config.lm_head_bias or drops:
        return False
    vocabulary, block, total = config.vocab_size, count(block_shapes(config)), count(shapes(config))
    return done_in_one(job.batch, job.tokens, vocabulary, vocabulary * config.n_embd, block, total, threads())


def _in_one_numbers(config: Config, rows: int) -> tuple[int, int]:
    """Where a pass is done in one: numbers that a block keeps, and those that exist once for all blocks."""
    width, inner, values, qkv = _widths(config)
    kept = 2 * width + qkv + values + 2 * inner + config.n_head + 4
    return rows * kept, rows * (inner + 8 * width + values + qkv + config.vocab_size)


def _widths(config: Config) -> tuple[int, int, int, int]:
    """Of the stream, inside the MLP, of all heads' values, and of q | k | v."""
    values, queries = config.n_head * config.value_width, config.n_head * config.key_width
    shared = 1 if isinstance(config, GPT2Config) else config.n_head // config.n_kv_head
    return config.n_embd, config.inner_width, values, queries + (queries + values) // shared


def _block(config: Config, rows: int, lora: int) -> tuple[int, int]:
    """Numbers that one block keeps for its backward pass, and those that pass through it there."""
    width, inner, values, qkv = _widths(config)
    lean = rows * width >= LARGE  # norms and activations are then computed again
    if isinstance(config, GPT2Config):
        kept = 2 * width + qkv + values + inner + config.n_head + (0 if lean else 2 * width + inner)
    else:
        kept = 4 * width + qkv + values + 3 * inner + config.n_head
    passing = 2 * inner + 3 * width + qkv
    return rows * (kept + 8 * lora), rows * passing


def advice(job: Job, limit: int) -> list[tuple[str, int]]:
    """The options that would bring the peak below a limit, the mildest first; what each would make of it."""
    half = replace(job, batch=max(job.batch // 2, 1))
    ways = [
        ("--clip 0: no gradient waits for the norm of all", replace(job, clip=False)),
        ("--recompute block: a block's activations are computed again", replace(job, recompute=True)),
        (f"--batch-size {half.batch} with twice --accumulate: the same step in smaller parts", half),
        ("onfoot finetune (LoRA, rank 16): the weights stay frozen", replace(job, lora=16)),
        ("onfoot finetune --quantized: and in 8 bits", replace(job, lora=16, quantized=True, recompute=True)),
    ]
    peak = plan(job).peak
    planned = [(text, plan(way).peak) for text, way in ways if way != job]
    return [(text, size) for text, size in planned if size < min(peak, limit)]
