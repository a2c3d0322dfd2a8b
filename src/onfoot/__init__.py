"""onfoot: transformers whose every gradient is a formula you can read."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onfoot.config import PRESETS, GPT2Config, LlamaConfig, preset
from onfoot.models.load import create, load
from onfoot.models.model import Model
from onfoot.threads import set_threads
from onfoot.train.optimizer import AdamW

if TYPE_CHECKING:
    from onfoot import check, torch
    from onfoot.evaluation import Evaluation, evaluate
    from onfoot.formats.chat import ChatTemplate
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.train.callbacks import Callback
    from onfoot.train.loop import Trainer
    from onfoot.train.lr_range import find_lr
    from onfoot.train.muon import Muon
    from onfoot.train.options import FinetuneOptions, TrainingOptions
    from onfoot.train.sources import Source

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AdamW",
    "Callback",
    "ChatTemplate",
    "Evaluation",
    "FinetuneOptions",
    "GPT2Config",
    "LlamaConfig",
    "Model",
    "Muon",
    "Source",
    "Tokenizer",
    "Trainer",
    "TrainingOptions",
    "__version__",
    "check",
    "create",
    "evaluate",
    "find_lr",
    "load",
    "preset",
    "set_threads",
    "torch",
]

# Imported when they are first used: they bring 16 MB of other packages, which a step does not need.
_LAZY = {
    "Callback": "train.callbacks", "ChatTemplate": "formats.chat", "Evaluation": "evaluation",
    "Source": "train.sources", "Tokenizer": "formats.tokenizer", "Trainer": "train.loop",
    "FinetuneOptions": "train.options", "TrainingOptions": "train.options", "evaluate": "evaluation",
    "Muon": "train.muon", "find_lr": "train.lr_range",
}  # fmt: skip


_MODULES = ("check", "torch")  # imported when they are first used, too


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"onfoot.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'onfoot' has no attribute {name!r}")
    return getattr(import_module(f"onfoot.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
