"""RoPE's frequencies equal those of transformers' LLaMA, with and without scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from onfoot.config import RopeScaling
from onfoot.ops.rope import angles, frequencies


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_speeds_are_transformers(theta: float, scaling: dict[str, Any] | None) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": theta},
    )  # fmt: skip
    theirs = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    ours = frequencies(theta, 16, RopeScaling(**scaling) if scaling else None)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_angles_are_position_times_speed() -> None:
    cos, sin = angles(np.array([[0, 3]]), np.array([1.0, 0.5]))
    np.testing.assert_allclose(cos, np.cos([[[0, 0], [3, 1.5]]]))
    np.testing.assert_allclose(sin, np.sin([[[0, 0], [3, 1.5]]]))
