"""A bfloat16 base from file to merged file, through the commands; PEFT loads the adapter folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from info_output import info, row
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import onfoot
from llama_oracle import scrambled_llama
from onfoot.cli import app
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from oracles import assert_close

CONFIG = onfoot.LlamaConfig(
    vocab_size=260, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, max_position_embeddings=64, bos_token_id=256, eos_token_id=256,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 12))
ASK = ("--prompt", "ab", "--max-new-tokens", 5, "--temperature", 0)


def run(*arguments: Any, fails: bool = False) -> str:
    result = CliRunner().invoke(app, [str(x) for x in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 base, and a run that fine-tuned it."""
    path = tmp_path_factory.mktemp("sixteen")
    model = scrambled_llama(CONFIG, 0, "float32")
    model.tokenizer = byte_tokenizer()
    model.save(path / "base", "bfloat16")
    (path / "base" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    lines = [json.dumps({"prompt": f"{i}:", "completion": f"{i * i}"}) for i in range(12)]
    (path / "data.jsonl").write_text("\n".join(lines))
    run(
        "finetune",
        path / "base",
        "--data",
        path / "data.jsonl",
        "--out",
        path / "run",
        "--r",
        2,
        "--steps",
        4,
        "--lr",
        0.05,
    )
    return path


def test_a_run_keeps_the_base_in_16_bits_and_equals_one_in_float32(folder: Path) -> None:
    options = json.loads((folder / "run" / "run.json").read_text())
    assert "auto" in json.dumps(options)
    run(
        "finetune", folder / "base", "--data", folder / "data.jsonl", "--out", folder / "floats", "--r", 2, "--steps",
        4, "--lr", 0.05, "--dtype", "float32",
    )  # fmt: skip
    half, floats = (TensorFile(folder / run / "best" / "adapter_model.safetensors") for run in ("run", "floats"))
    for name in floats:
        assert_close(half[name], floats[name], 1e-5, name)
    assert "is complete" in run("finetune", "--resume", folder / "run")
    assert run("generate", folder / "run", *ASK) == run("generate", folder / "run", *ASK, "--dtype", "float32")


def test_pefts_auto_class_finds_the_base_and_the_tokenizer(folder: Path) -> None:
    adapter = folder / "run" / "best"
    theirs = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    with torch.no_grad():
        right = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    ours = onfoot.load(adapter, dtype="auto")
    assert ours.active_adapter is not None and ours.quantized
    assert_close(ours.logits(TOKENS), right, 1e-5)
    base = onfoot.load(folder / "base")
    assert np.abs(base.logits(TOKENS) - right).max() > 1e-3  # the adapter does something
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str((folder / "base").resolve())
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert tokenizer("to be")["input_ids"] == base.tokenizer.encode("to be")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"


@pytest.mark.parametrize(
    ("options", "dtype"), [((), "BF16"), (("--dtype", "float32"), "F32"), (("--dtype", "float16"), "F16")]
)
def test_a_merged_model_has_the_dtype_of_its_base_or_the_one_asked_for(
    options: tuple[str, ...], dtype: str, folder: Path, tmp_path: Path
) -> None:
    run("merge", folder / "run", "--out", tmp_path / "merged", *options)
    tensors = TensorFile(tmp_path / "merged" / "model.safetensors")
    assert {tensors.dtype(name) for name in tensors} == {dtype}
    names = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == names[dtype]
    exact = onfoot.load(folder / "run", "float64", "numpy").logits(TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        merged = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    assert_close(merged, exact, {"BF16": 2e-2, "F32": 1e-5, "F16": 2e-3}[dtype])


def test_merge_refuses_before_it_writes(folder: Path, tmp_path: Path) -> None:
    for options, message in (
        (("--out", tmp_path / "x.gguf", "--dtype", "float16"), "--dtype is for model folders"),
        (("--out", tmp_path / "x", "--dtype", "int4"), "unknown dtype 'int4'"),
    ):
        assert message in " ".join(run("merge", folder / "run", *options, fails=True).split())
    assert not any(tmp_path.iterdir())


def test_info_shows_types_sizes_and_the_tokenizer_of_what_load_takes(folder: Path) -> None:
    base = info(folder / "base")
    size = (folder / "base" / "model.safetensors").stat().st_size
    assert ", BF16, " in row(base, "tensors") and row(base, "file size") == f"{size / 1e6:,.1f} MB"
    adapter = folder / "run" / "best"
    for output in (info(adapter), info(folder / "run")):
        assert row(output, "tensors") == "28, F32" and row(output, "tokenizer") == "257 tokens, eos '<|endoftext|>'"
    assert "lora_A.weight" in info(adapter, "--tensors") and "lora_A.weight" not in info(adapter)


def test_memory_is_planned_with_the_base_in_16_bits(folder: Path, tmp_path: Path) -> None:
    onfoot.load(folder / "base").save(tmp_path / "floats")
    options = ("--memory", "--lora", 2, "--batch-size", 1, "--tokens", 16)
    half, floats = info(folder / "base", *options), info(tmp_path / "floats", *options)
    assert "float32, base in 16 bits" in half and "16 bits" not in floats
    assert "16 bits" not in info(folder / "base", "--memory", "--tokens", 16)  # all weights train, in float32
