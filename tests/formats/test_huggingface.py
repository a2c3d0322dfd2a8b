"""Loading and saving Hugging Face folders, compared with transformers."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import onfoot
from onfoot.formats.huggingface import transformers_config
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.model import Model
from oracles import assert_close, scrambled

SIZES: dict[str, Any] = {"vocab_size": 29, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 9))


def peer(dtype: torch.dtype = torch.float64, **changes: Any) -> GPT2LMHeadModel:
    """A transformers GPT-2 with random weights, away from their initial values."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **changes, attn_implementation="eager")).to(torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "ln_" in name and name.endswith("weight") else 0.0))
    return model.eval().to(dtype)


def peer_loss_and_grads(model: GPT2LMHeadModel) -> tuple[float, dict[str, np.ndarray]]:
    tokens = torch.tensor(TOKENS)
    logits = model(tokens).logits  # its own loss is computed in float32
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"n_inner": 7},
    ],
    ids=str,
)
def test_logits_loss_and_every_gradient_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = peer(**changes)
    theirs.save_pretrained(tmp_path)
    ours = onfoot.load(tmp_path, dtype="float64")
    assert_close(ours.logits(TOKENS), theirs(torch.tensor(TOKENS)).logits.detach().numpy(), 1e-10)
    loss, grads = ours.loss_and_grads(TOKENS)
    their_loss, their_grads = peer_loss_and_grads(theirs)
    assert loss == pytest.approx(their_loss, rel=1e-12)
    assert set(grads) == set(their_grads)
    for name, grad in grads.items():
        if name.endswith("c_attn.bias"):
            their_grads[name][12:24] = 0  # the key bias: exactly 0, but rounding noise in autograd
        assert_close(grad, their_grads[name], 1e-10, name)


def test_float32_logits_are_within_1e_4(tmp_path: Path) -> None:
    theirs = peer(torch.float32)
    theirs.save_pretrained(tmp_path)
    ours = onfoot.load(tmp_path)
    assert np.abs(ours.logits(TOKENS) - theirs(torch.tensor(TOKENS)).logits.detach().numpy()).max() <= 1e-4


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=str)
def test_a_saved_model_opens_in_transformers_with_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = onfoot.GPT2Config(**SIZES, **changes)
    ours = Model(config, scrambled(onfoot.create(config).params, 1), "float64")
    ours.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(theirs, GPT2LMHeadModel)
    assert_close(theirs(torch.tensor(TOKENS)).logits.detach().numpy(), ours.logits(TOKENS), 1e-10)
    again = onfoot.load(tmp_path, dtype="float64")
    assert all((again.params[k] == ours.params[k]).all() for k in ours.params)
    assert again.config == ours.config


def test_a_saved_tokenizer_opens_in_transformers(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = onfoot.create(onfoot.GPT2Config(**{**SIZES, "vocab_size": tokenizer.size}))
    model.tokenizer = tokenizer
    model.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße, 世界!\n\ttabs"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    loaded = onfoot.load(tmp_path).tokenizer
    assert loaded is not None and loaded.encode(text) == tokenizer.encode(text) and loaded.eos_id == tokenizer.eos_id


def test_both_naming_styles_masks_and_a_repeated_head_are_read(tmp_path: Path) -> None:
    theirs = peer()
    theirs.save_pretrained(tmp_path)
    expected = onfoot.load(tmp_path, dtype="float64").logits(TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    save_file(bare, tmp_path / "model.safetensors")
    assert (onfoot.load(tmp_path, dtype="float64").logits(TOKENS) == expected).all()

    bare["lm_head.weight"] = bare["wte.weight"] + 1
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from transformer.wte.weight"):
        onfoot.load(tmp_path)


def test_sharded_folders_are_read(tmp_path: Path) -> None:
    theirs = peer(torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = onfoot.load(tmp_path)
    assert np.abs(ours.logits(TOKENS) - theirs(torch.tensor(TOKENS)).logits.detach().numpy()).max() <= 1e-4
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"shard .*{shard.name} is missing"):
        onfoot.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = peer(dtype)
    theirs.save_pretrained(tmp_path)
    ours = onfoot.load(tmp_path)
    for name, p in theirs.named_parameters():
        assert (ours.params[name] == p.detach().float().numpy()).all()


def test_a_network_that_transformers_does_not_support_has_its_own_model_type(tmp_path: Path) -> None:
    for changes in (
        {"head_dim": 5},
        {"qk_head_dim": 2},
        {"causal": False},
        {"tie_word_embeddings": False, "lm_head_bias": True},
    ):
        config = onfoot.GPT2Config(**SIZES, **changes)
        assert transformers_config(config, "float32")["model_type"] == "onfoot-gpt2"
        model = onfoot.create(config)
        model.save(tmp_path)
        assert onfoot.load(tmp_path).config == config
        with pytest.raises(ValueError):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def write_model(folder: Path) -> Path:
    onfoot.create(onfoot.GPT2Config(**SIZES)).save(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_without_a_model_are_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        onfoot.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        onfoot.load(tmp_path)
    write_model(tmp_path)
    edit_config(tmp_path, model_type="mamba")
    with pytest.raises(ValueError, match="model_type 'mamba' is not supported"):
        onfoot.load(tmp_path)
    edit_config(tmp_path, model_type="gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True is not supported"):
        onfoot.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        onfoot.load(tmp_path)


def test_damaged_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"is truncated: .* bytes of"):
        onfoot.load(tmp_path)
    path.write_bytes(whole[:4])
    with pytest.raises(ValueError, match="not a safetensors file, or is truncated"):
        onfoot.load(tmp_path)
    path.write_bytes(b"\x08" + bytes(7) + b"not json" + bytes(100))
    with pytest.raises(ValueError, match="header is not valid JSON"):
        onfoot.load(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        onfoot.load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="can run code when it is loaded"):
        onfoot.load(tmp_path)


@pytest.mark.parametrize(
    "header", ["[]", '"x"', '{"a": {}}', '{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}']
)
def test_headers_that_make_no_sense_are_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        TensorFile(path)


def test_a_failed_save_leaves_the_old_files_as_they_were(tmp_path: Path) -> None:
    write_model(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limit[1]))
        with pytest.raises(OSError):
            onfoot.create(onfoot.GPT2Config(**SIZES), seed=1).save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "changes",
    [{"embd_pdrop": None}, {"layer_norm_epsilon": "1e-5"}, {"activation_function": []}, {"n_embd": "12"}],
    ids=str,
)
def test_configurations_of_wrong_types_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    edit_config(write_model(tmp_path), **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        onfoot.load(tmp_path)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    tensors = {name: np.array(value) for name, value in TensorFile(path).items()}
    name = "transformer.h.1.ln_2.bias"
    write_tensors(path, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        onfoot.load(tmp_path)
    write_tensors(path, {**tensors, name: np.zeros(5, np.float32)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(5,\); config.json expects \(12,\)"):
        onfoot.load(tmp_path)
    write_tensors(path, {**tensors, name: np.zeros(12, np.int32)})
    with pytest.raises(ValueError, match=f"{name} has dtype 'I32'"):
        onfoot.load(tmp_path)
    write_tensors(path, {**tensors, "transformer.h.7.extra": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"unexpected tensor transformer\.h\.7\.extra"):
        onfoot.load(tmp_path)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)  # a vocabulary of 29
    byte_tokenizer().save(tmp_path, 16)
    with pytest.raises(ValueError, match="the tokenizer has ids up to 256, but the model has vocab_size=29"):
        onfoot.load(tmp_path)


def test_tensor_files_are_read_and_written_as_safetensors_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 5)), "b": rng.normal(size=7).astype(np.float32), "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.0, np.float32), "ids": np.arange(4),
        "half": np.ones(3, np.float16), "transposed": rng.normal(size=(2, 3)).T,
    }  # fmt: skip
    write_tensors(tmp_path / "x.safetensors", arrays)
    theirs = load_file(tmp_path / "x.safetensors")
    ours = TensorFile(tmp_path / "x.safetensors")
    assert set(theirs) == set(ours) == set(arrays)
    for name, array in arrays.items():
        assert (theirs[name].numpy() == array).all() and (ours[name] == array).all()
        assert ours[name].shape == array.shape and ours[name].dtype == array.dtype
