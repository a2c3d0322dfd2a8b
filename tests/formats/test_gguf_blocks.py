"""Every type of quantised GGUF tensor against the gguf package: the same numbers, exactly, from any bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import onfoot
from llama_oracle import scrambled_llama
from onfoot.formats.gguf_blocks import BLOCKS, unpacked
from onfoot.formats.gguf_model import gguf_name
from onfoot.quantized import QuantizedWeight
from oracles import assert_close

# Where the float16 scales (and minima) of a block are, in bytes.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random bytes (rows, blocks, bytes) with finite scales, among them 0, negative and subnormal ones."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, BLOCKS[kind][1]), np.uint8)
    for at in SCALES[kind]:
        bits = rng.integers(0, 0x7C00, (rows, blocks), np.uint16) | (rng.integers(0, 2, (rows, blocks)) << 15)
        raw[..., at : at + 2] = bits.astype("<u2")[..., None].view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", SCALES)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_stand_for_the_numbers_of_the_gguf_package(kind: str, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(kind, rows, blocks, seed)
    theirs = dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[kind])
    ours = unpacked(kind, raw)
    assert ours.shape == theirs.shape == (rows, blocks * BLOCKS[kind][0])
    assert np.array_equal(np.asarray(ours), theirs)


def test_sizes_are_those_of_the_gguf_package() -> None:
    for kind, sizes in BLOCKS.items():
        assert sizes == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_q8_k_has_one_float32_scale_per_256_codes() -> None:
    """The gguf package cannot read this type: llama.cpp's struct is float d; int8 qs[256]; int16 bsums[16]."""
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(-128, 128, (2, 3, 256)), rng.standard_normal((2, 3)).astype(np.float32)
    blocks = [struct.pack("<f256b16h", scales[i, j], *codes[i, j], *range(16)) for i in range(2) for j in range(3)]
    ours = unpacked("Q8_K", np.frombuffer(b"".join(blocks), np.uint8).reshape(2, 3, 292))
    assert np.array_equal(np.asarray(ours), (codes * scales[..., None]).astype(np.float32).reshape(2, 768))


CONFIG = onfoot.LlamaConfig(
    vocab_size=37, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, 37, (2, 11))


def write_blocks(path: Path, kind: str) -> Path:
    """A model file whose matrices are random blocks of numbers of a reasonable size."""
    writer = gguf.GGUFWriter(str(path), "llama")
    sizes = {
        "context_length": 32, "embedding_length": 256, "block_count": 1, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 37,
    }  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng, type_ = np.random.default_rng(6), gguf.GGMLQuantizationType[kind]
    for i, (name, value) in enumerate(scrambled_llama(CONFIG, 0, "float32").params.items()):
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
            continue
        size, n_bytes = BLOCKS[kind]
        raw = random_blocks(kind, value.shape[0], value.shape[1] // size, i)
        largest = np.abs(dequantize(raw.reshape(-1, n_bytes), type_)).max(-1).reshape(raw.shape[:2])
        for at in SCALES[kind]:
            scale = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
            scale *= 0.2 * rng.random(raw.shape[:2]) / np.maximum(largest, 1e-3)
            raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
        writer.add_tensor(gguf_name(name), raw.reshape(value.shape[0], -1), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", SCALES)
def test_lora_on_a_base_that_stays_in_its_blocks(kind: str, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "model.gguf", kind)
    exact = onfoot.load(path, "float64")
    blocks = [
        onfoot.load(path, dtype, engine, quantized=True) for dtype, engine in (("auto", "numba"), ("float64", "numpy"))
    ]
    weight = blocks[0].params["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(weight, QuantizedWeight) and weight.kind == kind
    assert blocks[0].source == str(path.resolve())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert_close(blocks[0].logits(TOKENS), theirs(torch.tensor(TOKENS)).logits.numpy(), 1e-5)
    for model in (exact, *blocks):
        model.add_lora(r=3, alpha=5)
        rng = np.random.default_rng(1)
        for name in sorted(model.trainable):
            model.params[name] = rng.normal(0, 0.05, model.params[name].shape).astype(np.float32)
    loss, grads = exact.loss_and_grads(TOKENS)
    for model, close in zip(blocks, (1e-4, 1e-5), strict=True):
        for tokens in (TOKENS, TOKENS[:1, :2]):  # many rows, and a few
            assert_close(model.logits(tokens), exact.logits(tokens), close)
        ours, found = model.loss_and_grads(TOKENS)
        assert ours == pytest.approx(loss, rel=1e-6)
        for name, grad in found.items():
            assert_close(grad, grads[name], close, name)
