"""The memory that a step will need, from its recording, which needs no memory itself.

That is the weights and the optimizer's running means, the arena of the step (activations and temporary arrays, exact),
and the gradients until they are used. The peak is that of the engine "numba" in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onfoot.config import Config
from onfoot.engine import Engine, get_engine
from onfoot.models.model import Model
from onfoot.models.params import hidden_matrices, quantizable, shapes
from onfoot.quantized import BLOCK, FrozenWeight, HalfWeight, QuantizedWeight
from onfoot.recording.recorded_array import CannotRecord

FLOAT = 4  # bytes
COPIES, GRAMS = 5, 3  # arrays of a matrix's size, and of its smaller side squared, in an update of Muon
PROGRAM = 56 << 20  # Python, NumPy and the machine code of the kernels; on Linux the compiler is released


@dataclass(frozen=True)
class Job:
    """The training or fine-tuning job to plan."""

    config: Config
    batch: int
    tokens: int
    lora: int = 0  # LoRA rank, on all linear layers of the blocks; 0: full training
    quantized: bool = False
    clip: bool = True  # all gradients are kept until their norm is known
    recompute: bool = False
    half: bool = False  # a frozen base in 16 bits, as in its file
    muon: bool = False  # the optimizer is Muon, not AdamW


@dataclass(frozen=True)
class Plan:
    """Bytes, by purpose."""

    weights: int
    moments: int
    arena: int
    gradients: int
    program: int = PROGRAM

    @property
    def peak(self) -> int:
        return self.weights + self.moments + self.arena + self.gradients + self.program


class _OnPaper(Engine):
    """The engine "numba" with parameters in reserved address space, without memory."""

    def __init__(self) -> None:
        from onfoot.recording.recorder import Recorder

        real = get_engine("numba")
        super().__init__(real.name, real.table, np.asarray)
        self._space = Recorder(threads=1)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.asarray(self._space.empty(shape, dtype))

    def copy_in(self, x: Any, dtype: str) -> Any:
        return self.empty(x.shape, dtype)


def model_on_paper(job: Job) -> Model:
    """The model of a job without memory for its parameters: it can only be recorded."""
    engine = _OnPaper()
    nothing = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes(job.config).items()}
    model = Model(job.config, nothing, "float32", engine)
    if job.quantized or (job.half and job.lora):
        for name, out_in in quantizable(job.config).items():
            rows, columns = model.params[name].shape if out_in else model.params[name].shape[::-1]
            weight = _blocks_on_paper(engine, rows, columns) if job.quantized else _half_on_paper(engine, rows, columns)
            model.params[name] = weight if out_in else weight.T
        model.use_adapter(None)
    if job.lora:
        model.add_lora(r=job.lora)
    model.recompute = job.recompute
    return model


def _blocks_on_paper(engine: _OnPaper, rows: int, columns: int) -> FrozenWeight:
    codes = engine.empty((rows, columns // BLOCK, BLOCK), np.int8)
    return QuantizedWeight("Q8_0", codes, engine.empty((rows, columns // BLOCK), np.float16))


def _half_on_paper(engine: _OnPaper, rows: int, columns: int) -> FrozenWeight:
    return HalfWeight("BF16", engine.empty((rows, columns), np.uint16))


def plan(job: Job) -> Plan:
    """The peak memory of one step without dropout; a ValueError if no step can be recorded here."""
    from onfoot.models.recorded import step_memory

    try:
        model = model_on_paper(job)
        arena, gradients = step_memory(model, np.zeros((job.batch, job.tokens), np.int64), job.clip)
    except CannotRecord as error:
        raise ValueError(f"this system cannot record a step, which memory is measured by: {error}") from None
    weights = sum(p.nbytes for p in model.params.values())
    moments = 2 * FLOAT * model.n_trainable
    if job.muon and not job.lora:
        saved, workspace = muon_memory(job.config)
        moments, arena = moments - saved, arena + workspace
    return Plan(weights, moments, arena, gradients)


def muon_memory(config: Config) -> tuple[int, int]:
    """Bytes that Muon's state is smaller than AdamW's, and those that the largest matrix needs while it is updated."""
    saved = largest = 0
    for name, parts in hidden_matrices(config).items():
        rows, columns = shapes(config)[name]
        saved += rows * columns
        large, small = sorted((rows, columns // len(parts)), reverse=True)
        largest = max(largest, COPIES * large * small + GRAMS * small * small)
    return FLOAT * saved, FLOAT * largest


def advice(job: Job, limit: int) -> list[tuple[str, int]]:
    """Options that would bring the peak below a limit, the mildest first, and the peak with each."""
    half = replace(job, batch=max(job.batch // 2, 1))
    ways = [
        ("--clip 0: gradients are not kept until their norm is known", replace(job, clip=False)),
        ("--recompute block: activations are recomputed in the backward pass", replace(job, recompute=True)),
        (f"--batch-size {half.batch} and twice --accumulate: the same step in smaller microbatches", half),
        ("onfoot finetune (LoRA, rank 16): the weights stay frozen", replace(job, lora=16)),
        (
            "onfoot finetune --quantized: frozen weights in 8 bits",
            replace(job, lora=16, quantized=True, recompute=True),
        ),
    ]
    peak = plan(job).peak
    planned = [(text, plan(way).peak) for text, way in ways if way != job]
    return [(text, size) for text, size in planned if size < min(peak, limit)]
