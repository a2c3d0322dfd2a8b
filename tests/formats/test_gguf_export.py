"""Exported GGUF files have the right tensors for the gguf package, and the same logits in transformers and here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize as gguf_quantize
from test_gguf import metadata_of
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import onfoot
from llama_oracle import scrambled_llama
from onfoot.cli import app
from onfoot.config import RopeScaling
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_export import EXPORT_TYPES, export_adapter, export_model
from onfoot.formats.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from onfoot.formats.gguf_write import encode
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.models.model import Model
from oracles import assert_close

LLAMA = onfoot.LlamaConfig(
    vocab_size=305, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=40, rope_theta=100.0, rms_norm_eps=1e-5,
)  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LLAMA,
    "tied llama": replace(LLAMA, tie_word_embeddings=True, rope_theta=1000.0),
    "llama with biases": replace(LLAMA, attention_bias=True, mlp_bias=True),
    "llama with wide heads": replace(LLAMA, head_dim=16),
    "qwen2": replace(LLAMA, model_type="qwen2"),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=128),  # what transformers assumes
    # transformers reads a GPT-2 file as one of 1,024 positions whatever it says
    "gpt2": onfoot.GPT2Config(vocab_size=305, n_positions=1024, n_embd=32, n_layer=2, n_head=2),
    "untied gpt2": onfoot.GPT2Config(
        vocab_size=305, n_positions=1024, n_embd=64, n_layer=1, n_head=4, tie_word_embeddings=False
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 305, (2, 9))
TEXT = "the quick brown fox 2024, isn't it? "


def bpe() -> Tokenizer:
    return bpe_tokenizer(iter([TEXT * 30]), 300)


def scrambled(config: Any, seed: int = 0, dtype: str = "float32") -> Model:
    """A model whose every parameter is away from its initial value."""
    if isinstance(config, onfoot.LlamaConfig):
        return scrambled_llama(config, seed, dtype, "numpy")
    model, rng = onfoot.create(config, dtype=dtype, engine="numpy"), np.random.default_rng(seed)
    for name, value in model.params.items():
        model.params[name] = value + rng.normal(0, 0.2, value.shape).astype(dtype)
    return model


def in_transformers(path: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_model_loads_as_the_same_model(tmp_path: Path, name: str) -> None:
    model = scrambled(CONFIGS[name])
    model.tokenizer = bpe()
    export_model(model, tmp_path / "model.gguf")
    read = onfoot.load(tmp_path / "model.gguf", engine="numpy")
    assert replace(read.config, bos_token_id=None, eos_token_id=None) == model.config
    assert set(read.params) == set(model.params)
    for parameter, value in model.params.items():
        assert (read.params[parameter] == value).all(), parameter
    assert (read.logits(TOKENS) == model.logits(TOKENS)).all()


# all but LLaMA's biases, which transformers' loader of GGUF files leaves out; llama.cpp reads them (test_llama_cpp.py)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama with biases"])
@pytest.mark.parametrize("type_", EXPORT_TYPES)
def test_every_type_gives_the_logits_of_transformers_loader(tmp_path: Path, name: str, type_: str) -> None:
    model = scrambled(CONFIGS[name])
    model.tokenizer = bpe()
    export_model(model, tmp_path / "model.gguf", type_)
    expected = in_transformers(tmp_path / "model.gguf")
    read = onfoot.load(tmp_path / "model.gguf", engine="numpy")
    assert_close(read.logits(TOKENS), expected, 1e-5)
    limit = {"f32": 1e-5, "f16": 1e-2, "bf16": 5e-2}.get(type_, 1.0)
    assert_close(expected, model.logits(TOKENS), limit)


@pytest.mark.parametrize("type_", EXPORT_TYPES)
def test_the_bytes_of_every_type_are_the_gguf_packages(type_: str) -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-6, 0.02, 1.0, 300.0):
        for step in (None, 0.25):  # many numbers midway between two codes
            x = rng.normal(size=(37, 96)) * scale
            x = (x if step is None else np.round(x / scale / step) * step * scale).astype(np.float32)
            x[3, :32], x[4, :32], x[5, :32] = 0, 1.5 * scale, -scale
            theirs = gguf_quantize(x, gguf.GGMLQuantizationType[type_.upper()])
            ours = encode(x, type_.upper())
            assert np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()


def test_bfloat16_rounds_to_even_and_keeps_infinities_and_nan() -> None:
    x = np.array([[1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, -0.0, 1e-45]], np.float32)
    ours = encode(x, "BF16")
    assert (ours == torch.tensor(x).bfloat16().view(torch.uint16).numpy())[0, [0, 1, 2, 3, 5, 6, 7]].all()
    assert np.isnan((ours.astype(np.uint32) << 16).view(np.float32)[0, 4])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("type_", ["f16", "q4_1"])
def test_the_gguf_package_reads_the_tensors_and_the_metadata(tmp_path: Path, name: str, type_: str) -> None:
    model = scrambled(CONFIGS[name])
    model.tokenizer = bpe()
    model.tokenizer.chat_template = "{{ messages }}é"
    counts = export_model(model, tmp_path / "model.gguf", type_)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert sum(counts.values()) == len(tensors) == len(model.params)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {kind for theirs, kind in kinds.items() if "norm" in theirs or "bias" in theirs} == {"F32"}
    assert kinds["blk.1.ffn_down.weight"] == kinds["token_embd.weight"] == type_.upper()
    assert kinds.get("position_embd.weight", "F32") == "F32"
    table = tensors["token_embd.weight"]
    theirs = gguf_quantize(model.params[next(iter(model.params))], table.tensor_type)
    assert table.data.tobytes() == theirs.tobytes()
    fields = {key: field.contents() for key, field in reader.fields.items()}
    arch = model.config.model_type
    types = {key: [kind.name for kind in field.types] for key, field in reader.fields.items()}
    assert types[f"{arch}.block_count"] == types["tokenizer.ggml.eos_token_id"] == ["UINT32"]  # llama.cpp insists
    assert types["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]
    assert (fields["general.architecture"], fields[f"{arch}.block_count"]) == (arch, 2)
    assert fields["general.file_type"] == {"f16": 1, "q4_1": 3}[type_]
    assert fields[f"{arch}.context_length"] == model.config.n_positions
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == 305
    eos = model.tokenizer.size - 1
    assert fields["tokenizer.ggml.eos_token_id"] == fields["tokenizer.ggml.bos_token_id"] == eos
    assert fields["tokenizer.ggml.token_type"][eos - 1 : eos + 3] == [1, 3, 5, 5]
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == "{{ messages }}é"


def test_transformers_tokenizer_of_an_exported_file_gives_the_same_ids(tmp_path: Path) -> None:
    model = scrambled(LLAMA)
    model.tokenizer = bpe()
    export_model(model, tmp_path / "model.gguf")
    text = "the brown fox isn't it?  42\n日本"
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    read = onfoot.load(tmp_path / "model.gguf", engine="numpy").tokenizer
    assert read is not None
    assert theirs(text, add_special_tokens=False)["input_ids"] == read.encode(text) == model.tokenizer.encode(text)
    assert read.size == model.tokenizer.size < 305 and read.eos == "<|endoftext|>"


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_rope_scaling_is_kept(tmp_path: Path, kind: str) -> None:
    model = scrambled(replace(LLAMA, rope_theta=5e5, rope_scaling=RopeScaling(kind, 8.0)))
    export_model(model, tmp_path / "model.gguf")
    read = onfoot.load(tmp_path / "model.gguf", engine="numpy")
    assert read.config == model.config and read.tokenizer is None
    assert (read.logits(TOKENS) == model.logits(TOKENS)).all()


def test_several_end_tokens_are_kept(tmp_path: Path) -> None:
    model = scrambled(replace(LLAMA, eos_token_id=(7, 9), bos_token_id=3))
    export_model(model, tmp_path / "model.gguf")
    assert onfoot.load(tmp_path / "model.gguf", engine="numpy").config == model.config


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_base_from_a_gguf_file_keeps_its_blocks(tmp_path: Path, name: str, type_: str, quantized: bool) -> None:
    first, again = tmp_path / "first.gguf", tmp_path / "again.gguf"
    export_model(scrambled(CONFIGS[name]), first, type_.lower())
    model = onfoot.load(first, engine="numpy", quantized=quantized)
    export_model(model, again)
    ours, theirs = GgufFile(again), GgufFile(first)
    assert {n: e.type for n, e in ours.tensors.items()} == {n: e.type for n, e in theirs.tensors.items()}
    for theirs_name, entry in theirs.tensors.items():
        assert (ours._bytes(ours.tensors[theirs_name]) == theirs._bytes(entry)).all()
    changed = "model.norm.weight" if name == "llama" else "transformer.ln_f.weight"
    model.params[changed] = model.params[changed] * 2
    export_model(model, again)
    assert (onfoot.load(again, engine="numpy").params[changed] == model.params[changed]).all()


def test_a_model_quantised_in_memory_keeps_its_blocks(tmp_path: Path) -> None:
    for config in (LLAMA, CONFIGS["gpt2"]):
        model = scrambled(config)
        model.quantize("Q4_0")
        counts = export_model(model, tmp_path / "model.gguf")
        assert counts["Q4_0"] == len(model.quantized)
        read = onfoot.load(tmp_path / "model.gguf", engine="numpy", quantized=True)
        assert (read.logits(TOKENS) == model.logits(TOKENS)).all()
        export_model(model, tmp_path / "model.gguf", "f32")
        assert_close(onfoot.load(tmp_path / "model.gguf", engine="numpy").logits(TOKENS), model.logits(TOKENS), 1e-5)


def test_only_changed_weights_of_a_quantised_base_become_floats(tmp_path: Path) -> None:
    export_model(scrambled(LLAMA), tmp_path / "base.gguf", "q8_0")
    model = onfoot.load(tmp_path / "base.gguf", engine="numpy")
    model.add_lora(r=2, targets=["q_proj"])
    for name in sorted(model.trainable):
        model.params[name] = np.random.default_rng(1).normal(0, 0.3, model.params[name].shape)
    model.merge_adapter()
    export_model(model, tmp_path / "merged.gguf")
    types = {name: entry.type for name, entry in GgufFile(tmp_path / "merged.gguf").tensors.items()}
    assert {name for name, kind in types.items() if kind == "F16"} == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}
    read = onfoot.load(tmp_path / "merged.gguf", engine="numpy")
    assert_close(read.logits(TOKENS), model.logits(TOKENS), 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "GGUF cannot hold a gpt2 model with causal=False"),
        ({"lm_head_bias": True, "tie_word_embeddings": False}, "with lm_head_bias=True"),
        ({"qk_head_dim": 6}, "with qk_head_dim=6"),
        ({"head_dim": 6}, "with head_dim=6"),
        ({"activation_function": "relu"}, "with activation_function='relu'"),
    ],
)
def test_networks_that_gguf_does_not_have_are_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = onfoot.create(replace(CONFIGS["gpt2"], **change), engine="numpy")
    with pytest.raises(ValueError, match=message):
        export_model(model, tmp_path / "model.gguf")
    model.add_lora(r=2)
    with pytest.raises(ValueError, match=message):
        export_adapter(model, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_mistral_is_a_llama_file_unless_its_window_matters(tmp_path: Path) -> None:
    wide = scrambled(replace(LLAMA, model_type="mistral", sliding_window=40))
    export_model(wide, tmp_path / "wide.gguf")
    read = onfoot.load(tmp_path / "wide.gguf", engine="numpy")
    assert read.config.model_type == "llama" and (read.logits(TOKENS) == wide.logits(TOKENS)).all()
    narrow = scrambled(replace(LLAMA, model_type="mistral", sliding_window=5))
    with pytest.raises(ValueError, match="no sliding window for mistral: its window of 5 is less than the model's 40"):
        export_model(narrow, tmp_path / "narrow.gguf")
    assert not (tmp_path / "narrow.gguf").exists()


def test_what_cannot_be_exported_is_refused_and_an_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    model = scrambled(LLAMA)
    model.tokenizer = char_tokenizer(["abc"])
    with pytest.raises(ValueError, match="a tokenizer of the kind WordLevel cannot be stored in a GGUF file"):
        export_model(model, path)
    model.tokenizer = byte_tokenizer()
    model.params["model.norm.weight"] = model.params["model.norm.weight"] * 1e6  # norms are f32
    export_model(model, tmp_path / "fine.gguf", "f16")
    model.params["lm_head.weight"] = model.params["lm_head.weight"] * 1e6
    with pytest.raises(ValueError, match=r"output\.weight has values beyond ±65504, the range of f16; choose bf16"):
        export_model(model, path, "f16")
    with pytest.raises(ValueError, match="unknown type 'q3_k'; choose from f32, f16, bf16"):
        export_model(model, path, "q3_k")
    small = scrambled(replace(LLAMA, hidden_size=24, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"token_embd\.weight has rows of 24 numbers; Q8_0 needs a multiple of 32"):
        export_model(small, path, "q8_0")
    model.add_lora(r=2)
    with pytest.raises(ValueError, match="the adapter 'default' is not in the weights"):
        export_model(model, path)
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fine.gguf", "model.gguf"]


def test_an_adapter_has_llama_cpps_names_scales_and_row_order(tmp_path: Path) -> None:
    model, rng = scrambled(LLAMA), np.random.default_rng(0)
    model.add_lora(r=3, alpha=5, targets=["q_proj", "k_proj", "down_proj", "lm_head"])
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.3, model.params[name].shape)
    assert export_adapter(model, tmp_path / "adapter.gguf") == 7
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert (fields["general.type"], fields["adapter.type"], fields["adapter.lora.alpha"]) == ("adapter", "lora", 5.0)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == 14 and "output.weight.lora_a" in tensors
    a, b = tensors["blk.1.attn_k.weight.lora_a"], tensors["blk.1.attn_k.weight.lora_b"]
    assert a.shape == (3, 32) and b.shape == (16, 3)
    own = model.params["model.layers.1.self_attn.k_proj.lora_B.default.weight"]
    assert (b[[0, 2, 4, 6, 1, 3, 5, 7]] == own[:8]).all() and (b != own).any()
    down = model.params["model.layers.0.mlp.down_proj.lora_B.default.weight"]
    assert (tensors["blk.0.ffn_down.weight.lora_b"] == down).all()
    with pytest.raises(ValueError, match=r"is not a model: its general\.type is 'adapter'"):
        onfoot.load(tmp_path / "adapter.gguf")


def test_layers_of_another_scale_have_it_in_their_b(tmp_path: Path) -> None:
    """llama.cpp has one alpha for all layers, and none for rank stabilisation."""
    model = scrambled(CONFIGS["gpt2"])
    model.add_lora(r=4, alpha=6, targets=["c_attn.q", "c_attn.v", "c_fc"], use_rslora=True)
    for name in sorted(model.trainable):
        model.params[name] = np.random.default_rng(0).normal(0, 0.3, model.params[name].shape)
    export_adapter(model, tmp_path / "adapter.gguf")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    alpha = reader.fields["adapter.lora.alpha"].contents()
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    before = {name: np.array(value) for name, value in model.params.items()}
    model.merge_adapter()
    for layer, name in (("attn_qkv", "attn.c_attn"), ("ffn_up", "mlp.c_fc")):
        a, b = (tensors[f"blk.1.{layer}.weight.lora_{side}"] for side in "ab")
        added = model.params[f"transformer.h.1.{name}.weight"] - before[f"transformer.h.1.{name}.weight"]
        assert_close((alpha / len(a) * b @ a).T, added, 1e-5)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    model = scrambled(CONFIGS["gpt2"])
    model.add_lora(r=2, targets=["lm_head"])
    with pytest.raises(ValueError, match=r"llama\.cpp cannot adapt lm_head, which shares its weight"):
        export_adapter(model, tmp_path / "adapter.gguf")
    with pytest.raises(ValueError, match="no adapter 'other' to export; the model has: default"):
        export_adapter(model, tmp_path / "adapter.gguf", "other")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_pre_tokenizer_is_recognised(tmp_path: Path, pre: str) -> None:
    tokenizer = read_tokenizer(metadata_of(pre), tmp_path)
    tokenizer.save(tmp_path, 64)
    model = scrambled(LLAMA)
    for model.tokenizer in (tokenizer, Tokenizer.load(tmp_path)):
        export_model(model, tmp_path / "x.gguf")
        found = GgufFile(tmp_path / "x.gguf").metadata
        assert found["tokenizer.ggml.pre"] == pre
        assert found["tokenizer.ggml.merges"] == metadata_of(pre)["tokenizer.ggml.merges"]
        assert found["tokenizer.ggml.add_bos_token"] is (pre == "llama-bpe")
        read = onfoot.load(tmp_path / "x.gguf", engine="numpy").tokenizer
        assert read is not None and (read.bos, read.eos) == ("<|im_start|>", "<|im_end|>")
        text = "It's 12345 x   y<|im_end|>é"
        assert read.encode(text) == tokenizer.encode(text)


def test_a_pre_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    model = scrambled(LLAMA)
    for part, value in (
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("normalizer", normalizers.Lowercase()),
    ):
        model.tokenizer = bpe()
        setattr(model.tokenizer.backend, part, value)
        with pytest.raises(ValueError, match="its normalizer and pre-tokenizer are none that a GGUF file can name"):
            export_model(model, tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A base in base/, and an adapter of it in adapter/."""
    model = scrambled(LLAMA)
    model.tokenizer = bpe()
    model.save(tmp_path / "base")
    model = onfoot.load(tmp_path / "base", engine="numpy")
    model.add_lora(r=2, targets=["q_proj", "v_proj"])
    for name in sorted(model.trainable):
        model.params[name] = np.random.default_rng(0).normal(0, 0.3, model.params[name].shape)
    model.save_adapter(tmp_path / "adapter")
    return tmp_path


def test_the_command_exports_a_model_and_its_adapter(folders: Path) -> None:
    base, adapter = folders / "base.gguf", folders / "adapter.gguf"
    out = run("export", folders / "base", "--gguf", base, "--type", "q8_0", "--ollama")
    assert "21 tensors (5 F32, 16 Q8_0)" in out.replace("\n", "")
    lines = (folders / "Modelfile").read_text().splitlines()
    assert lines == ["FROM ./base.gguf", 'TEMPLATE """{{ .Prompt }}"""', 'PARAMETER stop "<|endoftext|>"']
    assert "exists; overwrite it with --force" in run("export", folders / "base", "--gguf", base, code=2)
    out = run("export", base, "--adapter", folders / "adapter", "--gguf", adapter, "--ollama", "--force")
    assert "4 LoRA layers" in out.replace("\n", "")
    lines = (folders / "Modelfile").read_text().splitlines()
    assert lines[:2] == ["FROM ./base.gguf", "ADAPTER ./adapter.gguf"]
    refused = run("export", folders / "adapter", "--gguf", folders / "x.gguf", code=2)
    assert "is an adapter; export it with --adapter" in refused.replace("\n", "")
    for name, message in (("x.bin", "must end in .gguf"), ("none/x.gguf", "does not exist")):
        assert message in run("export", folders / "base", "--gguf", folders / name, code=2).replace("\n", "")
    assert not (folders / "x.gguf").exists()


def test_chatml_becomes_ollamas_template(folders: Path) -> None:
    from onfoot.formats.chat import CHATML

    (folders / "base" / "chat_template.jinja").write_text(CHATML)
    run("export", folders / "base", "--gguf", folders / "chat.gguf", "--ollama")
    text = (folders / "Modelfile").read_text()
    assert "<|im_start|>user\n{{ .Prompt }}<|im_end|>\n" in text and 'PARAMETER stop "<|im_end|>"' in text
    default = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    (folders / "base" / "chat_template.jinja").write_text(default + CHATML)
    run("export", folders / "base", "--gguf", folders / "chat.gguf", "--ollama", "--force")
    assert 'SYSTEM """Be kind."""' in (folders / "Modelfile").read_text().splitlines()
    (folders / "base" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    run("export", folders / "base", "--gguf", folders / "chat.gguf", "--ollama", "--force")
    text = (folders / "Modelfile").read_text()
    assert "TEMPLATE" not in text and 'PARAMETER stop "]"' in text


def test_merge_writes_a_gguf_file_or_nothing(folders: Path) -> None:
    out = folders / "merged.gguf"
    run("merge", folders / "base", "--adapter", folders / "adapter", "--out", out)
    merged = onfoot.load(folders / "base", engine="numpy")
    merged.load_adapter(folders / "adapter")
    assert_close(onfoot.load(out, engine="numpy").logits(TOKENS), merged.logits(TOKENS), 1e-5)
    whole = out.read_bytes()
    refused = run("merge", folders / "base", "--adapter", folders / "adapter", "--out", out, code=2)
    assert "exists" in refused and out.read_bytes() == whole
    other = onfoot.create(replace(CONFIGS["gpt2"], activation_function="relu"), engine="numpy")
    other.save(folders / "relu")
    other.add_lora(r=2)
    other.save_adapter(folders / "relu-adapter")
    run("merge", folders / "relu", "--adapter", folders / "relu-adapter", "--out", folders / "relu.gguf", code=2)
    assert not (folders / "relu.gguf").exists()
    folder = run(
        "merge", folders / "base", "--adapter", folders / "adapter", "--out", folders / "m", "--type", "f16", code=2
    )
    assert "--type is for GGUF files" in folder.replace("\n", "") and not (folders / "m").exists()


def test_a_model_is_named_after_its_file_folder_or_run(tmp_path: Path) -> None:
    scrambled(LLAMA).save(tmp_path / "mine" / "checkpoints" / "step-0000001")
    scrambled(LLAMA).save(tmp_path / "other")
    for folder, name in (("mine/checkpoints/step-0000001", "mine"), ("other", "other")):
        export_model(onfoot.load(tmp_path / folder, engine="numpy"), tmp_path / "x.gguf")
        assert GgufFile(tmp_path / "x.gguf").metadata["general.name"] == name
    export_model(onfoot.load(tmp_path / "x.gguf", engine="numpy"), tmp_path / "again.gguf")
    assert GgufFile(tmp_path / "again.gguf").metadata["general.name"] == "other"  # as in the file it came from


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_default_type_is_that_of_the_models_files(tmp_path: Path, dtype: str) -> None:
    scrambled(LLAMA).save(tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "stored")
    counts = export_model(onfoot.load(tmp_path / "stored", engine="numpy"), tmp_path / "model.gguf")
    assert set(counts) == {"F32", {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[dtype]}
