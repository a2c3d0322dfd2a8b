"""Runs over several ranks, under the mpiexec of the `mpi` extra.

What the ranks do is in this file too: mpiexec starts it as a program, `test_parallel_ranks.py WORK FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import onfoot
from onfoot import threads
from onfoot.formats.run_folder import checkpoints, newest_valid
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune, pretrain
from onfoot.train.buckets import AllReduceGradients, ReduceScatterGradients
from onfoot.train.log import Log
from onfoot.train.loop import Trainer
from onfoot.train.options import FinetuneOptions, TrainOptions
from onfoot.train.parallel import world
from onfoot.train.shard import ShardedAdamW
from onfoot.train.vector import BucketLayout

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
try:
    import mpi4py  # (not mpi4py.MPI, which would start MPI here)
except ImportError:
    mpi4py = None  # type: ignore[assignment]
ranks_needed = pytest.mark.skipif(MPIEXEC is None or mpi4py is None, reason='needs pip install "onfoot[mpi]"')

SMALL: dict[str, Any] = {
    "steps": 6, "warmup": 2, "lr": 1e-2, "eval_every": 6, "save_every": 3, "eval_windows": 5, "keep": 10,
    "sample_tokens": 2, "dtype": "float64", "bucket_mb": 0.004, "clip": 0.5,
}  # fmt: skip
NEW: dict[str, Any] = {
    "arch": "gpt2",
    "lr": 2e-3,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "context": 16,
    "batch_size": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, sharded": {"shard": True},
    "not clipped": {"clip": 0.0},
    "accumulated": {"batch_size": 3, "accumulate": 4},
    "accumulated, sharded": {"batch_size": 3, "accumulate": 4, "shard": True},
    "fewer rows than ranks": {"batch_size": 3},
    "fewer rows than ranks, sharded": {"batch_size": 1, "shard": True},
    "one bucket": {"bucket_mb": 64.0},
    "float32": {"dtype": "float32"},
    "float32, sharded": {"dtype": "float32", "shard": True},
    "lora": {"full": False},
    "lora, sharded": {"full": False, "shard": True},
    "lora, accumulated": {"full": False, "accumulate": 2},
    "lora, accumulated, sharded": {"full": False, "accumulate": 2, "shard": True},
    "completions": {"full": True},
    "completions, sharded": {"full": True, "shard": True},
    "completions, accumulated, sharded": {"full": True, "shard": True, "accumulate": 2},
    "llama": {"init": "llama"},
    "averaged": {"ema": 0.8, "layer_decay": 0.7, "freeze": "transformer.wpe,*.bias"},
    "averaged, sharded": {"ema": 0.8, "layer_decay": 0.7, "freeze": "transformer.wpe,*.bias", "shard": True},
    "preferences": {"full": False, "dpo": True, "dpo_beta": 5.0, "lora_plus": 4.0},
    "preferences, sharded": {"full": False, "dpo": True, "dpo_beta": 5.0, "lora_plus": 4.0, "shard": True},
}
TEXT = "the quick brown fox jumps over the lazy dog while the cat looks on. " * 40
WHOLE: dict[str, Any] = {"steps": 10, "save_every": 2, "eval_every": 4, "dropout": 0.1, "shard": True}  # for resuming


def prepare(folder: Path) -> None:
    """The text, the completions and the models that all cases start from."""
    (folder / "text.txt").write_text(TEXT)
    lines = [{"prompt": f"{i} and one:", "completion": f" {'so ' * (i % 5)}{i + 1}"} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [{"prompt": f"{i} and one:", "chosen": f" {i + 1}", "rejected": f" {'so ' * (i % 5)}on"} for i in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = byte_tokenizer()
    ends: dict[str, Any] = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    sizes = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=48, n_embd=16, n_layer=2, n_head=2, **ends)
    llama = onfoot.LlamaConfig(
        vocab_size=tokenizer.size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=48, tie_word_embeddings=True, **ends,
    )  # fmt: skip
    for name, config in (("gpt2", sizes), ("llama", llama)):
        model = onfoot.create(config, seed=1)
        model.tokenizer = tokenizer
        model.save(folder / name)


def start(folder: Path, run: Path, **changes: Any) -> Trainer:
    """The run of a case."""
    if "full" in changes:
        settings: dict[str, Any] = {"batch_size": 3, "row_length": 1 << 30, "r": 2, **SMALL, **changes}
        data = folder / ("pairs.jsonl" if changes.get("dpo") else "data.jsonl")
        tune = FinetuneOptions(model=str(folder / "gpt2"), data=[str(data)], **settings)
        return finetune.start(run, tune)
    settings = {**NEW, **SMALL, **changes}
    if "init" in settings:
        settings["init"] = str(folder / settings["init"])
    return pretrain.start(run, TrainOptions(texts=[str(folder / "text.txt")], **settings))


def do_all_cases(folder: Path) -> None:
    for case, changes in CASES.items():
        trainer = start(folder, folder / f"{case} {world().size}", **changes)
        if "full" in changes and "dpo" not in changes and world().size > 1:  # completions of different lengths
            assert unequal_targets(trainer)
        with patch("onfoot.train.callbacks.draw_losses"):  # it takes longer than the training
            trainer.run()
        world().compare(trainer.model.params, "at the end")
        if changes.get("shard") and world().size > 1:
            assert isinstance(trainer.optimizer, ShardedAdamW)
            n, padding = trainer.model.n_trainable, world().size * len(trainer.optimizer.layout.lengths)
            assert trainer.optimizer.m["shard"].size <= (n + padding) / world().size  # and no other moments
            assert list(trainer.optimizer.m) == list(trainer.optimizer.v) == ["shard"]


def unequal_targets(trainer: Trainer) -> bool:
    """Whether the ranks have different numbers of targets in every step."""
    counts = []
    for step in range(trainer.options.steps):
        batches = trainer.source.microbatches(step, world().share)
        counts.append(sum(int((b.targets != -100).sum()) for b in batches))
    return all(len(set(of_ranks)) > 1 for of_ranks in world().table(*counts).T.tolist())


def do_interrupted(folder: Path) -> None:
    """A run that one of its ranks is asked to stop in step 5."""
    trainer = start(folder, folder / "cut", **WHOLE)
    step = trainer.step

    def step_then_interrupt(lr: float) -> Any:
        result = step(lr)
        if trainer.state.step + 1 == 5 and world().rank == world().size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    trainer.step = step_then_interrupt  # type: ignore[method-assign]
    outcome = trainer.run()
    assert outcome.interrupted and outcome.state.step == 5


def do_resumed(folder: Path) -> None:
    for name in ("cut-whole", "cut-other"):
        pretrain.resume(folder / name)[0].run()


def do_whole(folder: Path) -> None:
    start(folder, folder / f"whole {world().size}", **WHOLE).run()


def do_failing(folder: Path) -> None:
    """A run that fails on one rank alone."""
    trainer = start(folder, folder / "failing", **{**SMALL, "save_every": 1, "eval_every": 100})
    step = trainer.step

    def fails(lr: float) -> Any:
        if trainer.state.step == 3 and world().rank == 1:
            raise ValueError("a cosmic ray")
        return step(lr)

    trainer.step = fails  # type: ignore[method-assign]
    trainer.run()


class Bad:
    """A source of the user's own that is bad from step 4 on, where `kind` says so."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def microbatches(self, step: int, share: Any) -> list[Any]:
        ids = np.random.default_rng(step).integers(0, 257, (2, 8))
        if step == 3 and self.kind == "token":
            ids = ids + 300 * world().rank  # on rank 1 alone
        return [(ids, np.full_like(ids, -100) if step == 3 and self.kind == "targets" else ids)]

    def validation(self, share: Any) -> list[Any]:
        ids = np.zeros((2, 8), int)
        return [(ids + 300 * world().rank if self.kind == "validation" else ids, ids)]


class Fails:
    """A callback that fails on the last rank alone."""

    def on_step(self, trainer: Trainer, step: Any) -> None:
        if step.step == 4 and world().rank == world().size - 1:
            raise KeyError("metric")


def do_bad(folder: Path, kind: str) -> None:
    """A run that a source or a callback of the user's ends in step 4, or after it."""
    model = onfoot.create(
        onfoot.GPT2Config(vocab_size=257, n_positions=8, n_embd=8, n_layer=1, n_head=2), engine="numpy"
    )
    few = {"steps": 6, "warmup": 1, "eval_every": 4, "save_every": 2, "sample_tokens": 0, "quiet": True}
    Trainer(model, Bad(kind), onfoot.TrainingOptions(**few), [Fails()] * (kind == "callback"), out=folder / "bad").run()


def do_small_things(folder: Path) -> None:
    """Communication between ranks, and sums that progress while the main thread does something else."""
    ranks = world()
    assert ranks.allgather_json(["é", ranks.rank]) == [["é", r] for r in range(ranks.size)]
    assert ranks.sum(ranks.rank, 1.5) == [sum(range(ranks.size)), 1.5 * ranks.size]
    assert ranks.any(ranks.rank == 1) and not ranks.any(False)
    ranks.compare({"same": np.full((2, 3), 1.0)}, "at once")

    config = onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = onfoot.create(config, dtype="float64")
    layout = BucketLayout.of(model, 0.001, ranks.size)
    for sums in (AllReduceGradients(ranks, layout, model), ReduceScatterGradients(ranks, layout, model)):
        rng = np.random.default_rng(ranks.rank)
        mine = {name: rng.normal(size=shape) for name, shape in layout.shapes.items()}
        sums.begin()
        sums.last()
        for name in list(mine)[:-1]:
            sums.add(name, mine[name])
        deadline = time.monotonic() + 20
        while len(sums._numbers) or not sums._started:  # nobody but the thread calls MPI meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert 1 <= sums._started < len(layout.lengths)
        sums.add(list(mine)[-1], mine[list(mine)[-1]])
        got = sums.finish()
        for name, shape in layout.shapes.items():
            every = np.array([np.asarray(x) for x in ranks.allgather_json(mine[name].reshape(-1).tolist())]).sum(axis=0)
            if isinstance(sums, AllReduceGradients):
                assert np.abs(got[name] - every.reshape(shape)).max() <= 1e-14
            else:
                for piece in layout.owned(name):
                    if piece.rank == ranks.rank:
                        part = got["shard"][piece.offset : piece.offset + piece.end - piece.begin]
                        assert np.abs(part - every[piece.begin : piece.end]).max() <= 1e-14


WORK = {
    "all cases": do_all_cases, "interrupted": do_interrupted, "resumed": do_resumed, "whole": do_whole,
    "failing": do_failing, "small things": do_small_things,
    **{f"bad {kind}": partial(do_bad, kind=kind) for kind in ("targets", "token", "validation", "callback")},
}  # fmt: skip


def mpiexec(n: int, *command: Any, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    return subprocess.run(
        [MPIEXEC, "-n", str(n), sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout
    )


def ranks_do(n: int, folder: Path, *work: str) -> None:
    result = mpiexec(n, __file__, folder, *work)
    assert result.returncode == 0, result.stderr


def tensors(run: Path) -> dict[str, np.ndarray]:
    """The trained weights of a run, and the moments of its optimizer."""
    (weights,) = (run / "last").glob("*model.safetensors")
    out = dict(TensorFile(weights).items())
    return {k: np.array(v) for k, v in (out | dict(TensorFile(run / "last/trainer/optimizer.safetensors"))).items()}


def difference(one: Path, other: Path) -> float:
    """The largest relative difference of any tensor."""
    a, b = tensors(one), tensors(other)
    assert set(a) == set(b)
    return max(float(np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(a[k]), 1e-12)) for k in a)


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = tensors(one), tensors(other)
    assert set(a) == set(b)
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.slow
@ranks_needed
def test_one_two_and_four_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    prepare(tmp_path)
    do_all_cases(tmp_path)
    for n in (2, 4):
        ranks_do(n, tmp_path, "all cases")
    for case, changes in CASES.items():
        whole = case.removesuffix(", sharded")
        limit = 2e-5 if changes.get("dtype") == "float32" else 1e-12
        for n in (2, 4):
            assert difference(tmp_path / f"{case} 1", tmp_path / f"{case} {n}") <= limit, (case, n)
            if changes.get("shard") and whole in CASES and CASES[whole] | {"shard": True} == changes:
                assert difference(tmp_path / f"{whole} {n}", tmp_path / f"{case} {n}") <= limit, (case, n)
            one, several = (Log(tmp_path / f"{case} {k}" / "log.jsonl").read() for k in (1, n))
            for a, b in zip(one, several, strict=True):
                for figure in {"loss", "val_loss", "grad_norm", "margin", "val_margin"} & set(a):
                    assert b[figure] == pytest.approx(a[figure], rel=1e-4 if limit > 1e-12 else 1e-11), (case, n)
            norms = [record["grad_norm"] for record in several if "grad_norm" in record]
            assert len(norms) == 6 and max(norms) > 0.5, case  # where gradients are clipped at 0.5, they are


@ranks_needed
def test_a_run_stops_at_one_step_on_all_ranks_and_resumes_on_any_number(tmp_path: Path) -> None:
    prepare(tmp_path)
    ranks_do(2, tmp_path, "small things", "whole", "interrupted")
    for name in ("cut-whole", "cut-other"):
        shutil.copytree(tmp_path / "cut", tmp_path / name, symlinks=True)
    ranks_do(2, tmp_path, "resumed")
    assert_same_bits(tmp_path / "whole 2", tmp_path / "cut-whole")

    for name in ("cut-whole", "cut-other"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path / "cut", tmp_path / name, symlinks=True)
        without_dropout(tmp_path / name)
    without_dropout(tmp_path / "cut")
    ranks_do(4, tmp_path, "resumed")  # from then on 4 ranks are as good as one
    pretrain.resume(tmp_path / "cut")[0].run()
    assert difference(tmp_path / "cut", tmp_path / "cut-whole") <= 1e-12
    assert_same_bits(tmp_path / "cut-whole", tmp_path / "cut-other")


def without_dropout(run: Path) -> None:
    """Sets dropout to 0 in a run: dropout masks depend on the number of ranks."""
    for path in [run / "run.json", *run.glob("checkpoints/*/config.json")]:
        text = path.read_text()
        text = re.sub(r',\s*"sha256": "\w+"', "", text)  # run.json is changed on purpose
        path.write_text(re.sub(r'"((?:\w+_p)?drop(?:out)?)": 0\.1', r'"\1": 0.0', text))
    for path in run.glob("checkpoints/*/trainer/manifest.json"):
        manifest, config = json.loads(path.read_text()), (path.parent.parent / "config.json").read_bytes()
        manifest["config.json"] = {"bytes": len(config), "sha256": hashlib.sha256(config).hexdigest()}
        path.write_text(json.dumps(manifest))


@ranks_needed
def test_a_rank_that_fails_ends_all_with_its_name_the_reason_and_the_last_checkpoint(tmp_path: Path) -> None:
    prepare(tmp_path)
    result = mpiexec(2, __file__, tmp_path, "failing")
    assert result.returncode != 0
    assert re.search(r"error: rank 1 on \S+ failed: a cosmic ray", result.stderr)
    last = tmp_path / "failing" / "checkpoints" / "step-0000003"
    assert f"the last complete checkpoint is {last}" in result.stderr
    assert f"mpiexec -n 2 onfoot train --resume {tmp_path / 'failing'}" in result.stderr
    assert " died" not in result.stderr and newest_valid(tmp_path / "failing") == (last, [])


@pytest.mark.parametrize(
    ("kind", "rank", "said"),
    [
        ("targets", 0, "Bad.microbatches failed after step 3: ValueError: step 4: all 32 targets are ignored (-100)"),
        ("token", 1, "Bad.microbatches failed after step 3: ValueError: token id "),
        ("validation", 1, "Bad.validation failed after step 4: ValueError: token id 300 is outside 0 ... 256"),
        ("callback", 1, "Fails.on_step failed after step 4: KeyError: 'metric'"),
    ],
)
@ranks_needed
def test_what_a_user_gives_ends_all_ranks_where_it_is_bad_on_one(
    kind: str, rank: int, said: str, tmp_path: Path
) -> None:
    result = mpiexec(2, __file__, tmp_path, f"bad {kind}", timeout=60)  # saving would wait for the other rank
    assert result.returncode != 0
    assert re.search(rf"error: rank {rank} on \S+ failed: {re.escape(said)}", result.stderr), result.stderr
    assert "is saved" not in result.stderr
    last = tmp_path / "bad" / "checkpoints" / "step-0000002"
    assert f"the last complete checkpoint is {last}" in result.stderr and newest_valid(tmp_path / "bad") == (last, [])
    assert "resume with: your script, where trainer.restore(checkpoint)" in result.stderr


LONG = 60  # steps of a run one of whose ranks is to be killed, at the latest in step 40
COMMAND = [
    "--n-layer", 2, "--n-head", 2, "--n-embd", 16, "--context", 16, "--batch-size", 4, "--steps", LONG, "--warmup", 2,
    "--eval-every", 20, "--save-every", 2, "--eval-windows", 4, "--sample-tokens", 2, "--dropout", 0.1,
    "--bucket-mb", 0.01, "--keep", 3,
]  # fmt: skip


class Running:
    """A running `mpiexec -n N onfoot train`."""

    def __init__(self, n: int, folder: Path, run: Path, *more: Any) -> None:
        assert MPIEXEC is not None
        command = ["train", folder / "text.txt", "--out", run, *COMMAND, *more]
        self.run = run
        self.process = subprocess.Popen(
            [MPIEXEC, "-n", str(n), sys.executable, "-m", "onfoot", *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for(self, step: int) -> None:
        """Waits until the log has reached the step, or the run is over."""
        deadline = time.monotonic() + 600  # for what hangs; a slow machine may take its time
        while self.process.poll() is None and self.step() < step:
            assert time.monotonic() < deadline, self.process.terminate()
            time.sleep(0.002)

    def step(self) -> int:
        """The last step in the log."""
        return max((r["step"] for r in Log(self.run / "log.jsonl").read()), default=0)

    def ranks(self) -> dict[int, int]:
        """The ranks' processes."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            rank = re.search(rb"(?:^|\0)PMI_RANK=(\d+)\0", environment)
            if rank and str(self.run).encode() + b"\0" in command:
                found[int(rank[1])] = int(entry.name)
        return found

    def kill(self, victim: int, step: int, pause: float) -> tuple[int, str] | None:
        """Kills a rank so many seconds after the log has reached the step: its process, and what was said.

        None if the run was over before.
        """
        self.wait_for(1)
        pid = self.ranks().get(victim)
        self.wait_for(step)
        time.sleep(pause)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, errors = self.process.communicate(timeout=120)  # nothing hangs
        over = (self.run / "checkpoints" / f"step-{LONG:07d}").exists()
        assert over or (pid is not None and self.process.returncode != 0), errors
        return None if over or pid is None else (pid, errors)


def kill_and_resume(folder: Path, moments: list[float], n: int, *more: Any) -> None:
    """Kills one rank after the other at these moments of a run, each a step and a fraction of 10 ms."""
    prepare(folder)
    whole = mpiexec(n, "-m", "onfoot", "train", folder / "text.txt", "--out", folder / "whole", *COMMAND, *more)
    assert whole.returncode == 0, whole.stderr
    for i, moment in enumerate(moments):
        victim = i % n
        for attempt in range(20):
            running = Running(n, folder, folder / f"killed-{i}-{attempt}", *more)
            killed = running.kill(victim, int(moment), moment % 1 * 0.01)
            if killed is not None:
                break
        else:  # (this process slept each time while the run came to its end)
            pytest.fail(f"the run was over each time before rank {victim} could be killed at {moment}")
        pid, errors = killed
        assert re.search(rf"rank {victim} on \S+ \(process {pid}\) died", errors), errors
        assert_names_the_last_checkpoint(errors, running.run)
        assert not running.ranks()  # nobody is left behind
        resumed = mpiexec(n, "-m", "onfoot", "train", "--resume", running.run)
        assert resumed.returncode == 0, resumed.stderr
        assert_same_bits(folder / "whole", running.run)
        assert [r["step"] for r in Log(running.run / "log.jsonl").read() if "loss" in r] == list(range(1, LONG + 1))
        shutil.rmtree(running.run)


def assert_names_the_last_checkpoint(errors: str, run: Path) -> None:
    """Checks the checkpoint that the error names; rank 0 may have completed one more before it was killed."""
    newest = [str(path) for path in checkpoints(run)[-2:]]
    named = re.search(r"the last complete checkpoint is (\S+);", errors)
    if named is None:
        assert "no checkpoint was saved" in errors and len(newest) <= 1, errors
    else:
        assert named[1] in newest, errors


@ranks_needed
def test_a_killed_rank_is_named_and_the_run_resumes_to_bit_identical_weights(tmp_path: Path, fresh: int) -> None:
    kill_and_resume(tmp_path, np.random.default_rng(fresh).uniform(1, 40, 2).tolist(), 2)


@ranks_needed
@pytest.mark.slow
@pytest.mark.parametrize(("n", "more"), [(2, []), (4, ["--shard"])], ids=["2 ranks", "4 ranks, sharded"])
def test_ten_killed_ranks_are_named_and_their_runs_resume_to_bit_identical_weights(
    tmp_path: Path, n: int, more: list[str], fresh: int
) -> None:
    kill_and_resume(tmp_path, np.random.default_rng(fresh).uniform(1, 40, 10).tolist(), n, *more)


@ranks_needed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_to_mpiexec_stops_all_ranks_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    prepare(tmp_path)
    never = ("--eval-every", 10**6, "--save-every", 10**6)
    running = Running(2, tmp_path, tmp_path / "run", "--steps", 10**6, *never)
    running.wait_for(3)
    running.process.send_signal(number)
    output, errors = running.process.communicate(timeout=120)
    assert running.process.returncode == 130, errors
    assert output.count("stopped and saved at step") == 1
    (saved,) = checkpoints(tmp_path / "run")
    assert newest_valid(tmp_path / "run") == (saved, []) and "died" not in errors


@ranks_needed
def test_what_cannot_begin_is_refused_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    for text, message in (("short.txt", "less than one window"), ("missing.txt", "missing.txt does not exist")):
        result = mpiexec(2, "-m", "onfoot", "train", tmp_path / text, "--out", tmp_path / "run")
        assert result.returncode == 2 and result.stderr.count(message) == 1 and "Traceback" not in result.stderr
        assert not (tmp_path / "run").exists()


@ranks_needed
def test_the_cores_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import numpy, sys, threadpoolctl; from onfoot.train.parallel import world; "
        "threadpoolctl.threadpool_limits(3, user_api='blas'); world(); "
        "blas = [pool['num_threads'] for pool in threadpoolctl.threadpool_info() if pool['user_api'] == 'blas']; "
        'sys.stdout.write(f"{max(blas)}\\n")'
    )
    result = mpiexec(2, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(max(1, len(threads.cores()) // 2))] * 2


@ranks_needed
def test_under_mpiexec_without_mpi4py_every_rank_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "mpi4py.py").write_text("raise ImportError('not here')")
    path = [str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    result = mpiexec(2, "-m", "onfoot", "train", "--out", tmp_path / "run")
    assert result.returncode != 0 and not (tmp_path / "run").exists()
    for rank in (0, 1):
        assert f"this is rank {rank} of 2 of an MPI run, but mpi4py is not installed" in result.stderr
    assert 'pip install "onfoot[mpi]"' in result.stderr and "Traceback" not in result.stderr


if __name__ == "__main__":
    sys.exit([WORK[name](Path(sys.argv[1])) for name in sys.argv[2:]] and 0)
