"""GGUF files of Qwen3 and Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf import CONFIG, TOKENS, TYPES, write_gguf
from transformers import AutoModelForCausalLM

import onfoot
from llama_oracle import scrambled_llama
from onfoot.formats import gguf_model
from onfoot.models.model import Model
from oracles import assert_close

QWEN3 = onfoot.LlamaConfig.from_dict({**CONFIG.to_dict(), "model_type": "qwen3", "head_dim": 128})
HEADS = {"attention.key_length": 128, "attention.value_length": 128}  # transformers assumes 128


@pytest.mark.parametrize("type_", TYPES)
def test_a_qwen3_file_gives_transformers_logits(tmp_path: Path, type_: str) -> None:
    path = write_gguf(scrambled_llama(QWEN3, 0, "float32"), tmp_path / "model.gguf", type_, metadata=HEADS)
    read = onfoot.load(path)
    assert read.config == QWEN3
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert_close(read.logits(TOKENS), expected, 1e-5)
    state = theirs.state_dict()
    for name, value in read.params.items():
        assert (value == state[name].numpy()).all(), name


def test_a_llama_file_with_a_sliding_window_is_mistral(tmp_path: Path) -> None:
    values = {**CONFIG.to_dict(), "model_type": "mistral", "sliding_window": 3}
    model = scrambled_llama(onfoot.LlamaConfig.from_dict(values), 0, "float32")
    as_llama = Model(CONFIG, dict(model.params))
    read = onfoot.load(write_gguf(as_llama, tmp_path / "m.gguf", metadata={"attention.sliding_window": 3}))
    assert read.config == model.config
    np.testing.assert_array_equal(read.logits(TOKENS), model.logits(TOKENS))
    assert np.abs(as_llama.logits(TOKENS) - model.logits(TOKENS)).max() > 1e-3


@pytest.mark.parametrize("window", [-1, 2.5, "3"])
def test_a_window_that_is_not_a_number_of_tokens_is_refused(tmp_path: Path, window: Any) -> None:
    path = write_gguf(scrambled_llama(CONFIG, 0, "float32"), tmp_path / "m.gguf", metadata={"x": 1})
    read = gguf_model.GgufFile(path)
    read.metadata["llama.attention.sliding_window"] = window
    with pytest.raises(ValueError, match="sliding_window must be an integer >= 1"):
        gguf_model.read_config(read)
