"""onfoot: transformers whose every gradient is a formula you can read."""

from onfoot.config import PRESETS, GPT2Config, LlamaConfig, preset
from onfoot.evaluation import Evaluation, evaluate
from onfoot.models.model import Model, create, load
from onfoot.threads import set_threads
from onfoot.train.optimizer import AdamW

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AdamW",
    "Evaluation",
    "GPT2Config",
    "LlamaConfig",
    "Model",
    "__version__",
    "create",
    "evaluate",
    "load",
    "preset",
    "set_threads",
]
