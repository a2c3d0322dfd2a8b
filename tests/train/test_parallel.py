"""Parts of data-parallel runs: shares, buckets, gradients emitted when final, the rank monitor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onfoot
from onfoot.data.batches import Share
from onfoot.train import rank_monitor
from onfoot.train.parallel import World, launched, world
from onfoot.train.vector import BucketLayout
from oracles import scrambled

counts = st.integers(0, 60)
sizes = st.integers(1, 9)


@given(counts, sizes, st.integers(1, 7))
def test_the_shares_of_all_ranks_are_all_rows_once(n: int, size: int, most: int) -> None:
    shares = [Share(rank, size) for rank in range(size)]
    assert [row for share in shares for row in share.of(n)] == list(range(n))
    lengths = [len(share.of(n)) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    for share in shares:
        pieces = share.pieces(n, most)
        assert [row for piece in pieces for row in piece] == list(share.of(n))
        assert all(1 <= len(piece) <= most for piece in pieces)
        assert len(pieces) == -(-len(share.of(n)) // most)


@given(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=8), st.integers(1, 40), sizes)
def test_every_element_is_in_one_bucket_and_belongs_to_one_rank(
    shapes: list[list[int]], bucket: int, size: int
) -> None:
    layout = BucketLayout({str(i): tuple(shape) for i, shape in enumerate(shapes)}, bucket, size)
    total = sum(int(np.prod(shape)) for shape in shapes)
    assert layout.total == total and total <= sum(layout.lengths) < total + size
    assert all(length % size == 0 for length in layout.lengths)
    where = set()
    owners: dict[tuple[str, int], tuple[int, int]] = {}
    for name in layout.places:
        for place in layout.places[name]:
            assert place in layout.inside[place.bucket]
            assert place.offset + place.end - place.begin <= layout.lengths[place.bucket]
            where |= {(place.bucket, place.offset + i) for i in range(place.end - place.begin)}
        for piece in layout.owned(name):
            for i in range(piece.end - piece.begin):
                owners[name, piece.begin + i] = (piece.rank, piece.offset + i)
    assert len(where) == total  # no two elements at the same place
    assert len(owners) == total and len(set(owners.values())) == total
    assert all(0 <= rank < size and 0 <= offset < layout.shard for rank, offset in owners.values())


def test_a_ranks_part_of_a_bucket_is_where_reduce_scatter_puts_it() -> None:
    layout = BucketLayout({"a": (7,), "b": (3, 5), "c": (2,)}, 6, 3)
    vector = np.zeros(sum(layout.lengths))
    values = {name: np.random.default_rng(0).normal(size=int(np.prod(s))) for name, s in layout.shapes.items()}
    for name, places in layout.places.items():
        for p in places:
            begin = p.bucket * layout.bucket + p.offset
            vector[begin : begin + p.end - p.begin] = values[name][p.begin : p.end]
    shards = np.zeros((3, layout.shard))
    for k, length in enumerate(layout.lengths):
        parts = vector[k * layout.bucket : k * layout.bucket + length].reshape(3, -1)
        shards[:, layout.chunk(k)] = parts
    for name in values:
        for piece in layout.owned(name):
            got = shards[piece.rank, piece.offset : piece.offset + piece.end - piece.begin]
            assert (got == values[name][piece.begin : piece.end]).all()


FAMILIES: dict[str, Any] = {
    "tied": onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2),
    "untied": onfoot.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=False, lm_head_bias=True
    ),
    "llama": onfoot.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_gradient_is_emitted_once_when_final_in_the_order_of_the_buckets(family: str, adapter: bool) -> None:
    model = onfoot.Model(FAMILIES[family], scrambled(onfoot.create(FAMILIES[family]).params, 0), "float64")
    if adapter:
        model.add_lora(r=2)
        for name in model.trainable:
            model.params[name] += 0.1
    tokens = np.random.default_rng(1).integers(0, 11, (2, 8))
    loss, grads = model.loss_and_grads(tokens)
    taken: list[tuple[str, np.ndarray]] = []
    again, left = model.loss_and_grads(tokens, on_gradient=lambda name, grad: taken.append((name, grad.copy())))
    assert again == loss and left == {}
    assert sorted(name for name, _ in taken) == sorted(grads) == sorted(model.trainable)
    for name, grad in taken:
        assert (grad == grads[name]).all(), name  # a tied table: both paths are in it
    if not adapter and family == "tied":
        assert {name for name, _ in taken[-2:]} == {"transformer.wte.weight", "transformer.wpe.weight"}
    place = {name: i for i, name in enumerate(BucketLayout.of(model, 1.0, 2).places)}
    late = [place[name] - i for i, (name, _) in enumerate(taken)]
    assert max(map(abs, late)) <= 4  # so that buckets fill up from the first to the last


def test_a_run_without_mpiexec_has_one_rank_and_imports_no_mpi() -> None:
    code = (
        "import sys; from onfoot.train.parallel import world; w = world(); "
        "assert (w.rank, w.size, w.writes) == (0, 1, True); assert 'mpi4py' not in sys.modules; print('alone')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert result.stdout.strip() == "alone", result.stderr
    assert world().sum(2, 3) == [2, 3] and world().allgather_json({"a": 1}) == [{"a": 1}] and world().any(True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a batch script itself, not a step of it
        ({}, (0, 1)),
    ],
    ids=str,
)
def test_rank_and_size_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in list(os.environ):
        if name.startswith(("PMI_", "OMPI_", "MV2_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == expected


def test_under_mpiexec_without_mpi4py_a_run_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('not here')")
    result = subprocess.run(
        [sys.executable, "-m", "onfoot", "train", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, env=_environment(tmp_path) | {"PMI_RANK": "1", "PMI_SIZE": "2"},
    )  # fmt: skip
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    assert "this is rank 1 of 2 of an MPI run, but mpi4py is not installed" in result.stderr
    assert 'pip install "onfoot[mpi]"' in result.stderr and "Traceback" not in result.stderr


def test_without_mpi4py_every_module_imports_and_a_run_trains_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    code = (
        "import importlib, pkgutil, onfoot\n"
        "for module in pkgutil.walk_packages(onfoot.__path__, 'onfoot.', onerror=lambda name: None):\n"
        "    if module.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ImportError as error: assert 'not here' not in str(error), (module.name, error)\n"
        "from onfoot.cli import app\n"
        f"run, text = {str(tmp_path / 'run')!r}, {str(tmp_path / 'text.txt')!r}\n"
        "sizes = '--n-layer 1 --n-head 1 --n-embd 8 --context 8 --steps 2 --shard --sample-tokens 2'.split()\n"
        "app(['train', text, '--out', run, *sizes], standalone_mode=False)\n"
        "app(['train', '--resume', run], standalone_mode=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "validation loss" in result.stdout and "is complete" in result.stdout


def test_an_mpi_that_is_not_the_launchers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n\ndef get_vendor():\n    return ('Another MPI',)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "onfoot", "train", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, env=_environment(tmp_path) | {"PMI_RANK": "0", "PMI_SIZE": "2"},
    )  # fmt: skip
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    assert "Another MPI) sees 1 rank: it does not match the mpiexec" in result.stderr


def _environment(*first: Path) -> dict[str, str]:
    """The environment of a process that no launcher has started, with folders to import from before all others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "OMPI_", "MV2_", "SLURM_"))}
    path = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), ("2", 2)])
def test_threads_are_set_after_numpy_is_loaded_unless_the_user_has_set_them(asked: str | None, expected: int) -> None:
    from onfoot import threads

    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    code = (
        "import numpy, threadpoolctl; from onfoot import threads\n"
        "def get(): return max(pool['num_threads'] for pool in threadpoolctl.threadpool_info())\n"
        "before = get(); threads.limit(1); print(before, get())"
    )
    env = {k: v for k, v in os.environ.items() if k not in threads.VARIABLES}
    env |= {} if asked is None else {"OMP_NUM_THREADS": asked}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    before, after = map(int, out.split())
    assert before >= 2 and after == expected


TOKEN = "0123456789abcdef" * 2


class RankMonitor:
    """A rank monitor, and connections to it like those of ranks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", rank_monitor.__file__, "127.0.0.1", "3"],
            env={**os.environ, rank_monitor.SECRET_ENV: TOKEN},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def connect(self, rank: int, token: str = TOKEN) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(token.encode())
        self.say(connection, rank=rank, host=f"host-{rank}", pid=100 + rank)
        return connection

    @staticmethod
    def say(connection: socket.socket, **what: Any) -> None:
        connection.sendall(json.dumps(what).encode() + b"\n")

    def said(self) -> str:
        """Its stderr, after it has exited."""
        return self.process.communicate(timeout=20)[1].decode()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_rank_to_die_is_named_with_the_last_complete_checkpoint(tmp_path: Path, first: int) -> None:
    for name in ("step-0000004", "step-0000008", ".writing-step-0000012"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    watch = RankMonitor()
    ranks = [watch.connect(rank) for rank in range(3)]
    for rank in ranks:
        watch.say(rank, run=str(tmp_path), resume="mpiexec -n 3 onfoot train --resume there")
    time.sleep(0.2)
    os.kill(watch.process.pid, signal.SIGSTOP)  # stopped: it sees all the deaths at once, as on a busy machine
    for rank in [ranks[first], *(r for i, r in enumerate(ranks) if i != first)]:
        rank.close()
    os.kill(watch.process.pid, signal.SIGCONT)
    said = watch.said()
    assert f"rank {first} on host-{first} (process {100 + first}) died" in said and said.count("died") == 1
    assert f"the last complete checkpoint is {tmp_path / 'checkpoints' / 'step-0000008'}" in said
    assert "resume with: mpiexec -n 3 onfoot train --resume there" in said


def test_a_sign_off_is_not_a_death_and_a_failure_is_not_reported_twice() -> None:
    for failed in (False, True):
        watch = RankMonitor()
        ranks = [watch.connect(rank) for rank in range(2)]
        watch.say(ranks[1], bye=True, failed=failed)
        ranks[1].close()
        if failed:  # then the launcher kills the others
            time.sleep(0.1)
            ranks[0].close()
        else:
            watch.say(ranks[0], bye=True, failed=False)
            ranks[0].close()
        assert watch.said() == ""


def test_ranks_that_their_launcher_leaves_running_are_told_to_exit() -> None:
    watch = RankMonitor()
    dead, waiting = watch.connect(0), watch.connect(1)
    dead.close()
    waiting.settimeout(20)
    assert waiting.recv(1) == b"x"
    assert "rank 0 on host-0 (process 100) died" in watch.said()


def test_unauthenticated_clients_are_ignored() -> None:
    watch = RankMonitor()
    rank = watch.connect(0)
    stranger = watch.connect(7, token="guess" * 8)
    stranger.settimeout(20)
    with suppress(ConnectionResetError):  # as the other end does not read what it has not asked for
        assert stranger.recv(1) == b""
    watch.say(rank, bye=True, failed=False)
    rank.close()
    assert watch.said() == ""


def test_without_ranks_the_monitor_exits_with_the_process_that_started_it() -> None:
    watch = RankMonitor()
    assert watch.process.stdin is not None
    watch.process.stdin.close()
    assert watch.process.wait(timeout=20) == 0


def test_a_single_rank_compares_nothing_and_raises_its_own_errors() -> None:
    alone = World()
    alone.compare({"weights": np.ones(3)}, "step 1")
    with pytest.raises(KeyError), alone.guard(Path("run"), "train"):
        alone.run_all_or_raise(lambda: {}["missing"])
    error = ValueError("agreed")
    assert alone.agreed(error) is error
