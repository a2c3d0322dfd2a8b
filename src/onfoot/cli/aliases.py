"""Options of `train` and `finetune` under the names that nanoGPT and transformers give them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from onfoot.cli.commas import without_commas

ALIASES = {
    "learning-rate": "lr",
    "max-iters": "steps",
    "max-steps": "steps",
    "num-train-epochs": "epochs",
    "per-device-train-batch-size": "batch-size",
    "gradient-accumulation-steps": "accumulate",
    "warmup-iters": "warmup",
    "warmup-steps": "warmup",
    "eval-interval": "eval-every",
    "eval-steps": "eval-every",
    "save-steps": "save-every",
    "block-size": "context",
    "max-seq-length": "max-length",
    "grad-clip": "clip",
    "max-grad-norm": "clip",
    "lr-scheduler-type": "schedule",
    "output-dir": "out",
    "out-dir": "out",
    "report-to": "log",
    "early-stopping-patience": "patience",
    "save-total-limit": "keep",
    "lora-r": "r",
    "lora-rank": "r",
    "lora-alpha": "alpha",
}
HINTS = {  # their options whose values mean something else here
    "min-lr": "here the last rate is a fraction of --lr: --lr-floor 0.1 for a tenth",
    "beta1": "give both betas: --betas 0.9 0.99",
    "beta2": "give both betas: --betas 0.9 0.99",
    "adam-beta1": "give both betas: --betas 0.9 0.99",
    "adam-beta2": "give both betas: --betas 0.9 0.99",
    "warmup-ratio": "here the warmup is in steps: --warmup 50; by default it is a tenth of them",
    "model-name-or-path": "the model is an argument: onfoot finetune MODEL, or onfoot train FILE --init MODEL",
    "lr-decay-iters": "the learning rate decays over all --steps; a resumed run takes more of them",
    "decay-lr": "--schedule constant keeps the learning rate; it is cosine by default",
    "eval-iters": "--eval-windows is the number of validation sequences per evaluation",
    "log-interval": "every step is in the run's log.jsonl",
    "logging-steps": "every step is in the run's log.jsonl",
    "compile": "nothing needs to be compiled; --engine chooses how to compute",
    "torch-compile": "nothing needs to be compiled; --engine chooses how to compute",
    "init-from": "--init MODEL starts from a model, --resume RUN goes on with a run",
    "resume-from-checkpoint": "--resume RUN goes on with a run",
    "dataset": "the text is an argument: onfoot train FILE; onfoot finetune MODEL --data FILE",
    "gradient-checkpointing": "--recompute block takes less memory and more time",
    "wandb-log": "--log wandb",
    "bf16": "training computes in float32; --dtype float64 is more exact",
    "fp16": "training computes in float32; --dtype float64 is more exact",
    "device": "onfoot computes on the CPU; --engine chooses how, --threads with how many threads",
}


class WithAliases(TyperCommand):
    """A command that also understands these names, with hyphens or underscores, wherever it has the option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        end = args.index("--") if "--" in args else len(args)
        typed: dict[str, str] = {}
        for name in (a.partition("=")[0] for a in args[:end] if a.startswith("--")):
            meant = translated(name, known)
            if typed.setdefault(meant, name) != name:
                raise ValueError(f"{typed[meant]} and {name} are the same option; give one of them")
        for name in (a[2:].partition("=")[0].replace("_", "-") for a in args[:end] if a.startswith("--")):
            if name in HINTS and f"--{name}" not in known:
                raise ValueError(f"no option --{name}; {HINTS[name]}")
        ours = [translated(a, known) for a in args[:end]]
        pairs = {name for parameter in self.params if parameter.nargs == 2 for name in parameter.opts}
        return super().parse_args(ctx, [*without_commas(ours, pairs), *args[end:]])


def translated(argument: str, known: set[str]) -> str:
    """`--max_iters=5` as `--steps=5`; anything else as it is."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or name in known:
        return argument
    name = name[2:].replace("_", "-")
    meant = f"--{ALIASES.get(name, name)}"
    return f"{meant}{equals}{value}" if meant in known else argument
