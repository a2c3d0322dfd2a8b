"""Run folders: which checkpoints are kept, the lock, links, recorded hashes, other operating systems."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.bench import machine
from onfoot.cli import app
from onfoot.formats import run_folder
from onfoot.formats import write as files
from onfoot.formats.run_folder import checkpoint_folder, checkpoints, model_folder, validate
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune, pretrain
from onfoot.train.log import Log
from onfoot.train.options import FinetuneOptions, TrainOptions

SMALL: dict[str, Any] = {
    "steps": 8, "batch_size": 2, "warmup": 2, "eval_every": 4, "save_every": 2, "eval_windows": 2, "keep": 1,
    "sample_tokens": 0, "engine": "numpy",
}  # fmt: skip
SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8, "context": 16}


@pytest.fixture(autouse=True)
def plain_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.train.log.picture", lambda *args: b"a picture")  # drawing takes longer than training


def options(tmp_path: Path, **changes: Any) -> TrainOptions:
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return TrainOptions(texts=[str(text)], **{**SIZES, **SMALL, **changes})


def stopped(run: Path, at: int, settings: TrainOptions) -> None:
    """A run that stops before step `at`, like one that was killed."""
    trainer = pretrain.start(run, settings)
    stop_before(trainer, at)


def stop_before(trainer: Any, at: int) -> None:
    step = trainer.step

    def stopping(lr: float) -> Any:
        if trainer.state.step == at:
            raise KeyboardInterrupt
        return step(lr)

    trainer.step = stopping
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.step = step


def damage(folder: Path) -> None:
    """Flips one bit of the weights."""
    path = next(folder.glob("*model.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def weights(folder: Path) -> dict[str, bytes]:
    return {k: np.array(v).tobytes() for k, v in TensorFile(folder / "model.safetensors").items()}


def linked(run: Path) -> dict[str, str]:
    """The targets of the links: always valid checkpoints."""
    found = {name: (run / name).resolve() for name in ("last", "best")}
    assert all(validate(path) is None for path in found.values()), found
    return {name: path.name for name, path in found.items()}


def test_a_damaged_checkpoint_does_not_replace_a_valid_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 5, options(tmp_path))  # one checkpoint, of step 4
    shutil.copytree(checkpoint_folder(run, 4), checkpoint_folder(run, 9))
    damage(checkpoint_folder(run, 9))  # newer than all that come: counted, it would be the one that is kept
    trainer, said = pretrain.resume(run)
    assert trainer.state.step == 4 and len(said) == 1 and "step-0000009 cannot be used: model.safetensors" in said[0]
    stop_before(trainer, 7)
    assert names(run) == ["damaged-step-0000009", "step-0000004", "step-0000006"]  # the best, and the last
    assert linked(run) == {"last": "step-0000006", "best": "step-0000004"}


def test_a_newly_written_checkpoint_stays_whatever_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(tmp_path))
    save = trainer.save

    def damaging() -> None:
        for folder in checkpoints(run):
            damage(folder)
        save()
        (only,) = checkpoints(run)
        assert validate(only) is None and only == checkpoint_folder(run, trainer.state.step)
        assert linked(run) == {"last": only.name, "best": only.name}

    trainer.save = damaging  # type: ignore[method-assign]
    trainer.run()
    assert names(run) == [f"damaged-step-000000{n}" for n in (2, 4, 6)] + ["step-0000008"]
    assert capsys.readouterr().err.count("is corrupted (its checksum differs); renamed to damaged-step-") == 3


def test_a_damaged_best_checkpoint_is_renamed_and_replaced_by_another(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 7, options(tmp_path, lr=0.0))  # it never improves: the first evaluation, after step 4, is the best
    assert linked(run) == {"last": "step-0000006", "best": "step-0000004"}
    damage(checkpoint_folder(run, 4))
    resolved = model_folder(run)
    trainer, _ = pretrain.resume(run)
    assert resolved.name == "step-0000006" and linked(run) == {"last": "step-0000006", "best": "step-0000006"}
    trainer.run()
    assert names(run) == ["damaged-step-0000004", "step-0000008"]
    assert linked(run) == {"last": "step-0000008", "best": "step-0000008"}


def test_checkpoints_are_not_hashed_again_at_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    digest = run_folder._sha256
    monkeypatch.setattr(run_folder, "_sha256", lambda path: hashed.append(path) or digest(path))  # type: ignore[func-returns-value]
    pretrain.start(tmp_path / "run", options(tmp_path, keep=9)).run()
    assert len(checkpoints(tmp_path / "run")) == 4
    assert all(".writing-" in str(path) or path.parent.name == "data" for path in hashed)  # each once, as it is written


def test_an_io_error_in_the_newest_falls_back_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    pretrain.start(tmp_path / "whole", options(tmp_path, keep=3)).run()
    stopped(run, 7, options(tmp_path, keep=3))
    digest = run_folder._sha256

    def failing(path: Path) -> str:
        if "step-0000006" in str(path) and path.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return digest(path)

    monkeypatch.setattr(run_folder, "_sha256", failing)
    trainer, said = pretrain.resume(run)
    assert trainer.state.step == 4
    assert "step-0000006 cannot be used: model.safetensors cannot be read (Input/output error)" in said[0]
    monkeypatch.setattr(run_folder, "_sha256", digest)
    trainer.run()
    assert weights(run / "last") == weights(tmp_path / "whole" / "last")
    assert "damaged-step-0000006" in names(run) and validate(run / "checkpoints" / "damaged-step-0000006") is None


def test_a_run_without_any_valid_checkpoint_is_left_unchanged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 3, options(tmp_path))
    damage(checkpoint_folder(run, 2))
    log = (run / "log.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=r"no checkpoint of .* can be used; restore one, .*step-0000002 cannot be used"
    ):
        pretrain.resume(run)
    assert names(run) == ["step-0000002"] and (run / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("content", ["{}", "[]", '{"model.safetensors": 3}', "null", '{"trainer/state.json": {}}'])
def test_an_incomplete_manifest_makes_a_checkpoint_invalid(tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    stopped(run, 3, options(tmp_path))
    (checkpoint_folder(run, 2) / "trainer" / "manifest.json").write_text(content)
    assert "manifest" in (validate(checkpoint_folder(run, 2)) or "")


def test_a_checkpoint_that_is_half_deleted_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(tmp_path, eval_every=100))
    rmtree = shutil.rmtree

    def killed(path: Path, **kwargs: Any) -> None:
        if "step-" in str(path) and Path(path).exists():
            next(Path(path).glob("*.json")).unlink()
            raise KeyboardInterrupt
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    resumed, said = pretrain.resume(run)
    assert said == [] and resumed.state.step == 4
    resumed.run()
    assert names(run) == ["step-0000008"]


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "loss.png", "run.json", "data.json"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    stopped(run, 3, options(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text((run / name).read_text() if (run / name).exists() else "precious")
    before = victim.read_bytes()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    with pytest.raises(
        ValueError, match=rf"{name} is a symbolic link, and its target would be overwritten; remove the link"
    ):
        pretrain.resume(run)[0].run()
    assert victim.read_bytes() == before


def test_a_log_and_a_curve_do_not_follow_a_link_that_appears_later(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / "loss.png").symlink_to(victim)
    trainer.run()
    assert victim.read_text() == "precious" and not (run / "loss.png").is_symlink()  # the link itself is replaced
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match=r"log\.jsonl is a symbolic link"):
        Log(run / "log.jsonl").append({"step": 1})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("left", [[], [".lock"], [".lock", ".run.json.new"], [".lock", "data/"]], ids=str)
def test_a_folder_killed_before_the_run_began_can_be_used_again(tmp_path: Path, left: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in left:
        (run / name).mkdir() if name.endswith("/") else (run / name).write_text("")
    with pytest.raises(ValueError, match=r"is not a run folder: it has no run\.json"):
        pretrain.resume(run)
    pretrain.start(run, options(tmp_path)).run()
    assert linked(run)["last"] == "step-0000008"


@pytest.mark.parametrize("mine", ["notes.txt", "data/mine.txt", ".lock/mine"])
def test_a_folder_with_something_of_the_users_is_refused(tmp_path: Path, mine: str) -> None:
    path = tmp_path / "run" / mine
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        pretrain.start(tmp_path / "run", options(tmp_path))
    assert path.read_text() == "mine"


def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(tmp_path))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="is being trained by another process"):
        pretrain.resume(run)
    (run / "run.json").rename(tmp_path / "elsewhere")  # as another process sees it that looked a moment earlier
    for path in [*run.iterdir()]:
        if path.name != ".lock":
            shutil.move(path, tmp_path / path.name)
    with pytest.raises(ValueError, match="is being trained by another process"):
        pretrain.start(run, options(tmp_path))
    for path in (tmp_path / "data", tmp_path / "data.json"):
        shutil.move(path, run / path.name)
    (tmp_path / "elsewhere").rename(run / "run.json")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    trainer.run()


def test_run_json_that_has_changed_is_refused_until_its_hash_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 3, options(tmp_path))
    values = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**values, "lr": 0.5}))
    with pytest.raises(ValueError, match=r"run\.json has changed since the run started .* remove the entry"):
        pretrain.resume(run)
    del values["sha256"]
    (run / "run.json").write_text(json.dumps({**values, "lr": 0.5}))
    assert pretrain.resume(run)[0].options.lr == 0.5


def test_run_json_records_the_versions_and_a_change_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 3, options(tmp_path, engine="auto", dtype="float64"))
    path = run / "run.json"
    values = json.loads(path.read_text())
    made = values["made_with"]
    assert values["engine"] == "auto" and made["engine"] == "numpy" and made["onfoot"] == onfoot.__version__
    assert made["numpy"] == np.__version__ and made["python"] == sys.version.split()[0] and "numba" in made
    assert pretrain.resume(run)[1] == []
    del values["sha256"]
    values["made_with"] = {**made, "numpy": "1.0", "engine": "numba"}
    path.write_text(json.dumps(values))
    (said,) = pretrain.resume(run)[1]
    assert said == (
        f"this run started with numpy 1.0, engine numba and continues with numpy {np.__version__}, engine numpy: "
        f"results may differ by rounding"
    )


def test_a_run_does_not_resume_with_another_text_or_tokenizer(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", options(tmp_path)
    stopped(run, 3, settings)
    path = run / "data" / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"a"', b'"b"', 1))
    with pytest.raises(ValueError, match=r"data: tokenizer\.json .*; restore the original, or start a new run"):
        pretrain.resume(run)
    path.write_bytes(content)
    shutil.rmtree(run / "data")  # the text is tokenised again: it must be the same
    assert pretrain.resume(run)[0].state.step == 2
    shutil.rmtree(run / "data")
    Path(settings.texts[0]).write_text("a lazy dog jumps over the quick brown fox. " * 60)
    with pytest.raises(ValueError, match=r"the text of .*run has changed since the run started"):
        pretrain.resume(run)


def test_missing_log_lines_are_reported_without_stopping(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 5, options(tmp_path))
    path = run / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:-9] + "\n" + "".join(lines[2:]))
    trainer, said = pretrain.resume(run)
    assert "log.jsonl, line 2: not a log record; skipped" in said[0] and "lacks 1 of the 4 steps" in said[1]
    trainer.run()
    assert [r["step"] for r in Log(path).read() if "loss" in r] == [1, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(
        vocab_size=tokenizer.size, n_positions=48, n_embd=8, n_layer=1, n_head=1,
        bos_token_id=tokenizer.eos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    for seed, name in enumerate(("base", "other")):
        model = onfoot.create(config, seed=seed)
        model.tokenizer = tokenizer
        model.save(tmp_path / name)
    return tmp_path / "base"


def test_run_json_has_the_fingerprints_of_base_data_and_tokenizer(tmp_path: Path, base: Path) -> None:
    def started(run: str, **changes: Any) -> dict[str, str]:
        trainer = pretrain.start(tmp_path / run, options(tmp_path, **changes))
        trainer.lock.release()  # type: ignore[union-attr]
        return json.loads((tmp_path / run / "run.json").read_text())["made_with"]["fingerprints"]

    fresh, other = started("a"), started("b", tokenizer="bpe", vocab_size=260)
    tokens, tokenizer = (tmp_path / "a" / "data" / name for name in ("tokens.bin", "tokenizer.json"))
    assert fresh == {name: sha256(path.read_bytes()).hexdigest() for name, path in
                     (("data", tokens), ("tokenizer", tokenizer))}  # fmt: skip
    assert other["tokenizer"] != fresh["tokenizer"] and other["data"] != fresh["data"]
    based = started("c", init=str(base))
    assert based == {**fresh, "base": json.loads((tmp_path / "c" / "base.json").read_text())["sha256"]}
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {**SMALL, "model": str(base), "data": [str(tmp_path / "data.jsonl")], "r": 2}
    trainer = finetune.start(tmp_path / "d", FinetuneOptions(**settings))
    tuned = json.loads((tmp_path / "d" / "run.json").read_text())["made_with"]["fingerprints"]
    assert tuned == {"base": based["base"], "data": trainer.source.fingerprint(), "tokenizer": fresh["tokenizer"]}


@pytest.mark.parametrize("quantized", [False, True])
def test_a_lora_run_resumes_only_with_its_own_base(tmp_path: Path, base: Path, quantized: bool) -> None:
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {**SMALL, "model": str(base), "data": [str(tmp_path / "data.jsonl")], "r": 2, "quantized": quantized}
    if quantized:  # blocks are of 32 numbers
        for seed, name in enumerate(("base", "other")):
            config = onfoot.GPT2Config(vocab_size=257, n_positions=48, n_embd=32, n_layer=1, n_head=1)
            model = onfoot.create(config, seed=seed)
            model.tokenizer = byte_tokenizer()
            model.save(tmp_path / name)
    run = tmp_path / "run"
    stop_before(finetune.start(run, FinetuneOptions(**settings)), 3)
    assert finetune.resume(run)[0].state.step == 2
    weights = base / "model.safetensors"
    own = weights.read_bytes()
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"the model .*base has changed since the run started"):
        finetune.resume(run)
    weights.write_bytes(own)
    config_file = base / "config.json"
    text = config_file.read_text()
    config_file.write_text(text.replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 1e-03'))
    with pytest.raises(ValueError, match=r"the model .*base has changed"):
        finetune.resume(run)
    config_file.write_text(text)
    assert not finetune.resume(run)[0].run().interrupted


def test_a_run_from_a_model_that_changed_before_the_first_checkpoint_is_refused(tmp_path: Path, base: Path) -> None:
    settings = options(tmp_path, init=str(base))
    stopped(tmp_path / "run", 1, settings)
    (base / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"the model .*base has changed since the run started"):
        pretrain.resume(tmp_path / "run")


def test_windows_flushes_files_but_not_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.sys, "platform", "win32")
    real, opened = os.open, []

    def windows_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        opened.append(flags & os.O_RDWR)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(files.os, "open", windows_open)
    (tmp_path / "file").write_text("x")
    files.flush(tmp_path / "file")
    files.flush(tmp_path)
    assert opened == [os.O_RDWR]  # Windows refuses to flush what was opened for reading


def test_peak_memory_is_in_bytes_on_every_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STATUS", tmp_path / "none")
    usage = SimpleNamespace(getrusage=lambda who: SimpleNamespace(ru_maxrss=5 << 20), RUSAGE_SELF=0)
    monkeypatch.setattr(machine, "resource", usage)
    for platform, expected in (("linux", 5 << 30), ("darwin", 5 << 20)):
        monkeypatch.setattr(machine.sys, "platform", platform)
        assert machine.peak_bytes() == expected
    monkeypatch.setattr(machine, "resource", None)  # Windows
    assert machine.peak_bytes() == 0


def test_a_run_killed_while_its_curve_was_drawn_gets_it_when_it_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(tmp_path)).run()
    (run / "loss.png").rename(run / ".loss.png.new")
    (run / "checkpoints" / ".removing-step-0000002").mkdir()
    result = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert result.exit_code == 0 and "is complete: all 8 steps are done" in " ".join(result.output.split())
    assert (run / "loss.png").read_bytes() == b"a picture" and not (run / ".loss.png.new").exists()
    assert names(run) == ["step-0000008"]


def test_damage_and_changes_are_reported_on_the_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(run, 7, options(tmp_path, keep=3))
    damage(checkpoint_folder(run, 6))
    result = CliRunner().invoke(app, ["train", "--resume", str(run)])
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "resuming" in said and "renamed to damaged-step-0000006" in said


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_before_a_checkpoint_counts_everything_that_resuming_needs_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[Path, bool]] = []  # and whether the first checkpoint had its name by then
    fsync, run = os.fsync, tmp_path / "run"

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        final = path.with_name(path.name.removeprefix(".").removesuffix(".new")) if path.suffix == ".new" else path
        flushed.append((final, checkpoint_folder(run, 2).exists()))  # a file is renamed once it is on the disk
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    stopped(run, 3, options(tmp_path))
    before = {path for path, done in flushed if not done}
    temporary = run / "checkpoints" / ".writing-step-0000002"
    written = [temporary / p.relative_to(checkpoint_folder(run, 2)) for p in checkpoint_folder(run, 2).rglob("*")]
    assert {
        temporary,
        *written,
        run / "run.json",
        run / "data.json",
        run,
        run / "data",
        *(run / "data").iterdir(),
    } <= before
    assert {run, run / "checkpoints"} <= {path for path, done in flushed if done}


def test_data_that_was_not_complete_when_the_run_was_killed_is_made_again(tmp_path: Path) -> None:
    pretrain.start(tmp_path / "whole", options(tmp_path)).run()
    run = tmp_path / "run"
    stopped(run, 1, options(tmp_path))  # no checkpoint yet
    (run / "data" / "manifest.json").unlink()
    (run / "data.json").unlink()
    path = run / "data" / "tokenizer_config.json"
    path.write_bytes(path.read_bytes()[:20])
    pretrain.resume(run)[0].run()
    assert weights(run / "last") == weights(tmp_path / "whole" / "last")
    assert path.read_bytes() == (tmp_path / "whole" / "data" / "tokenizer_config.json").read_bytes()


def test_a_state_of_any_length_is_refused_in_a_short_line(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    for value in ("x" * 5000, [1] * 5000, 10**4000):
        (tmp_path / "trainer/state.json").write_text(json.dumps({"step": value}))
        with pytest.raises(ValueError, match=r"state\.json") as caught:
            run_folder.read_state(tmp_path)
        assert len(str(caught.value)) < 300
