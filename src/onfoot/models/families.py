"""The network of each class of configurations.

A family is a class of configurations and two modules: the network, with the forward and backward passes of features,
head and loss; and the names and shapes of its parameters (`params.names_of`). `register` adds one.
"""

from __future__ import annotations

from typing import Any

from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.models import gpt2, llama
from onfoot.models.params import NAMES, find

NETWORKS: dict[type, Any] = {GPT2Config: gpt2, LlamaConfig: llama}


def register(config: type, network: Any, names: Any) -> None:
    """Adds a family: the class of its configurations, which are frozen dataclasses, and its two modules."""
    NETWORKS[config], NAMES[config] = network, names


def network(config: Config) -> Any:
    """The forward and backward pass of a configuration's family."""
    return find(NETWORKS, config)
