"""Options of `train` and `finetune` under the names that nanoGPT and transformers give them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

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
}


class WithAliases(TyperCommand):
    """A command that also understands these names, with hyphens or underscores, wherever it has the option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*(translated(a, known) for a in args[:end]), *args[end:]])


def translated(argument: str, known: set[str]) -> str:
    """`--max_iters=5` as `--steps=5`; anything else as it is."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or name in known:
        return argument
    name = name[2:].replace("_", "-")
    meant = f"--{ALIASES.get(name, name)}"
    return f"{meant}{equals}{value}" if meant in known else argument
