"""Kills: runs ended before every file operation, interrupted, starved and damaged, come to the same end when resumed.

A run (training, training without clipping, LoRA, two ranks) is done once undisturbed. Then again and again it meets a
blow at one of its file operations: SIGKILL (which cuts a write in half), SIGTERM, SIGINT, an I/O error once, a full
disk or a read-only folder from there on; or it runs on a disk that is really too small. Some blows hit the resumed run
once more, and some files are damaged in between. At last the run is resumed in peace: weights, optimizer, every other
file of its last checkpoint, and the log must be the same to the last bit. (The log of a run whose log was damaged may
lack lines: it is a report, and no state.) Where there is no run yet, one must be able to begin it in the same folder.
A damaged file must be fallen back from, or refused by its name; put back, the run goes on.

Each run is a fork of a process that has imported everything, so that a blow costs a fraction of a second.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns import Outcome

COUNT = 1000
RANKS_EVERY = 50  # one attack of so many is on two ranks: mpiexec takes seconds to start
WORKERS = 4  # attacks at a time: a killed process is waited for more than it computes
TALKS = 30  # how often a rank speaks to the other in a run, about
PATIENCE = 120.0  # seconds until a run that goes on is said to hang
SIGNALS = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
ERRORS = {"I/O error": errno.EIO, "full disk": errno.ENOSPC, "read-only folder": errno.EROFS}
BLOWS = (*SIGNALS, *ERRORS, "I/O error in reading")
DAMAGES = ("cut", "flipped", "deleted", "emptied")
CALLS = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "symlink", "fsync", "truncate", "ftruncate")
JOBS = ("train", "stream", "lora")


def run(count: int, seed: int) -> Outcome:
    """Forks are made by a process of its own, with one thread and nothing in it that this one has done."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    memory = Path("/dev/shm")  # where flushing to disk costs nothing
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        command = [sys.executable, "-m", "campaigns.kills", folder, str(count), str(seed)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **one, "PYTHONPATH": path}
        )
        assert process.stdout is not None
        last = ""
        for last in process.stdout:
            if not last.startswith("{"):
                print(last, end="", flush=True)
    if process.wait() or not last.startswith("{"):
        return Outcome({}, [f"the campaign itself failed with exit status {process.returncode}"])
    return Outcome(**json.loads(last))


# --- the blow ---


@dataclass
class Blow:
    """What happens to a process at one of its file operations; 0 only counts them."""

    kind: str = ""
    at: int = 0
    seen: int = 0
    fell: bool = False


class Hooks:
    """Counts the file operations of this process inside one folder, and deals the blow before one of them."""

    def __init__(self, folder: Path, blow: Blow) -> None:
        self.folder, self.blow = str(folder), blow
        self.open = builtins.open
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        self.os_open = os.open
        os.open = self.low_open  # type: ignore[assignment]
        builtins.open = io.open = self.high_open  # type: ignore[assignment]

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or kwargs.get("dir_fd") is not None or self.inside(path):
                self.before()
            return call(path, *args, **kwargs)

        return hooked

    def low_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self.inside(path):
            self.before()
        return self.os_open(path, flags, *args, **kwargs)

    def high_open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        inside = not isinstance(path, int) and self.inside(path)
        reading = not set(mode) & set("wax+")
        if inside and reading == (self.blow.kind == "I/O error in reading"):
            self.before()
        file = self.open(path, mode, *args, **kwargs)
        return file if reading or not inside else File(file, self)

    def inside(self, path: Any) -> bool:
        return os.fsdecode(path).startswith(self.folder)

    def before(self, half: Callable[[], None] = lambda: None) -> None:
        """An operation is about to be done. `half` does it in part."""
        blow = self.blow
        blow.seen += 1
        if not blow.at or blow.seen < blow.at:
            return
        first, blow.fell = not blow.fell, True
        if blow.kind in SIGNALS and first:
            if blow.kind == "kill":
                half()
            os.kill(os.getpid(), SIGNALS[blow.kind])
        elif blow.kind in ERRORS and (first or blow.kind != "I/O error"):
            if first and blow.kind == "full disk":
                half()
            raise OSError(ERRORS[blow.kind], os.strerror(ERRORS[blow.kind]), self.folder)
        elif blow.kind not in SIGNALS and blow.kind not in ERRORS and first:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.folder)


class File:
    """A file that is written, with a blow before each write and before it is closed."""

    def __init__(self, file: Any, hooks: Hooks) -> None:
        self.file, self.hooks = file, hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> Any:
        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.hooks.before(half)
        return self.file.write(data)

    def close(self) -> None:
        try:
            self.hooks.before()
        finally:
            self.file.close()


# --- the runs ---


def prepare(folder: Path) -> None:
    """What all runs start from: a text, completions, and a base model."""
    import onfoot
    from onfoot.formats.tokenizer import byte_tokenizer

    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = byte_tokenizer()
    ends: dict[str, Any] = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    sizes = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=32, n_embd=8, n_layer=1, n_head=1, **ends)
    model = onfoot.create(sizes, seed=1)
    model.tokenizer = tokenizer
    model.save(folder / "base")


def go(folder: Path, job: str, run: Path) -> None:
    """Resumes the run, or begins it where there is none, as the command line does."""
    from onfoot.train import finetune, log, pretrain
    from onfoot.train.options import FinetuneOptions, TrainOptions

    log.picture = lambda *args: b"a curve" * 30  # type: ignore[assignment]  # drawing takes longer than training
    common: dict[str, Any] = {
        "steps": 6, "warmup": 2, "batch_size": 2, "eval_every": 3, "save_every": 2, "eval_windows": 2, "keep": 1,
        "sample_tokens": 0, "engine": "numpy",
    }  # fmt: skip
    module: Any = finetune if job == "lora" else pretrain
    if (run / "run.json").exists():
        trainer, _ = module.resume(run)
    elif job == "lora":
        files: dict[str, Any] = {"model": str(folder / "base"), "data": [str(folder / "data.jsonl")]}
        trainer = finetune.start(run, FinetuneOptions(**common, **files, r=2))
    else:
        sizes: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8, "context": 16, "dropout": 0.1}
        more: dict[str, Any] = {"clip": 0.0, "keep": 2} if job == "stream" else {"shard": True}
        trainer = pretrain.start(run, TrainOptions(texts=[str(folder / "text.txt")], **{**common, **sizes, **more}))
    trainer.run()


@dataclass
class Ending:
    """How a process ended: 0 well, 2 with an error that says what is wrong, 1 with any other, or by a signal."""

    status: int
    said: str
    seen: int  # file operations
    fell: bool  # whether the blow did


def as_process(work: Callable[[], None], blow: Blow, note: Path) -> None:
    """Does the work, and ends this process as the command line would; says in a note what there is to say."""
    status, said = 0, ""
    try:
        work()
    except (ValueError, OSError) as error:
        status, said = 2, str(error)
    except (KeyboardInterrupt, SystemExit):
        status = 130
    except BaseException:
        status, said = 1, traceback.format_exc()
    with os.fdopen(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(json.dumps([said, blow.seen, blow.fell]))
    os._exit(status)


def forked(folder: Path, job: str, run: Path, blow: Blow) -> Ending:
    """A run in a fork of this process."""
    note = note_of(folder, run)
    note.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        Hooks(run, blow)
        try:
            as_process(lambda: go(folder, job, run), blow, note)
        finally:
            os._exit(1)
    end = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ending(1, "it hangs", 0, False)
        time.sleep(0.001)
    return ending(os.waitstatus_to_exitcode(status), note)


def note_of(folder: Path, run: Path) -> Path:
    """Where a process leaves word how it ended: on no disk that is too small for it."""
    return folder / f"note of {'-'.join(run.relative_to(folder).parts)}"


def ending(status: int, note: Path) -> Ending:
    try:
        said, seen, fell = json.loads(note.read_text())
    except (OSError, ValueError):  # it was ended before it could leave one
        said, seen, fell = "", 0, status < 0
    return Ending(status, said, seen, fell)


MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def on_two_ranks(folder: Path, job: str, run: Path, blow: Blow, victim: int = 0) -> Ending:
    """The same under mpiexec; one of the ranks gets the blow."""
    note = note_of(folder, run)
    note.unlink(missing_ok=True)
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", "2", sys.executable, "-m", "campaigns.kills", str(folder), "rank", str(run)]
    command += [blow.kind, str(blow.at), str(victim)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    out = ending(done.returncode, note)
    if done.returncode == 0:
        return out
    written = note.exists() and note.stat().st_size > 0
    fell = out.fell or (blow.at > 0 and not written)  # who ends all ranks leaves no note, or an empty one
    if blow.kind == "kill" and fell:
        return Ending(-signal.SIGKILL, done.stderr, out.seen, fell)
    return Ending(1 if "Traceback" in done.stderr else 2, out.said or done.stderr, out.seen, fell)


def as_rank(folder: Path, run: Path, kind: str, at: int, victim: int) -> None:
    """One of the ranks. Rank 1 writes no files: its blows fall when it speaks to the other."""
    from onfoot.train.parallel import World, world

    blow = Blow(kind, at) if world().rank == victim else Blow()
    hooks = Hooks(run, blow)
    if victim == 1:
        table = World.table

        def hooked(self: World, *values: float) -> Any:
            hooks.before()
            return table(self, *values)

        World.table = hooked  # type: ignore[method-assign]
    status, said = 0, ""
    try:
        go(folder, "ranks", run)
    except (ValueError, OSError) as error:
        status, said = 2, str(error)
    finally:
        if world().rank == victim:
            with os.fdopen(os.open(note_of(folder, run), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(json.dumps([said, blow.seen, blow.fell]))
    sys.exit(status)


# --- what must come of them ---


def result(run: Path) -> dict[str, Any]:
    """All that a run leaves that time does not change."""
    from onfoot.formats.run_folder import checkpoints, read_state, validate
    from onfoot.train.log import Log

    last = (run / "last").resolve()
    leftovers = [p.name for p in run.rglob("*") if p.name.startswith((".writing", ".removing")) or p.suffix == ".new"]
    assert not leftovers, f"{leftovers[0]} was left behind"
    assert (run / "best").resolve() in checkpoints(run), "best points nowhere"
    for link in ("last", "best"):
        assert validate((run / link).resolve()) is None, f"{link}: {validate((run / link).resolve())}"
    files = {p.relative_to(last).as_posix(): p.read_bytes() for p in last.rglob("*") if p.is_file()}
    del files["trainer/state.json"], files["trainer/manifest.json"]
    timed = ("seconds", "tokens_per_s", "waiting")
    state = {k: v for k, v in read_state(last).items() if k not in timed}
    log = [{k: v for k, v in record.items() if k not in timed} for record in Log(run / "log.jsonl").read()]
    return {"files": files, "state": state, "log": log}


def same(found: dict[str, Any], expected: dict[str, Any], but: str) -> str | None:
    """What is not as in the undisturbed run; `but` names what may differ."""
    for name in expected["files"] | found["files"]:
        if found["files"].get(name) != expected["files"].get(name):
            return f"{name} is not as in the undisturbed run"
    for part in ("state", "log"):
        if part != but and found[part] != expected[part]:
            return f"the {part} is not as in the undisturbed run"
    return None


def damage(run: Path, rng: random.Random) -> tuple[str, Path, bytes] | None:
    """Damages a file of a run; how, which, and what was in it."""
    files = sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink() and p.name != ".lock")
    files = [p for p in files if not {"last", "best"} & set(p.relative_to(run).parts)]
    if not files:
        return None
    path, how = rng.choice(files), rng.choice(DAMAGES)
    content = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "emptied" or not content:
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
    return how, path, content


def mount(disk: Path, options: str) -> bool:
    """Makes a folder a disk of its own, in memory; False where that is not allowed."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return False
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    return subprocess.run(command, capture_output=True).returncode == 0


class Campaign:
    """Undisturbed runs, and attacks on others that must come to the same end."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.figures: Counter[str] = Counter()
        self.failures: list[str] = []
        self.whole: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, int] = {}

    def undisturbed(self, job: str) -> None:
        """What the job's runs must come to, and how many file operations there are."""
        run = self.folder / f"whole-{job}"
        ended = self.process(job, run, Blow())
        assert ended.status == 0, ended.said
        self.whole[job], self.operations[job] = result(run), ended.seen

    def failed(self, what: str, error: Exception) -> None:
        said = str(error).replace(str(self.folder), "…")
        self.failures.append(f"{what} (seed {self.seed}): {said}")
        print(f"  FAILED {self.failures[-1]}", flush=True)

    def process(self, job: str, run: Path, blow: Blow, victim: int = 0) -> Ending:
        if job == "ranks":
            return on_two_ranks(self.folder, job, run, blow, victim)
        return forked(self.folder, job, run, blow)

    def attack(self, number: int, job: str, first: Blow | None) -> None:
        """One run with its blows, from its beginning to its end."""
        rng = random.Random(f"{self.seed} {number}")
        run = self.folder / f"run-{number}"
        about, but = [job], ""
        try:
            for blow in self.blows(job, first, rng):
                victim = rng.randrange(2) if job == "ranks" and blow.kind == "kill" else 0
                if victim:
                    blow.at = rng.randint(1, TALKS)
                about.append(f"{blow.kind} at operation {blow.at}" + " of rank 1" * victim)
                ended = self.process(job, run, blow, victim)
                self.judge(blow, ended)
                if (run / "run.json").exists() and rng.random() < 0.25:
                    but = self.damaged(job, run, rng, about) or but
            ended = self.process(job, run, Blow())
            assert ended.status == 0, f"resumed in peace, it ended with {ended.status}: {ended.said[-600:]}"
            wrong = same(result(run), self.whole[job], but)
            assert wrong is None, wrong
            self.figures["ended bit-identical"] += 1
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            self.failed(f"attack {number}, {'; '.join(about)}", error)
        finally:
            shutil.rmtree(run, ignore_errors=True)

    def small_disk(self, number: int) -> None:
        """A run on a disk that is too small for it, until that is made larger. Only root can make such disks."""
        rng = random.Random(f"{self.seed} disk {number}")
        job, disk, size = rng.choice(JOBS), self.folder / f"disk-{number}", 4 * rng.randint(2, 80)
        disk.mkdir()
        if not mount(disk, f"size={size}k"):
            return
        try:
            ended = self.process(job, disk / "run", Blow())
            assert ended.status in (0, 2), f"it ended with {ended.status}: {ended.said[-600:]}"
            assert mount(disk, "remount,size=64m")
            self.figures["disks that were too small"] += ended.status == 2
            ended = self.process(job, disk / "run", Blow())
            assert ended.status == 0, f"on a larger disk, it ended with {ended.status}: {ended.said[-600:]}"
            wrong = same(result(disk / "run"), self.whole[job], "")
            assert wrong is None, wrong
        except AssertionError as error:
            self.failed(f"disk {number}, {job}, {size} KiB", error)
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def blows(self, job: str, first: Blow | None, rng: random.Random) -> list[Blow]:
        """One to three blows, at random operations; the first may be given."""
        most = self.operations[job]
        kinds = [k for k in BLOWS if job != "ranks" or k not in ("SIGINT", "SIGTERM")]
        others = [Blow(rng.choice(kinds), rng.randint(1, most)) for _ in range(rng.choice((0, 0, 1, 2)))]
        return [first or Blow(rng.choice(kinds), rng.randint(1, most)), *others]

    def judge(self, blow: Blow, ended: Ending) -> None:
        """Whether a process may end like that."""
        assert ended.status != 1, f"an error that says nothing: {ended.said[-600:]}"
        if ended.fell:
            self.figures[blow.kind] += 1
        allowed = {0, 2, 130, -SIGNALS[blow.kind]} if blow.kind in SIGNALS else {0, 2}
        assert ended.status in allowed, f"it ended with {ended.status}: {ended.said[-600:]}"
        assert ended.fell or ended.status == 0, f"without a blow, it ended with {ended.status}: {ended.said[-600:]}"

    def damaged(self, job: str, run: Path, rng: random.Random, about: list[str]) -> str:
        """Damages a file and resumes; what of the run may be different from then on."""
        done = damage(run, rng)
        if done is None:
            return ""
        how, path, content = done
        about.append(f"{path.relative_to(run)} {how}")
        self.figures["files damaged"] += 1
        ended = self.process(job, run, Blow())
        assert ended.status in (0, 2), f"it ended with {ended.status}: {ended.said[-600:]}"
        if ended.status == 2:
            inside = path.relative_to(run).parts
            named = path.name in ended.said or (inside[0] == "checkpoints" and inside[1] in ended.said)
            assert named or path.name in ("run.json", "tokens.bin"), f"refused without a name: {ended.said[-600:]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self.figures["damaged files refused by name"] += 1
            return ""
        self.figures["damaged files that did no harm"] += 1
        return "log" if path.name == "log.jsonl" else ""


def plan(number: int, seed: int, operations: dict[str, int]) -> tuple[str, Blow | None]:
    """Which run an attack is on, and its first blow: each operation of each job is killed once, in random order."""
    if "ranks" in operations and number % RANKS_EVERY == RANKS_EVERY - 1:
        return "ranks", None
    every = [(job, at) for job in JOBS for at in range(1, operations[job] + 1)]
    random.Random(seed).shuffle(every)
    if number < len(every):
        return every[number][0], Blow("kill", every[number][1])
    return random.Random(f"{seed} {number} job").choice(JOBS), None


def worker(campaign: Campaign, first: int, count: int) -> None:
    """Every so many-th attack, until enough processes were killed."""
    number = first
    while campaign.figures["kill"] < count:
        campaign.attack(number, *plan(number, campaign.seed, campaign.operations))
        campaign.figures["runs"] += 1
        number += WORKERS
        if campaign.figures["runs"] % 50 == 0:
            print(f"  worker {first}: {campaign.figures['kill']:,} of {count:,} kills", flush=True)


def main(folder: Path, count: int, seed: int) -> None:
    import onfoot.train.finetune  # noqa: F401 (before the forks, so that they need not)

    prepare(folder)
    campaign = Campaign(folder, seed)
    for job in [*JOBS, *(["ranks"] if MPIEXEC and count >= RANKS_EVERY else [])]:
        campaign.undisturbed(job)
    workers = []
    for first in range(WORKERS):
        workers.append(os.fork())
        if workers[-1] == 0:
            worker(campaign, first, -(-count // WORKERS))
            (folder / f"worker-{first}").write_text(json.dumps([campaign.figures, campaign.failures]))
            os._exit(0)
    for first, pid in enumerate(workers):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        figures, failures = json.loads((folder / f"worker-{first}").read_text())
        campaign.figures.update(figures)
        campaign.failures += failures
    for disk in range(count // 20):
        campaign.small_disk(disk)
    figures = {f"file operations of {job}": n for job, n in campaign.operations.items()}
    figures |= dict(sorted(campaign.figures.items()))
    print(json.dumps({"figures": figures, "failures": campaign.failures}))


if __name__ == "__main__":
    if sys.argv[2] == "rank":
        as_rank(Path(sys.argv[1]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
