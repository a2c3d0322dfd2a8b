"""onfoot: transformers whose every gradient is a formula you can read."""

from onfoot.config import PRESETS, GPT2Config, LlamaConfig, preset
from onfoot.evaluation import Evaluation, evaluate
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer
from onfoot.models.model import Model, create, load
from onfoot.threads import set_threads
from onfoot.train.callbacks import Callback
from onfoot.train.loop import Trainer
from onfoot.train.optimizer import AdamW
from onfoot.train.options import TrainingOptions
from onfoot.train.sources import Source

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AdamW",
    "Callback",
    "ChatTemplate",
    "Evaluation",
    "GPT2Config",
    "LlamaConfig",
    "Model",
    "Source",
    "Tokenizer",
    "Trainer",
    "TrainingOptions",
    "__version__",
    "create",
    "evaluate",
    "load",
    "preset",
    "set_threads",
]
