"""Which network belongs to a configuration.

A family is a module with the same functions: features, head and loss, each with a forward and a backward pass;
the names and shapes of its parameters are in a module beside it (`params.names_of`).
"""

from __future__ import annotations

from types import ModuleType

from onfoot.config import Config, LlamaConfig
from onfoot.models import gpt2, llama


def network(config: Config) -> ModuleType:
    """The forward and backward pass of a configuration's family."""
    return llama if isinstance(config, LlamaConfig) else gpt2
