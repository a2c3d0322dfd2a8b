"""`onfoot curvature`: what it prints is what was measured; texts, examples, adapters; and clear errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app, curvature_picture
from onfoot.cli.curvature_picture import picture
from onfoot.curvature import measure
from onfoot.data.file_batches import read_batches
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.load import load
from onfoot.models.model import Model
from onfoot.plots import png
from pages import page_blocks

TEXT = "to be, or not to be: that is the question.\n" * 3 + "to"  # 131 tokens
BYTES = byte_tokenizer()
EXAMPLES = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}."} for n in range(7)]
FAST = ("--top", "2", "--probes", "3", "--steps", "12", "--dtype", "float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter of it, and data."""
    folder = tmp_path_factory.mktemp("curvature")
    model = onfoot.create(onfoot.GPT2Config(257, 32, 32, 2, 2, n_inner=32), seed=3)
    model.tokenizer = BYTES
    model.save(folder / "model")
    tuned = load(folder / "model")
    tuned.add_lora(r=2, alpha=2, targets=["c_attn"])
    for name in tuned.trainable:
        tuned.params[name] = np.random.default_rng(4).normal(0, 0.1, tuned.params[name].shape)
    tuned.save_adapter(folder / "adapter")
    (folder / "text.txt").write_text(TEXT)
    (folder / "examples.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EXAMPLES))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abcde", "xyz")))
    return folder


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["curvature", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["curvature", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


def batches_of(folder: Path, file: str, **options: Any) -> Any:
    return read_batches(folder / file, BYTES, ChatTemplate(), 32, **options)


def test_json_has_every_number_of_the_measurement(folder: Path) -> None:
    data = json.loads(run(folder / "model", "--data", folder / "text.txt", *FAST, "--batches", 1, "--batch-size", 2,
                          "--context", 16, "--seed", 5, "--format", "json"))  # fmt: skip
    model = load(folder / "model", "float64")
    found = batches_of(folder, "text.txt", context=16, batch_size=2, batches=1, seed=5)
    assert [r["kind"] for r in data["results"]] == ["hessian", "gauss-newton"]
    assert data["data"] == "2 of 9 rows of text.txt"
    for got in data["results"]:
        expected = measure(model, found.batches, got["kind"], top=2, probes=3, steps=12, seed=5)
        assert got["loss"] == expected.loss and got["max_lr"] == expected.max_lr
        assert got["spectrum"]["largest"] == [{"value": e.value, "error": e.error} for e in expected.spectrum.largest]
        assert len(got["spectrum"]["smallest"]) == len(expected.spectrum.smallest)
        assert got["trace"]["value"] == expected.trace.value and got["along_gradient"] == expected.along_gradient
        assert [layer["name"] for layer in got["layers"]] == ["wte", "wpe", "block 0", "block 1", "ln_f"]
        assert [layer["largest"]["value"] for layer in got["layers"]] == [e.largest.value for e in expected.layers]


def test_the_tables_show_the_numbers_of_the_json(folder: Path) -> None:
    arguments = (folder / "model", "--data", folder / "text.txt", *FAST, "--context", 16, "--kind", "hessian")
    (result,) = json.loads(run(*arguments, "--format", "json"))["results"]
    for output in ("rich", "markdown"):
        out = run(*arguments, "--format", output)
        assert f"{result['trace']['value']:.4g} ± {result['trace']['error']:.0f}" in out  # 150 and not 1.5e+02
        for value in (*result["spectrum"]["largest"], *result["spectrum"]["smallest"]):
            assert f"{value['value']:.4g} ± {value['error']:.2g}" in out
        assert f"{result['along_gradient']:.4g}" in out and "block 1" in out and "Gauss" not in out
        assert f"loss {result['loss']:.6f}" in out and "9 of 9 rows of text.txt, 130 targets" in out
    assert f"plain gradient descent is stable for lr < 2/λ_max = {result['max_lr']:.4g}" in run(*arguments)


def test_a_limit_of_steps_is_said(folder: Path) -> None:
    arguments = (folder / "model", "--data", folder / "text.txt", "--top", 2, "--probes", 0, "--no-per-layer")
    out = run(*arguments, "--steps", 3)
    assert "3 (limit)" in out and "the limit of --steps was reached" in out
    assert "Layers" not in out and "–" in out  # no layers, no trace


def test_examples_count_their_completions_only(folder: Path) -> None:
    (result,) = json.loads(
        run(folder / "model", "--data", folder / "examples.jsonl", *FAST, "--kind", "gauss-newton", "--format", "json")
    )["results"]
    assert result["n_targets"] == sum(len(e["completion"]) + 1 for e in EXAMPLES)  # and the end of each
    assert result["spectrum"]["smallest"] == []


def test_an_adapter_is_measured_alone_on_a_quantised_base_too(folder: Path) -> None:
    model = (folder / "model", "--adapter", folder / "adapter", "--data", folder / "examples.jsonl")
    options = ("--top", 1, "--probes", 0, "--kind", "hessian", "--format", "json")
    (exact,) = json.loads(run(*model, *options))["results"]
    assert exact["n_params"] == 2 * (2 * 32 + 2 * 96)
    assert [layer["name"] for layer in exact["layers"]] == ["block 0", "block 1"]
    (rounded,) = json.loads(run(*model, *options, "--quantized"))["results"]
    largest = [r["spectrum"]["largest"][0]["value"] for r in (exact, rounded)]
    assert largest[0] != largest[1]
    assert largest[0] == pytest.approx(largest[1], rel=0.1)


def test_the_plot_is_a_picture_of_both_panels(folder: Path, tmp_path: Path) -> None:
    from matplotlib import image

    widths = []
    for flag in ("--per-layer", "--no-per-layer"):
        path = tmp_path / f"{flag[2:]}.png"
        out = run(folder / "model", "--data", folder / "text.txt", *FAST, flag, "--plot", path)
        assert f"picture {path}" in out
        widths.append(image.imread(path).shape[1])
    assert widths == [1200, 720]


def test_the_picture_has_a_point_per_eigenvalue_and_a_bar_per_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(curvature_picture, "png", lambda figure: drawn.append(figure) or png(figure))  # type: ignore[func-returns-value]
    model, found = load(folder / "model", "float64"), batches_of(folder, "text.txt", context=16)
    results = [measure(model, found.batches, kind, top=3, probes=0, steps=12) for kind in ("hessian", "gauss-newton")]
    assert picture(results).startswith(b"\x89PNG")
    left, right = drawn[0].axes
    points = [tuple(round(y, 9) for y in container.lines[0].get_ydata()) for container in left.containers]
    ends = [e for r in results for e in (r.spectrum.largest, r.spectrum.smallest)]
    assert points == [tuple(round(e.value, 9) for e in end) for end in ends]
    assert [label.get_text().replace("−", "-") for label in left.get_xticklabels()] == ["1", "2", "3", "-3", "-2", "-1"]
    bars = [bar.get_width() for container in right.containers if hasattr(container, "patches") for bar in container]
    assert bars == [layer.largest.value for result in results for layer in result.layers]
    assert [label.get_text() for label in right.get_yticklabels()] == [layer.name for layer in results[0].layers]
    picture([replace(result, layers=[]) for result in results])
    assert len(drawn[1].axes) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "text.txt", "--top", "0"), "top must be in 1 ..."),
        (("--data", "examples.jsonl", "--adapter", "adapter", "--top", "513", "--steps", "600"),
         "top must be in 1 ... 512 (the number of parameters), got 513"),
        (("--data", "text.txt", "--probes", "1"), "probes must be 0, or >= 2 for a standard error, got 1"),
        (("--data", "text.txt", "--steps", "3"), "steps must be >= top=5"),
        (("--data", "text.txt", "--context", "33"), "context=33 exceeds n_positions=32 of the model"),
        (("--data", "text.txt", "--context", "0"), "context must be >= 1, got 0"),
        (("--data", "text.txt", "--batch-size", "0"), "batch_size must be >= 1, got 0"),
        (("--data", "text.txt", "--batches", "-1"), "batches must be >= 0, got -1"),
        (("--data", "text.txt", "--quantized"), "give an adapter with --adapter, or omit --quantized"),
        (("--data", "text.txt", "--plot", "x.pdf"), "--plot writes a .png file, got 'x.pdf'"),
        (("--data", "text.txt", "--plot", "nowhere/x.png"), "nowhere does not exist"),
        (("--data", "missing.txt"), "missing.txt does not exist"),
        (("--data", "model"), "model is a folder; give one file"),
        (("--data", "short.txt"), "short.txt is too short: 1 tokens; a text needs at least 2, one input and one"),
        (("--data", "examples.jsonl", "--context", "5"), "examples.jsonl, line 1: 10 tokens exceed context=5"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)  # fmt: skip
def test_errors_name_the_value_and_the_way_out(
    folder: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("short.txt").write_text("a")
    assert message in " ".join(fails("model", *arguments).split())


def test_a_model_without_a_tokenizer_is_rejected(folder: Path, tmp_path: Path) -> None:
    onfoot.create(onfoot.GPT2Config(257, 32, 8, 1, 2)).save(tmp_path / "bare")
    assert "has no tokenizer to encode the data" in fails(tmp_path / "bare", "--data", folder / "text.txt")


def test_the_example_of_the_guide_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = [block.text for block in page_blocks("docs/curvature.md") if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    load(folder / "model").save("runs/small")
    Path("reference.txt").write_text(TEXT)
    names: dict[str, Any] = {}
    exec(code[0], names)
    exec(code[1], names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["0.5 of it", "2 of it", "16 of it"]
    losses = [[float(loss) for loss in line.split(":")[1].split()] for line in lines[1:]]
    assert losses[0][-1] < losses[0][0]  # below the limit it falls
    assert losses[2] != sorted(losses[2], reverse=True)  # far above, it does not fall step by step


# The batches of a file.


def test_windows_of_a_text_cover_it_once_in_a_shuffled_order(folder: Path) -> None:
    found = batches_of(folder, "text.txt", context=16, batch_size=4, seed=1)
    assert [len(b.tokens) for b in found.batches] == [4, 4, 1] and found.n_rows == found.n_all_rows == 9
    tokens = np.concatenate([b.tokens for b in found.batches])
    targets = np.concatenate([b.targets for b in found.batches])
    assert sorted(targets[targets != -100].tolist()) == sorted(BYTES.encode(TEXT)[1:])
    assert BYTES.decode(tokens[0].tolist()) in TEXT and BYTES.decode(tokens[0].tolist()) != TEXT[:16]
    some = batches_of(folder, "text.txt", context=16, batch_size=4, batches=2, seed=1)
    assert (some.n_rows, some.n_all_rows) == (8, 9)
    np.testing.assert_array_equal(np.concatenate([b.tokens for b in some.batches]), tokens[:8])


def test_a_short_text_is_one_window_without_padding(folder: Path) -> None:
    (batch,) = batches_of(folder, "text.txt", context=32).batches[:1]
    assert batch.tokens.shape == (5, 32)
    tiny = folder / "tiny.txt"
    tiny.write_text("abc")
    (batch,) = batches_of(folder, "tiny.txt").batches
    assert batch.tokens.tolist() == [BYTES.encode("ab")] and batch.targets.tolist() == [BYTES.encode("bc")]
    assert batch.segments is None


def test_lines_of_text_are_documents_and_other_lines_are_examples(folder: Path) -> None:
    (batch,) = batches_of(folder, "texts.jsonl").batches
    assert batch.tokens.tolist() == [[*BYTES.encode("abcde"), BYTES.eos_id, *BYTES.encode("xyz")]]
    assert batch.targets[0, -1] == BYTES.eos_id
    (batch,) = batches_of(folder, "examples.jsonl").batches
    assert batch.segments is not None and batch.tokens.shape == (3, 30)  # three examples of up to 10 tokens per row


def test_a_model_object_can_be_measured_with_plain_tuples(folder: Path) -> None:
    model = load(folder / "model", "float64")
    assert isinstance(model, Model)
    tokens = np.array([[1, 2, 3, 4]])
    found = measure(model, [(tokens[:, :-1], tokens[:, 1:])], top=1, probes=2, per_layer=False)
    assert found.n_targets == 3
