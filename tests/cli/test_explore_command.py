"""`onfoot explore`: the exported page has the given text or ids; wrong input is refused with the way out."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli.explore import _load, _opening


def export(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(app, ["explore", *arguments, "--export", str(path)])
    assert result.exit_code == 0, result.output
    (data,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(data), result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "model"
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9, activation_function="relu")
    onfoot.create(config, 0).save(path)
    return path


def test_ids_are_run_as_ids_and_the_size_is_in_megabytes(folder: Path, tmp_path: Path) -> None:
    data, output = export(tmp_path / "page.html", str(folder), "--tokens", "1 2 3 2")
    assert data["opening"] == {"kind": "ids", "value": "1 2 3 2", "ids_only": True}
    assert [token["id"] for token in data["document"]["tokens"]] == [1, 2, 3, 2]
    model = onfoot.load(folder, "float64")
    assert data["document"]["loss"] == pytest.approx(model.loss(np.array([[1, 2, 3, 2]])), rel=1e-12)
    assert f"{(tmp_path / 'page.html').stat().st_size / 1e6:.1f} MB" in output.replace("\n", " ")


def test_the_default_opens_with_its_own_text() -> None:
    from onfoot.explore.default_model import TEXT

    assert _opening(_load(None), None, None, None) == {"kind": "text", "value": TEXT, "ids_only": False}
    assert TEXT == "the value of the value"


def test_an_adapter_is_in_the_weights_that_are_shown(folder: Path, tmp_path: Path) -> None:
    base = onfoot.load(folder, "float64")
    base.add_lora(r=1, targets=["c_fc"])
    for name in base.trainable:
        base.params[name] = np.random.default_rng(0).normal(0, 1, base.params[name].shape)
    base.save_adapter(tmp_path / "adapter")
    shown = _load(tmp_path / "adapter")
    assert shown.active_adapter is None
    name = "transformer.h.0.mlp.c_fc.weight"
    layer = "transformer.h.0.mlp.c_fc"
    adapter = next(iter(base.adapters.values()))
    down, up = base.params[adapter.down(layer)], base.params[adapter.up(layer)]
    scale = adapter.layers[layer].scale
    np.testing.assert_allclose(shown.params[name], base.params[name] + scale * (up @ down).T, rtol=1e-10)


def test_sizes_are_bytes_not_characters(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.explore.page.export", lambda *_: "Δ" * 3_000_000)
    typed = ["explore", str(folder), "--tokens", "1 2", "--export", str(tmp_path / "page.html")]
    assert "6.0 MB" in CliRunner().invoke(app, typed).output.replace("\n", " ")


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explore", "--no-browser", *arguments])
    assert result.exit_code == 2
    return result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", " "], "the text is empty; at least two tokens are needed"),
        (["--text", "a name " * 20], "140 tokens exceed the limit of 64; shorten the text"),
        (["--text", "a name " * 3000], "21,000 characters, the limit is 4,000"),
        (["--text", "größe"], "the character 'ö' is not in this character tokenizer's vocabulary"),
        (["--tokens", "1 99"], "token id must be between 0 and 36, got 99"),
        (["--text", "a name", "--tokens", "1 2"], "give --text or --tokens, not both"),
        (["gpt3"], "gpt3 not found; give a model's folder, a GGUF file or smollm2"),
    ],
)
def test_wrong_input_is_refused_before_a_server_starts(arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)


def test_a_text_for_a_model_without_a_tokenizer_is_refused_with_the_option_that_works(folder: Path) -> None:
    assert "has no tokenizer, so it cannot read --text; give token ids: --tokens" in refusal(str(folder), "--text", "a")


def test_a_port_in_use_and_a_missing_tour_are_found_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.explore.loading.load_model", lambda folder: pytest.fail("the model is read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot bind port {port}: Address already in use; choose another" in refusal("--port", str(port))
    assert "cannot read the tour nosuch.txt" in refusal("--tour", "nosuch.txt")
