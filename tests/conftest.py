"""What holds for every test: in CI nothing is skipped, and random examples have a seed that repeats them.

And how many threads kernels run on.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores
# oneDNN believes a virtual machine that reports AMX and refuses it, and dies in PyTorch's products in bfloat16
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None, print_blob=True)
settings.register_profile("same", COMMON, derandomize=True)
settings.register_profile("fresh", COMMON, derandomize=False)


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in each run, unless there is a seed for others; Ctrl-C is heard in the background, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("same" if config.getoption("hypothesis_seed") is None else "fresh")


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> int:
    """A seed that nobody has seen before, unless the run has one: FRESH_SEED for these tests alone, as CI sets it
    from the commit, so that a commit's run can be repeated. A failed test says which."""
    given = request.config.getoption("hypothesis_seed") or os.environ.get("FRESH_SEED") or None
    seed = secrets.randbits(31) if given is None else int(given)
    print(f"a fresh seed, {seed}; --hypothesis-seed={seed} repeats it")
    return seed


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Lets kernels run on so many threads, whatever the number of cores."""
    from onfoot.recording import pool

    before = pool.threads()

    def on(n: int) -> None:
        monkeypatch.setattr(pool, "_most", max(n, pool._most))
        pool.set_threads(n)

    yield on
    pool.set_threads(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, on_threads: Callable[[int], None]) -> int:
    """A test on 1, 2 and 3 threads."""
    on_threads(request.param)
    return int(request.param)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.getoption("hypothesis_seed")
    if seed is not None:
        terminalreporter.write_line(f"random examples of seed {seed}; --hypothesis-seed={seed} repeats them")


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, reasons: list[str]) -> None:
    """Makes a skip a failure where CI is set, except for what is marked as optional with a reason."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and not any(reasons):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was to be left out, and in CI nothing is: {why}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report, [reason for marker in item.iter_markers("optional") for reason in marker.args])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report, [])  # a whole file: a missing package
    return report
