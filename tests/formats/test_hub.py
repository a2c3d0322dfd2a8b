"""Names on the Hugging Face Hub: found in the local cache, fetched only on request. Nothing here uses the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

import onfoot
from onfoot.formats import hub
from onfoot.formats.tokenizer import byte_tokenizer

CONFIG = onfoot.LlamaConfig(
    vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=24, model_type="qwen3",
)  # fmt: skip
TOKENS = np.array([[1, 2, 3, 4]])
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def saved(folder: Path, seed: int = 0) -> onfoot.models.model.Model:
    model = onfoot.create(CONFIG, seed)
    model.tokenizer = byte_tokenizer()
    model.save(folder)
    return model


def put(cache: Path, name: str, files: Path) -> Path:
    """A repository in the layout of the Hub's cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(REVISION)
    folder = repository / "snapshots" / REVISION
    shutil.copytree(files, folder, dirs_exist_ok=True)
    return folder


def test_a_name_is_found_in_the_cache(cache: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "files")
    put(cache, "org/tiny-model_1.5", tmp_path / "files")
    read = onfoot.load("org/tiny-model_1.5")
    assert read.config.model_type == "qwen3" and read.tokenizer is not None
    np.testing.assert_array_equal(read.logits(TOKENS), model.logits(TOKENS))


def test_a_local_folder_of_that_name_wins(cache: Path, tmp_path: Path) -> None:
    saved(tmp_path / "files", 0)
    put(cache, "org/tiny", tmp_path / "files")
    local = saved(tmp_path / "org" / "tiny", 1)
    for download in (False, True):
        np.testing.assert_array_equal(onfoot.load("org/tiny", download=download).logits(TOKENS), local.logits(TOKENS))


def test_a_name_that_is_not_cached_says_how_it_is_fetched(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"org/none is not a folder, and not in the cache .* --download .*download=True"
    ):
        onfoot.load("org/none")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    put(cache, "org/partly", tmp_path / "files")  # others cache the configuration alone
    with pytest.raises(ValueError, match="org/partly is not a folder, and not in the cache"):
        onfoot.load("org/partly")


@pytest.mark.parametrize("name", ["a/b/c", "/a/b", "../b", "a/..", "./b", "name", "org/na me", "org/", "örg/x"])
def test_other_paths_are_not_names(cache: Path, name: str) -> None:
    assert not hub.is_hub_name(name)
    assert hub.local_folder(name) == Path(name)
    with pytest.raises(ValueError, match="it is not a name on the Hugging Face Hub, such as org/name"):
        hub.fetch("x y")


def test_only_what_is_read_is_downloaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path / "files")
    offered = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "README.md",
        "original/model.pth",
        "modeling.py",
        "x.gguf",
    ]
    for name in offered:
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_text("x")
    asked: list[Any] = []
    found = huggingface_hub.snapshot_download

    def fake(name: str, *, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        asked.append((name, local_files_only))
        if local_files_only:
            return found(name, local_files_only=True)
        chosen = tmp_path / "chosen"
        chosen.mkdir()
        for file in (tmp_path / "files").rglob("*"):
            path = str(file.relative_to(tmp_path / "files"))
            if file.is_file() and any(fnmatch(path, pattern) for pattern in allow_patterns):
                shutil.copy(file, chosen / file.name)
        return str(put(cache, name, chosen))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    read = onfoot.load("org/tiny", download=True)
    np.testing.assert_array_equal(read.logits(TOKENS), model.logits(TOKENS))
    assert asked == [("org/tiny", False)]
    assert sorted(p.name for p in (tmp_path / "chosen").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    onfoot.load("org/tiny")  # from the cache
    assert asked[1:] == [("org/tiny", True)]


def test_a_failed_download_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise RuntimeError("no route\nto the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ValueError, match=r"^cannot download org/tiny from the Hugging Face Hub: no route.*$"):
        onfoot.load("org/tiny", download=True)


def test_without_the_package_its_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'org/tiny is not a folder; .* pip install "onfoot\[hub\]", then --download'):
        onfoot.load("org/tiny")
    with pytest.raises(ValueError, match=r'cannot download org/tiny: .* pip install "onfoot\[hub\]"'):
        onfoot.load("org/tiny", download=True)


def test_an_adapters_base_may_be_a_name(cache: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "files")
    put(cache, "org/tiny", tmp_path / "files")
    model.add_lora(r=2)
    model.source = "org/tiny"
    model.save_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(onfoot.load(tmp_path / "adapter").logits(TOKENS), model.logits(TOKENS), rtol=1e-6)


def test_the_commands_use_the_cache_and_never_the_network(tmp_path: Path) -> None:
    saved(tmp_path / "files")
    put(tmp_path / "hub", "org/tiny", tmp_path / "files")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "onfoot", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, out = run("info", "org/tiny")
    assert code == 0 and "qwen3" in out, out
    code, out = run("info", "org/none")
    assert code == 2 and out.startswith("error: org/none is not a folder, and not in the cache"), out
    code, out = run("info", "org/none", "--download")
    assert code == 2 and "error: cannot download org/none from the Hugging Face Hub: " in out, out
