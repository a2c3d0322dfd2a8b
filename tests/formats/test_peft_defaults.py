"""Options missing in an adapter's file have PEFT's defaults; invalid ones are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import onfoot
from onfoot.formats.peft import read_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about layouts
CONFIG = onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=3)
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 9))


def adapter(tmp_path: Path, r: int = 8) -> Path:
    """The folder of an adapter with weights away from their initial values; its base is next to it."""
    model = onfoot.create(CONFIG, dtype="float64", engine="numpy")
    model.save(tmp_path / "base")
    model = onfoot.load(tmp_path / "base", "float64", "numpy")
    model.add_lora(r=r, alpha=5, targets=["c_attn", "c_fc"])
    rng = np.random.default_rng(1)
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.3, model.params[name].shape)
    model.save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(folder: Path, leave_out: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "adapter_config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in leave_out}))


@pytest.mark.parametrize(
    "missing", [("lora_alpha",), ("r",), ("lora_alpha", "r", "lora_dropout", "use_rslora")], ids=str
)
def test_missing_options_have_pefts_defaults(tmp_path: Path, missing: tuple[str, ...]) -> None:
    folder = adapter(tmp_path)
    edit(folder, leave_out=missing)
    defaults = LoraConfig()
    config = read_config(folder)
    for name in missing:
        assert config[name] == getattr(defaults, name), name
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = onfoot.load(folder, "float64", "numpy").logits(TOKENS)
    assert np.abs(ours - expected).max() < 1e-9
    assert np.abs(ours - onfoot.load(tmp_path / "base", "float64", "numpy").logits(TOKENS)).max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [{"r": 0}, {"r": "8"}, {"r": 2**40}, {"r": True}, {"lora_alpha": "8"}, {"lora_alpha": float("nan")},
     {"lora_alpha": 0},
     {"lora_alpha": [8]}, {"lora_alpha": 10**400}, {"lora_dropout": 1.5}, {"lora_dropout": "0"}, {"use_rslora": "no"},
     {"rank_pattern": [1]}, {"rank_pattern": {"c_fc": "2"}}, {"alpha_pattern": {"c_fc": None}}, {"peft_type": ["LORA"]},
     {"rank_pattern": {"(": 2}}, {"init_lora_weights": {"a": 1}}, {"bias": "x\ny"}, {"x\ny": 1}],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = adapter(tmp_path)
    edit(folder, **changes)
    with pytest.raises(ValueError, match=r"adapter_config\.json") as caught:
        onfoot.load(folder, engine="numpy")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(a+)+x", "(.*)*x", ".*.*.*.*.*.*.*.*.*.*x", "([a-z]+)*x", "(a|aa)+x"])
def test_patterns_that_could_take_forever_are_rejected(tmp_path: Path, pattern: str) -> None:
    folder = adapter(tmp_path)
    edit(folder, alpha_pattern={pattern: 2})
    with pytest.raises(ValueError, match=r"adapter_config\.json: alpha_pattern: pattern .* is too complex"):
        onfoot.load(folder, engine="numpy")


def tensors_changed(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    name = "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight"
    whole = load_file(folder / "adapter_model.safetensors")
    for change, message in (
        (lambda t: t.update({name: t[name].astype(np.int64)}), "has dtype 'I64'"),
        (lambda t: t.update({name: t[name][:, :5].copy()}), r"has shape \(8, 5\)"),
        (lambda t: t.update({name.removeprefix("base_model.model."): t[name]}), "for the same layer"),
        (lambda t: t.update({"x\ny": t[name]}), r"x\\ny.* is not a LoRA tensor"),
        (lambda t: t.pop(name), r"c_fc\.lora_A\.weight is missing"),
    ):
        save_file(whole, folder / "adapter_model.safetensors")
        tensors_changed(folder, change)
        with pytest.raises(ValueError, match=message) as caught:
            onfoot.load(folder, engine="numpy")
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_of_other_shapes_is_not_restored(tmp_path: Path) -> None:
    from onfoot.formats.peft import restore_adapter

    folder = adapter(tmp_path)
    model = onfoot.load(tmp_path / "base", "float64", "numpy")
    model.add_lora(r=4, alpha=5, targets=["c_attn", "c_fc"])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: .* this run expects \(4, 12\)"):
        restore_adapter(model, folder)
    tensors_changed(folder, lambda t: t.pop("base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight"))
    model = onfoot.load(tmp_path / "base", "float64", "numpy")
    model.add_lora(r=8, alpha=5, targets=["c_attn", "c_fc"])
    with pytest.raises(ValueError, match=r"c_fc\.lora_A\.weight is missing"):
        restore_adapter(model, folder)


def test_a_dtype_with_a_newline_gives_a_one_line_error(tmp_path: Path) -> None:
    path = adapter(tmp_path) / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"F64"', b'"F6\\n"')
    assert b"F6" in header
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors") as caught:
        onfoot.load(path.parent, engine="numpy")
    assert "\n" not in str(caught.value)
