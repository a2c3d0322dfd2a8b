"""Options of a training run. Each field's help text is what the command line shows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from onfoot.config import LARGEST_FLOAT
from onfoot.data.sft_examples import ON_LONG
from onfoot.engine import DTYPES, ENGINES
from onfoot.formats.files import naming, read_json, shown
from onfoot.own_engine import is_own
from onfoot.train.schedule import SCHEDULES, Schedule, rate_in

RECOMPUTE = ("none", "block")
ARCHITECTURES = ("gpt2", "llama")
# Options that may change when a run is resumed.
CHANGEABLE = (
    "steps", "batch_size", "accumulate", "lr", "warmup", "schedule", "lr_floor", "clip", "eval_every", "eval_windows",
    "save_every", "patience", "keep", "sample_tokens", "watch", "engine_unchecked", "log", "quiet",
)  # fmt: skip
RATES = {"steps", "lr", "warmup", "schedule", "lr_floor"}  # options of the learning rate
WARMUP = 0.1  # of all steps, by default
OPTIMIZERS = ("adamw", "muon")
TRACKERS = ("none", "tensorboard", "wandb")
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def default_warmup(steps: int) -> int:
    """The warmup steps of a run of so many steps."""
    return max(1, round(WARMUP * steps))


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return get_type_hints(cls)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training loop, common to `onfoot train` and `onfoot finetune`."""

    command: ClassVar[str] = ""  # the subcommand of these options
    before: ClassVar[dict[str, Any]] = {}  # of runs that were made before these options existed
    min_steps: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    min_batch: ClassVar[int] = 1

    steps: int = option(500, "Number of optimizer steps.")
    batch_size: int = option(12, "Sequences per microbatch.")
    accumulate: int = option(1, "Microbatches per step (gradient accumulation); equivalent to one larger batch.")
    lr: float = option(3e-3, "Peak learning rate. Small models need a high rate; 124M parameters need about 6e-4.")
    warmup: int = option(-1, "Warmup steps, over which the learning rate rises linearly; -1: a tenth of the steps.")
    lr_floor: float = option(0.1, "The learning rate at the end, as a fraction of --lr.")
    schedule: str = option("cosine", f"Learning-rate schedule after the warmup: {', '.join(SCHEDULES)}.")
    optimizer: str = option(
        "adamw", f"{' or '.join(OPTIMIZERS)} (for the matrices of the blocks; fewer steps, but each costs more)."
    )
    betas: tuple[float, float] = option((0.9, 0.99), "AdamW's betas: decay rates of the first and second moments.")
    weight_decay: float = option(0.1, "AdamW's weight decay; biases and norms are not decayed.")
    clip: float = option(1.0, "Maximum global norm of the gradients; 0 disables clipping.")
    dropout: float = option(0.0, "Dropout probability in training. Small models on enough text need none.")
    freeze: str = option("", "Comma-separated parameters that do not train: names, starts of names, or globs (*.bias).")
    layer_decay: float = option(
        1.0, "Learning rate of each block relative to the one above; embeddings have the lowest."
    )
    ema: float = option(
        0.0, "Average the weights exponentially with this decay, as in 0.999; evaluated and saved. 0: no average."
    )
    eval_every: int = option(100, "Steps between evaluations.")
    eval_windows: int = option(192, "Maximum number of validation sequences per evaluation.")
    patience: int = option(0, "Stop after this many evaluations without a better validation loss; 0: never.")
    save_every: int = option(100, "Steps between checkpoints; a new best validation loss is always saved.")
    keep: int = option(2, "Number of newest checkpoints to keep, in addition to the best one.")
    keep_trajectory: int = option(
        0, "Keep a checkpoint every N steps, and the initial state, for onfoot blame; 0: --keep decides."
    )
    sample_tokens: int = option(160, "Tokens of the sample text at each evaluation; 0 disables samples.")
    shard: bool = option(False, "Under mpiexec: shard AdamW's moments across the ranks to save memory.")
    bucket_mb: float = option(8.0, "Under mpiexec: size of the gradient buckets that are summed over the ranks, in MB.")
    recompute: str = option(
        "none", "Activations to recompute in the backward pass: none, or block (less memory, more time)."
    )
    dp_clip: float | None = option(
        None, "Private training: clip every example's own gradient to this norm. Replaces --clip; docs/private.md."
    )
    dp_epsilon: float | None = option(None, "With --dp-clip: the ε of the whole run; the noise is computed from it.")
    dp_delta: float | None = option(None, "With --dp-clip: the δ of the guarantee, below 1 / number of examples.")
    dp_noise: float | None = option(
        None, "With --dp-clip, instead of --dp-epsilon: noise as a multiple of --dp-clip; 0 only clips (ε = ∞)."
    )
    watch: bool = option(
        False,
        "Measure the mathematical invariants at each evaluation; with your own pairs, also compare them with ours.",
    )
    log: str = option("none", f"Also log to: {', '.join(TRACKERS)}; TensorBoard's files are in the run folder.")
    skip_bad: bool = option(
        False, "Skip records that cannot be read, and report how many; by default they are an error."
    )
    quiet: bool = option(False, "Show no progress; the log and the files are written as usual.")
    seed: int = option(0, "Random seed of the initial weights, the data order, dropout and samples.")
    dtype: str = option("float32", f"{' or '.join(DTYPES)}.")
    engine: str = option("auto", f"auto, {', '.join(ENGINES)}, or a file of your own pairs; docs/own_engine.md.")
    engine_unchecked: bool = option(
        False, "With your own pairs: train even if one of them is wrong on the first batch. It is still reported."
    )
    changes: list[dict[str, Any]] = field(default_factory=list)  # of a resumed run: steps, and the values before them

    def __post_init__(self) -> None:
        self.use_plain_values()
        self.check_types()
        self.check_at_least(
            steps=self.min_steps, batch_size=self.min_batch, accumulate=self.min_batch, lr=0, warmup=-1, weight_decay=0,
            clip=0, eval_every=1, eval_windows=1, save_every=1, patience=0, keep=1, keep_trajectory=0, sample_tokens=0,
            seed=0,
        )  # fmt: skip
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be > 0, got {self.bucket_mb}")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"lr_floor must be in [0, 1], got {self.lr_floor}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}; 1 gives all layers the same rate")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1), got {self.ema}; 0 averages nothing")
        if self.keep_trajectory and self.not_replayed:
            raise ValueError(
                f"--keep-trajectory is for onfoot blame, which cannot replay a run with {self.not_replayed[0]}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name, known in (
            ("schedule", SCHEDULES),
            ("optimizer", OPTIMIZERS),
            ("dtype", self.dtypes),
            ("engine", (*((self.engine,) if is_own(self.engine) else ()), "auto", *ENGINES)),
            ("recompute", RECOMPUTE),
            ("log", TRACKERS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {shown(getattr(self, name))}; choose from {', '.join(known)}")
        if self.dp_clip is not None and is_own(self.engine):
            raise ValueError("--dp-clip needs the gradient of each example, which pairs of your own do not return")
        if self.optimizer == "muon" and self.shard:
            raise ValueError("--optimizer muon cannot be used with --shard: a matrix is orthogonalized as a whole")
        self.check_privacy()
        self.check_changes()
        if self.warmup < 0 and self.steps:
            object.__setattr__(self, "warmup", default_warmup(self.steps))

    def check_changes(self) -> None:
        """Raises ValueError unless the changes are what `changed` makes."""
        if not isinstance(self.changes, list):
            raise ValueError(f"changes must be a list, got {shown(self.changes)}")
        for change in self.changes:
            if not isinstance(change, dict) or type(change.get("step")) is not int or set(change) != {"step", "before"}:
                raise ValueError(f"a change must have a step and the values before it, got {shown(change)}")
            before = change["before"]
            if not isinstance(before, dict) or not set(before) <= set(CHANGEABLE):
                raise ValueError(f"the values before a change must be options that can change, got {shown(before)}")

    def changed(self, step: int, **values: Any) -> Any:
        """The options of a run that continues from this step with other values."""
        before = {name: getattr(self, name) for name in values}
        new = {name: value for name, value in values.items() if value != before[name]}
        if not new:
            return self
        left = new.get("steps", self.steps) - step
        if RATES & set(new) and "warmup" not in values and 2 * self.warmup > left > 0:  # it would hardly decay
            new["warmup"] = min(self.warmup, default_warmup(left))
            before["warmup"] = self.warmup
            new = {name: value for name, value in new.items() if value != before[name]}
        kept = {name: before[name] for name in new}
        return replace(self, **new, changes=[*self.changes, {"step": step, "before": kept}])

    def phases(self) -> list[tuple[int, TrainingOptions]]:
        """The options between the changes, each with its first step; the newest last."""
        out: list[tuple[int, TrainingOptions]] = []
        options = replace(self, changes=[])
        for change in reversed(self.changes):
            out.append((change["step"], options))
            options = replace(options, **change["before"])
        return [(0, options), *reversed(out)]

    def check_privacy(self) -> None:
        """Raises ValueError for options of private training that do not go together."""
        if self.dp_clip is None:
            given = [name for name in ("dp_epsilon", "dp_delta", "dp_noise") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} needs --dp-clip, the norm to which every example's gradient is clipped")
            return
        if not self.dp_clip > 0:
            raise ValueError(f"dp_clip must be > 0, got {self.dp_clip}")
        if (self.dp_epsilon is None) == (self.dp_noise is None):
            which = "neither" if self.dp_noise is None else "both"
            raise ValueError(f"dp_clip needs either --dp-epsilon or --dp-noise, got {which}; --dp-noise 0 only clips")
        if self.dp_epsilon is not None and not self.dp_epsilon > 0:
            raise ValueError(f"dp_epsilon must be > 0, got {self.dp_epsilon}; useful values are 1 to 10")
        if self.dp_noise is not None and not self.dp_noise >= 0:
            raise ValueError(f"dp_noise must be >= 0, got {self.dp_noise}")
        if self.dp_delta is None and self.dp_noise != 0:
            raise ValueError("private training needs --dp-delta, for example 1e-5: well below 1 / number of examples")
        if self.dp_delta is not None and not 0 < self.dp_delta < 1:
            raise ValueError(f"dp_delta must be in (0, 1), got {self.dp_delta}")
        if self.shard:
            raise ValueError("--dp-clip works in one process, --shard under mpiexec: choose one")

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., steps − 1."""
        return rate_in(self._schedules, step)

    @property
    def last_schedule(self) -> Schedule:
        """The schedule since the last change that concerns it."""
        return self._schedules[-1]

    @property
    def warmup_warning(self) -> str:
        """A warning if the warmup takes more than half of the run, or of what is left of it; else an empty text."""
        since, steps = self.last_schedule[:2]
        left = steps - since
        if 2 * self.warmup <= max(left, 2):
            return ""
        run = f"the {'one step' if left == 1 else f'{left:,} steps'} of the run{' from here on' * bool(since)}"
        too_long = f"takes more than half of {run}"
        if self.warmup >= left:
            too_long = f"is not less than {run}, so the learning rate never decays"
        return f"the warmup of {self.warmup:,} steps {too_long}; pass --warmup {default_warmup(left)}, or more --steps"

    @cached_property
    def _schedules(self) -> list[Schedule]:
        """The schedules between the changes that concern them."""
        out: list[Schedule] = []
        for since, o in self.phases():
            settings = o.steps, o.lr, o.warmup, o.schedule, o.lr_floor
            if not out or out[-1][1:] != settings:
                out.append(Schedule(since, *settings))
        return out

    def use_plain_values(self) -> None:
        """Makes Python's numbers of NumPy's, and a tuple of a list of betas, as files have it."""
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
                object.__setattr__(self, name, value.item())
            if name == "betas" and isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def check_types(self) -> None:
        """Raises ValueError for a value that is not of its field's type, and for a number out of range."""
        for name in (f.name for f in fields(self) if f.name != "changes"):
            self.check_type(name, getattr(self, name))

    @classmethod
    def check_type(cls, name: str, value: Any) -> None:
        """Raises ValueError if a value is not of the type of the field of this name, or a number out of range."""
        hint = _hints(cls)[name]  # type: ignore[arg-type]  # classes are hashable
        if value is None and hint in (str | None, float | None):
            return
        items = value if hint in (list[str], tuple[float, float]) else [value]
        if hint == tuple[float, float] and (not isinstance(value, list | tuple) or len(value) != 2):
            raise ValueError(f"{name} must be two numbers, got {shown(value)}")
        if hint == list[str] and not isinstance(value, list):
            raise ValueError(f"{name} must be a list of strings, got {shown(value)}")
        kind = {list[str]: str, str | None: str, float | None: float, tuple[float, float]: float}.get(hint, hint)
        for item in items:
            if type(item) is not kind and not (kind is float and type(item) is int):
                raise ValueError(f"{name} must be {TYPE_NAMES[kind]}, got {shown(item)}")
            if kind in (int, float) and not -LARGEST_FLOAT <= item <= LARGEST_FLOAT:
                raise ValueError(f"{name} must be finite, got {shown(item)}")
            if kind is int and abs(item) >= 1 << 63:
                raise ValueError(f"{name} must be below 2^63 in magnitude, got {shown(item)}")

    def check_at_least(self, **limits: float) -> None:
        """Raises ValueError if an option is below its limit."""
        for name, limit in limits.items():
            if not getattr(self, name) >= limit:
                raise ValueError(f"{name} must be >= {limit}, got {getattr(self, name)}")

    @property
    def not_replayed(self) -> list[str]:
        """The options in use that `onfoot blame` cannot replay."""
        muon = ["--optimizer muon"] if self.optimizer == "muon" else []
        muon += [f"--engine {self.engine}"] if is_own(self.engine) else []
        return [*(["--ema"] if self.ema else []), *(["--layer-decay"] if self.layer_decay != 1 else []), *muon]

    @property
    def frozen(self) -> list[str]:
        """The patterns of --freeze."""
        return [pattern.strip() for pattern in self.freeze.split(",") if pattern.strip()]

    @classmethod
    def load(cls, path: Path) -> Any:
        """The options that a run.json holds."""
        values = read_json(path)
        command = values.pop("command", None)
        for name in ("made_with", "sha256"):  # written by `runs`, not options
            values.pop(name, None)
        if command != cls.command:
            known = command in ("train", "finetune")
            what = f"is a run of onfoot {command}; resume it with that command" if known else "is not a run folder"
            raise ValueError(f"{path.parent} {what}")
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"{path}: unknown option {shown(unknown[0])}; this version of onfoot does not have it")
        with naming(path):
            return cls(**{**cls.before, **values})


@dataclass(frozen=True)
class TrainOptions(TrainingOptions):
    """Options of `onfoot train`. The defaults train a small model on a small text in a few minutes."""

    command = "train"
    min_steps = 0  # 0: computed from the epochs, once the text is read

    epochs: float = option(0.0, "Number of passes over the text, instead of --steps.")
    texts: list[str] = field(default_factory=list)  # files, folders, "-"; empty: the text that ships with Python
    tokenizer: str = option(
        "auto",
        "byte, char, bpe (trained on the training part of the text), or a tokenizer file or folder; auto: bpe, or byte "
        "for a short text and with --dp-clip.",
    )
    vocab_size: int = option(0, "Vocabulary size of a newly trained bpe tokenizer; 0: 1,024, or 4,096 for a long text.")
    init: str | None = option(None, "Model folder to start from, instead of a new model.")
    n_layer: int = option(2, "Number of blocks.")
    n_head: int = option(4, "Number of attention heads.")
    n_embd: int = option(128, "Hidden size of the model.")
    arch: str = option("llama", f"Architecture of a new model: {' or '.join(ARCHITECTURES)}.")
    n_kv_head: int = option(0, "With --arch llama: number of key and value heads; 0: as many as --n-head.")
    n_inner: int = option(0, "Hidden size of the MLP; 0: 4 × --n-embd, or about 8/3 × --n-embd with --arch llama.")
    head_dim: int = option(0, "Size of a head; 0: --n-embd / --n-head.")
    context: int = option(128, "Tokens per window, and the maximum sequence length of a new model.")
    validation: float = option(0.1, "Fraction of the text, at its end, held out for validation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size:
            self.check_at_least(vocab_size=257)
        self.check_at_least(n_layer=1, n_head=1, n_embd=1, context=1, n_kv_head=0, n_inner=0, head_dim=0)
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"unknown arch {shown(self.arch)}; choose from {', '.join(ARCHITECTURES)}")
        if self.n_kv_head and self.arch != "llama":
            raise ValueError(f"n_kv_head={self.n_kv_head} needs --arch llama: GPT-2 has as many as query heads")
        if not 0 <= self.epochs <= 1e6:
            raise ValueError(f"epochs must be >= 0 and <= 1,000,000, got {self.epochs}")
        if not (self.steps or self.epochs):
            raise ValueError(f"steps must be >= 1, got {self.steps}, where --epochs does not set them")
        if self.dp_clip is not None and self.init is None and self.tokenizer in ("bpe", "char"):
            raise ValueError(
                f"--dp-clip cannot be used with --tokenizer {self.tokenizer}, which is made from the private text and "
                f"not covered by the guarantee; use byte, or a tokenizer file made from other text"
            )
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must be in (0, 1), got {self.validation}")


@dataclass(frozen=True)
class FinetuneOptions(TrainingOptions):
    """Options of `onfoot finetune`: LoRA layers, or all weights, on prompts and completions."""

    command = "finetune"
    dtypes: ClassVar[tuple[str, ...]] = ("auto", *DTYPES)
    min_steps = 0  # 0: computed from the epochs, once the data is read
    min_batch = 0  # 0: chosen from the data's size
    before: ClassVar[dict[str, Any]] = {"row_length": 1 << 30, "template": False, "accumulate": 1}

    model: str = ""  # the base: a folder, a run, a GGUF file or a name
    data: list[str] = field(default_factory=list)  # files, folders and saved datasets
    validation_data: list[str] = field(default_factory=list)  # files; without any, a tenth of the data is held out
    steps: int = option(0, "Number of optimizer steps; 0 computes it from --epochs.")
    epochs: float = option(0.0, "Passes over the examples; 0: 3, or more for at least 100 steps (at most 20).")
    batch_size: int = option(0, "Rows per microbatch; 0: chosen from the number of examples.")
    accumulate: int = option(0, "Microbatches per step (gradient accumulation); 0: as few as fit 4,096 tokens each.")
    lr: float = option(
        0.0, "Peak learning rate; 0: by the model's width, lower for --full and long runs; with --dpo 2e-4."
    )
    weight_decay: float = option(0.0, "AdamW's weight decay; biases and norms are not decayed.")
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW's betas: decay rates of the first and second moments.")
    eval_every: int = option(50, "Steps between evaluations.")
    save_every: int = option(50, "Steps between checkpoints; a new best validation loss is always saved.")
    sample_tokens: int = option(60, "Tokens of the sample answer at each evaluation; 0 disables samples.")
    dtype: str = option("auto", f"{', '.join(DTYPES)}, or auto: float32, with frozen 16-bit weights as in the files.")
    full: bool = option(False, "Train all weights instead of LoRA layers.")
    quantized: bool = option(
        False,
        "Keep the frozen base weights quantized (as in a GGUF file, else 8-bit): LoRA in a fraction of the memory.",
    )
    r: int = option(16, "Rank of the LoRA layers.")
    alpha: float = option(16.0, "LoRA alpha: LoRA layers are scaled by alpha / r, as in PEFT.")
    targets: str = option("", "Comma-separated layers to adapt; by default all linear layers of the blocks.")
    lora_dropout: float = option(0.0, "Dropout on the LoRA layers' input.")
    use_rslora: bool = option(False, "Rank-stabilized LoRA: scale by alpha / √r instead of alpha / r.")
    lora_plus: float = option(1.0, "LoRA+: the learning rate of the B matrices relative to that of A; try 16.")
    dpo: bool = option(False, 'Preference tuning (DPO) on {"prompt", "chosen", "rejected"} lines; docs/preferences.md.')
    dpo_beta: float = option(0.1, "With --dpo: β, how strongly the model is held to its reference.")
    dpo_smoothing: float = option(0.0, "With --dpo: the fraction of pairs that are assumed to be the wrong way round.")
    max_length: int = option(0, "Maximum tokens per sequence; 0 means the model's maximum, at most 1024.")
    on_long: str = option(
        "refuse", "Longer examples: refuse, truncate or skip; truncated and skipped ones are reported."
    )
    row_length: int = option(0, "Tokens per packed row; 0: chosen from the data, so that a step has 4 to 32 examples.")
    template: bool = option(
        True, "Put prompts and completions into the model's chat template, if it has one, as user and assistant."
    )
    pack: bool = option(True, "Pack several short examples into one row; they do not attend to each other.")
    validation: float = option(0.1, "Fraction of the examples held out for validation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(max_length=0, row_length=0)
        if not 0 <= self.epochs <= 1e6:
            raise ValueError(f"epochs must be >= 0 and <= 1,000,000, got {self.epochs}")
        if self.full and self.quantized:
            raise ValueError("--full trains all weights, --quantized freezes them: choose one")
        if self.freeze and not self.full:
            raise ValueError(
                "--freeze needs --full (full=True): LoRA freezes all weights of the model; choose layers with --targets"
            )
        if not self.lora_plus > 0:
            raise ValueError(f"lora_plus must be > 0, got {self.lora_plus}")
        if self.full and self.lora_plus != 1:
            raise ValueError("--lora-plus is for LoRA layers, which --full does not have")
        if self.optimizer == "muon" and not self.full:
            raise ValueError(
                "--optimizer muon needs --full (full=True): it is for the matrices of the blocks, which LoRA freezes"
            )
        if self.on_long not in ON_LONG:
            raise ValueError(f"unknown on_long {shown(self.on_long)}; choose from {', '.join(ON_LONG)}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}")
        self.check_preferences()
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must be in (0, 1), got {self.validation}")

    def check_preferences(self) -> None:
        """Raises ValueError for options that do not go together with preference pairs."""
        if not self.dpo_beta > 0:
            raise ValueError(f"dpo_beta must be > 0, got {self.dpo_beta}")
        if not 0 <= self.dpo_smoothing < 0.5:
            raise ValueError(f"dpo_smoothing must be in [0, 0.5), got {self.dpo_smoothing}")
        if self.dpo and self.dp_clip is not None:
            raise ValueError("--dpo cannot be used with --dp-clip: private training knows single examples, not pairs")

    @property
    def target_list(self) -> list[str]:
        """The layers of --targets."""
        return [target.strip() for target in self.targets.split(",") if target.strip()]

    @property
    def not_replayed(self) -> list[str]:
        """The options in use that `onfoot blame` cannot replay."""
        of_lora = ["--lora-plus"] if self.lora_plus != 1 else []
        return [*super().not_replayed, *of_lora, *(["--dpo"] if self.dpo else [])]
