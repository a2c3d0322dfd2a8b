"""`onfoot info` on GGUF files and on grouped queries."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from info_output import info, row
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.gguf_model import gguf_name
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step

CONFIG = onfoot.LlamaConfig(
    vocab_size=300, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("info") / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in {
        "context_length": 4096, "embedding_length": 96, "block_count": 3, "feed_forward_length": 160,
        "attention.head_count": 6, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_eos_token_id(3)
    for name, value in onfoot.create(CONFIG, engine="numpy").params.items():
        kind = gguf.GGMLQuantizationType["Q4_0" if "mlp" in name else "Q8_0" if value.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(np.asarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_info_opens_gguf_files(file: Path) -> None:
    output = info(file)
    reader = gguf.GGUFReader(str(file))
    n = sum(int(np.prod(t.shape)) for t in reader.tensors)
    assert row(output, "file").replace("\n", "") == str(file)
    assert row(output, "architecture") == "llama"
    assert row(output, "parameters") == f"{n:,}"
    assert row(output, "blocks") == "3" and row(output, "hidden size") == "96"
    assert row(output, "heads") == "6 of size 16, 2 key/value heads"
    assert row(output, "positions") == "4,096" and row(output, "vocabulary") == "300"
    assert row(output, "tensors") == f"{len(reader.tensors)}, F32, Q4_0, Q8_0, {n:,} elements"
    assert row(output, "tokenizer") == "4 tokens, eos '<end>'"
    assert row(output, "MLP hidden size") == "160, swiglu"
    listed = info(file, "--tensors")
    for tensor in reader.tensors:
        shape = " × ".join(str(d) for d in reversed(tensor.shape.tolist()))
        assert re.search(rf"^{re.escape(tensor.name)} +{shape} +{tensor.tensor_type.name}$", listed, re.MULTILINE)


def test_memory_is_planned_for_gguf_files_too(file: Path, tmp_path: Path) -> None:
    onfoot.load(file).save(tmp_path / "folder")
    options = ("--memory", "--batch-size", 2, "--tokens", 64)
    assert info(file, *options) == info(tmp_path / "folder", *options)


def test_the_kv_cache_is_as_large_as_the_one_that_generation_makes(file: Path, tmp_path: Path) -> None:
    model = onfoot.load(file)
    model.save(tmp_path / "folder")
    cache = KVCache(10)
    step(model, np.array([[1, 2, 3]]), np.zeros(1, np.int64), cache)
    per_token = cache.n_numbers // 10
    for where in (file, tmp_path / "folder"):
        shown = row(info(where), "KV cache")
        assert shown.startswith(f"{per_token:,} elements per token")
        assert f"{4 * per_token * 4096 / 2**20:,.1f} MiB" in shown


def test_a_gguf_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(9))
    result = CliRunner().invoke(app, ["info", str(tmp_path / "x.gguf")])
    assert result.exit_code == 2 and result.output.count("\n") == 1 and "x.gguf" in result.output
