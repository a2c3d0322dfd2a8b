"""What a training run can be told. Each field's help text is what the command line shows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from onfoot.config import LARGEST_FLOAT
from onfoot.engine import DTYPES, ENGINES
from onfoot.formats.files import naming, read_json, shown
from onfoot.train.schedule import SCHEDULES

RECOMPUTE = ("none", "block")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def option(default: Any, text: str) -> Any:
    """A field with its default and its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class LoopOptions:
    """What the loop itself can be told, whatever it trains."""

    command: ClassVar[str] = ""  # the command that such a run belongs to
    least_steps: ClassVar[int] = 1

    steps: int = option(500, "Number of optimizer steps.")
    batch_size: int = option(12, "Sequences a microbatch.")
    accumulate: int = option(1, "Microbatches a step; their gradients add up to that of one big batch.")
    lr: float = option(2e-3, "Peak learning rate. Small models take large steps; 124M parameters want about 6e-4.")
    warmup: int = option(50, "Steps over which the learning rate rises to its peak.")
    schedule: str = option("cosine", f"How the rate falls after that: {', '.join(SCHEDULES)}.")
    betas: tuple[float, float] = option((0.9, 0.99), "AdamW's decay of the mean gradient and of the mean square.")
    weight_decay: float = option(0.1, "AdamW's decay of weights; biases and norms are not decayed.")
    clip: float = option(1.0, "Largest global norm of the gradients; 0 means no clipping.")
    dropout: float = option(
        0.0, "Share of features dropped at random in training. Small models on enough text need none."
    )
    eval_every: int = option(100, "Steps between evaluations.")
    eval_windows: int = option(192, "At most so many validation sequences an evaluation.")
    save_every: int = option(100, "Steps between checkpoints; the best evaluation is always saved.")
    keep: int = option(2, "Newest checkpoints that are kept, the best one besides.")
    sample_tokens: int = option(160, "Length of the sample text at each evaluation; 0 means none.")
    shard: bool = option(False, "Under mpiexec: share AdamW's running means out over the ranks, which saves memory.")
    bucket_mb: float = option(8.0, "Under mpiexec: megabytes of gradients that are summed over the ranks at a time.")
    recompute: str = option(
        "none", "What the backward pass computes again instead of keeping it: none, or block (less memory, more time)."
    )
    watch: bool = option(False, "Measure the invariants of the mathematics at each evaluation.")
    seed: int = option(0, "Determines initial values, the order of the data, dropout and samples.")
    dtype: str = option("float32", f"{' or '.join(DTYPES)}.")
    engine: str = option("auto", f"auto, {', '.join(ENGINES)}.")

    def __post_init__(self) -> None:
        self.check_types()
        self.check_at_least(
            steps=self.least_steps, batch_size=1, accumulate=1, lr=0, warmup=0, weight_decay=0, clip=0, eval_every=1,
            eval_windows=1, save_every=1, keep=1, sample_tokens=0, seed=0,
        )  # fmt: skip
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb}: a number above 0 is needed")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")
        for name, known in (
            ("schedule", SCHEDULES),
            ("dtype", DTYPES),
            ("engine", ("auto", *ENGINES)),
            ("recompute", RECOMPUTE),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {shown(getattr(self, name))}; known are {', '.join(known)}")

    def check_types(self) -> None:
        """Refuses values of other types than the fields have, and numbers beyond what they can mean."""
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if name in ("command", "least_steps") or (value is None and hint == str | None):
                continue
            several = value if hint in (list[str], tuple[float, float]) else [value]
            if hint == tuple[float, float] and (not isinstance(value, tuple) or len(value) != 2):
                raise ValueError(f"{name}={shown(value)}: two numbers are needed")
            if hint == list[str] and not isinstance(value, list):
                raise ValueError(f"{name}={shown(value)}: a list of texts is needed")
            kind = {list[str]: str, str | None: str, tuple[float, float]: float}.get(hint, hint)
            for one in several:
                if type(one) is not kind and not (kind is float and type(one) is int):
                    raise ValueError(f"{name}={shown(one)}: {KINDS[kind]} is needed")
                if kind in (int, float) and not -LARGEST_FLOAT <= one <= LARGEST_FLOAT:
                    raise ValueError(f"{name}={shown(one)}: a finite number is needed")
                if kind is int and abs(one) >= 1 << 63:
                    raise ValueError(f"{name}={shown(one)} is too large")

    def check_at_least(self, **limits: float) -> None:
        for name, limit in limits.items():
            if not getattr(self, name) >= limit:
                raise ValueError(f"{name}={getattr(self, name)}: at least {limit} is needed")

    @classmethod
    def load(cls, path: Path) -> Any:
        values = read_json(path)
        command = values.pop("command", None)
        for name in ("made_with", "sha256"):  # what `runs` writes beside the options
            values.pop(name, None)
        if command != cls.command:
            known = command in ("train", "finetune")
            what = f"is a run of onfoot {command}: resume it with that command" if known else "is not a run"
            raise ValueError(f"{path.parent} {what}")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"{path}: the option {shown(unknown[0])} is not known to this version")
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        with naming(path):
            return cls(**values)


@dataclass(frozen=True)
class TrainOptions(LoopOptions):
    """A run of `onfoot train`. The defaults train a small model on a small text in a few minutes."""

    command = "train"

    texts: list[str] = field(default_factory=list)  # files and folders; none: the text that Python carries
    tokenizer: str = option("byte", "byte, char, bpe (trained on the spot), or a tokenizer's file or folder.")
    vocab_size: int = option(4096, "Vocabulary of a bpe that is trained on the spot.")
    init: str | None = option(None, "A model folder to go on from, instead of a new model.")
    n_layer: int = option(4, "Number of blocks.")
    n_head: int = option(4, "Number of attention heads.")
    n_embd: int = option(128, "Width of the network.")
    context: int = option(128, "Tokens a window, and the longest sequence of a new model.")
    validation: float = option(0.1, "Share of the text, at its end, that is kept for validation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(vocab_size=257, n_layer=1, n_head=1, n_embd=1, context=1)
        if not 0 < self.validation < 1:
            raise ValueError(f"validation={self.validation}: a share between 0 and 1 is needed")


@dataclass(frozen=True)
class FinetuneOptions(LoopOptions):
    """A run of `onfoot finetune`: LoRA layers, or all weights, on prompts and completions."""

    command = "finetune"
    least_steps = 0  # 0 is counted from the epochs, once the data is read

    model: str = ""
    data: list[str] = field(default_factory=list)  # .jsonl files
    validation_data: list[str] = field(default_factory=list)
    steps: int = option(0, "Number of optimizer steps; 0 means as many as --epochs make.")
    epochs: float = option(3.0, "How often each example is seen.")
    batch_size: int = option(4, "Rows a microbatch.")
    lr: float = option(2e-4, "Peak learning rate. LoRA takes larger steps than all weights do: try 2e-5 with --full.")
    warmup: int = option(10, "Steps over which the learning rate rises to its peak.")
    weight_decay: float = option(0.0, "AdamW's decay of weights; biases and norms are not decayed.")
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW's decay of the mean gradient and of the mean square.")
    eval_every: int = option(50, "Steps between evaluations.")
    save_every: int = option(50, "Steps between checkpoints; the best evaluation is always saved.")
    sample_tokens: int = option(60, "Length of the sample answer at each evaluation; 0 means none.")
    full: bool = option(False, "Train all weights instead of LoRA layers.")
    quantized: bool = option(
        False,
        "Keep the frozen base in small blocks (a GGUF file's own, else 8 bits): LoRA in a fraction of the memory.",
    )
    r: int = option(16, "Rank of the LoRA layers.")
    alpha: float = option(16.0, "Their scale is alpha / r, as in PEFT.")
    targets: str = option("", "Layers that get one, with commas; by default all linear layers of the blocks.")
    lora_dropout: float = option(0.0, "Dropout on the LoRA layers' input.")
    use_rslora: bool = option(False, "Scale by alpha / √r instead of alpha / r.")
    max_length: int = option(0, "Longest sequence; 0 means what the model allows, at most 1024.")
    on_long: str = option("refuse", "Longer examples: refuse, truncate or skip; the last two are reported.")
    pack: bool = option(True, "Put several short examples into one row; none sees another.")
    validation: float = option(0.1, "Share of the examples that is kept for validation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(max_length=0)
        if not 0 < self.epochs <= 1e6:
            raise ValueError(f"epochs={self.epochs}: a number above 0 and at most a million is needed")
        if self.full and self.quantized:
            raise ValueError("--full trains all weights, --quantized freezes them: choose one")
        if not self.data:
            raise ValueError("no data: give --data FILE.jsonl")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation={self.validation}: a share between 0 and 1 is needed")
