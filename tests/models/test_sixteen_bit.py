"""Weights in 16 bits: the same numbers as the float32 load of the same files, in logits, gradients and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import onfoot
from onfoot.formats.tensors import TensorFile
from onfoot.models.params import quantizable
from onfoot.quantized import HalfWeight, frozen_weight

KINDS = {torch.bfloat16: "BF16", torch.float16: "F16"}
TOKENS = np.random.default_rng(0).integers(0, 90, (3, 13))


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 90, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 40, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 90, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 40, "initializer_range": 0.1}
    return GPT2LMHeadModel(GPT2Config(**sizes))


FAMILIES = {"llama": llama, "tied llama": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2}


def write(folder: Path, family: str, dtype: torch.dtype) -> Path:
    torch.manual_seed(3)
    model = FAMILIES[family]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_((p.ndim == 1) * 0.2 * torch.randn(p.shape))  # norms and biases away from their initial values
    model.to(dtype).save_pretrained(folder)
    return folder


def pair(folder: Path, engine: str) -> tuple[onfoot.Model, onfoot.Model]:
    """The float32 load and the 16-bit load."""
    return onfoot.load(folder, engine=engine), onfoot.load(folder, dtype="auto", engine=engine)


@pytest.mark.parametrize("engine", ["numba", "numpy"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", KINDS)
def test_logits_losses_and_lora_gradients_are_those_of_float32(
    dtype: torch.dtype, family: str, engine: str, tmp_path: Path
) -> None:
    floats, half = pair(write(tmp_path, family, dtype), engine)
    assert half.quantized == set(quantizable(half.config)) and half.dtype == "float32" and not floats.quantized
    kinds = {frozen_weight(half.params[name]).kind for name in half.quantized}
    assert kinds == {KINDS[dtype]}
    for tokens in (TOKENS, TOKENS[:1, :1], TOKENS[:1, :7]):
        right = floats.logits(tokens)
        assert np.abs(half.logits(tokens) - right).max() <= 1e-6 * np.abs(right).max()
    for model in (floats, half):
        model.add_lora(r=3, alpha=5)
        rng = np.random.default_rng(1)
        for name in sorted(model.trainable):
            model.params[name] = rng.standard_normal(model.params[name].shape).astype(np.float32) / 4
    loss, grads = floats.loss_and_grads(TOKENS)
    same_loss, same = half.loss_and_grads(TOKENS)
    assert same_loss == pytest.approx(loss, rel=1e-6) and same.keys() == grads.keys()
    for name, right in grads.items():
        assert np.linalg.norm(same[name] - right) <= 1e-6 * np.linalg.norm(right), name


@pytest.mark.parametrize("dtype", KINDS)
def test_a_llama_has_the_bits_of_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its weights are stored (out, in) in both cases, and the kernels add the same products in the same order."""
    floats, half = pair(write(tmp_path, "tied llama", dtype), "numba")
    for tokens in (TOKENS, TOKENS[:1, :1], TOKENS[:1, :7]):
        assert np.array_equal(half.logits(tokens), floats.logits(tokens))
    for model in (floats, half):
        model.add_lora(r=3)
    (loss, grads), (same_loss, same) = (model.loss_and_grads(TOKENS) for model in (floats, half))
    assert same_loss == loss and all(np.array_equal(same[name], grads[name]) for name in grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_float32_and_logits_those_of_transformers(family: str, tmp_path: Path) -> None:
    floats, half = pair(write(tmp_path, family, torch.bfloat16), "numba")
    ours, theirs = (model.generate(TOKENS, 12, temperature=0, stop_ids=()) for model in (half, floats))
    assert np.array_equal(ours, theirs)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        right = reference(torch.from_numpy(TOKENS)).logits.numpy()
    assert np.abs(half.logits(TOKENS) - right).max() <= 1e-5 * np.abs(right).max()


def test_weights_take_half_the_memory_and_are_frozen(tmp_path: Path) -> None:
    floats, half = pair(write(tmp_path, "llama", torch.bfloat16), "numba")
    big = sorted(half.quantized)
    assert 2 * sum(half.params[n].nbytes for n in big) == sum(floats.params[n].nbytes for n in big)
    assert half.trainable == set(half.params) - half.quantized  # norms
    assert all(half.params[name].dtype == np.float32 for name in half.trainable)


def test_other_files_and_engines_are_loaded_as_before(tmp_path: Path) -> None:
    plain = onfoot.load(write(tmp_path / "a", "gpt2", torch.float32), dtype="auto")
    assert not plain.quantized and plain.dtype == "float32"
    torch_model = onfoot.load(write(tmp_path / "b", "gpt2", torch.float16), dtype="auto", engine="torch")
    assert not torch_model.quantized and torch_model.params["transformer.wte.weight"].dtype == torch.float32
    exact = onfoot.load(tmp_path / "b", dtype="float64")
    assert exact.params["transformer.wte.weight"].dtype == np.float64


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saving_keeps_the_bits_of_the_file(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    half = onfoot.load(write(tmp_path / "a", family, dtype), dtype="auto")
    half.save(tmp_path / "b")
    before, after = (TensorFile(tmp_path / x / "model.safetensors") for x in "ab")
    assert {n.removeprefix("transformer.") for n in after} == {n.removeprefix("transformer.") for n in before}
    for name in before:
        assert after.dtype(name) == KINDS[dtype]
        assert np.array_equal(after.raw(name), before.raw(name))
    assert onfoot.load(tmp_path / "a").file_dtypes == {}


@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16", None])
def test_a_merged_model_is_rounded_to_the_nearest(wanted: str | None, tmp_path: Path) -> None:
    half = onfoot.load(write(tmp_path / "a", "llama", torch.bfloat16), dtype="auto")
    half.add_lora(r=2, targets=["up_proj", "lm_head"])
    rng = np.random.default_rng(2)
    for name in sorted(half.trainable):
        half.params[name] = rng.standard_normal(half.params[name].shape).astype(np.float32)
    before = half.logits(TOKENS)
    half.merge_adapter()
    assert np.abs(half.logits(TOKENS) - before).max() <= 1e-5 * np.abs(before).max()
    half.save(tmp_path / "b", wanted)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    expected = getattr(torch, wanted or "bfloat16")
    assert saved.dtype == expected
    for name, p in saved.named_parameters():
        right = torch.from_numpy(np.asarray(half.params[name])).to(expected)  # PyTorch's rounding
        assert torch.equal(p, right), name
    half.unmerge_adapter()
    assert np.abs(half.logits(TOKENS) - before).max() <= 1e-5 * np.abs(before).max()


def test_a_16_bit_weight_can_be_quantised_further(tmp_path: Path) -> None:
    floats, half = pair(write(tmp_path, "llama", torch.bfloat16), "numpy")
    assert isinstance(half.params["lm_head.weight"], HalfWeight)
    with pytest.raises(ValueError, match="its row length a multiple of 32"):
        half.quantize()  # 36 columns
    assert floats.n_params == half.n_params


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = onfoot.load(write(tmp_path / "a", "llama", torch.float32))
    with pytest.raises(ValueError, match="unknown dtype 'int8'; choose from float32"):
        model.save(tmp_path / "b", "int8")
    assert not (tmp_path / "b").exists()
    model.params["lm_head.weight"][3, 4] = 1e5
    with pytest.raises(ValueError, match=r"cannot write lm_head.weight as float16: 100000 exceeds 65504"):
        model.save(tmp_path / "c", "float16")
    model.save(tmp_path / "d", "bfloat16")
    assert onfoot.load(tmp_path / "d").params["lm_head.weight"][3, 4] == 99840  # the nearest bfloat16
