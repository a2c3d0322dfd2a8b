"""The native loop that runs kernels on all threads, as LLVM instructions: no Python between kernels, no fork or join.

A job is a list of calls, each the address of a kernel's code and of its arguments. Either all threads run the same
list, with a barrier after each call, or each thread runs its own list and no thread waits for another. A waiting thread
spins a few thousand times and then sleeps: on a busy machine, spinning would take CPU time from the very thread that it
waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

BYTE, I32, I64, VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
SYMBOL = "onfoot.pool"  # runs a job
WORKER, STATE, STIR = f"{SYMBOL}.worker", f"{SYMBOL}.state", f"{SYMBOL}.stir"
SPINS = 2000  # checks before a thread sleeps: 50 to 100 µs
THREAD_BITS = 16  # low bits of a job's number: how many threads it runs on

# The state of the pool, in 64-bit words; words written by different threads are on different cache lines.
JOB = 0  # its number; then the calls, how many, and whether each thread has its own list
CALLS, COUNT, OWN = 1, 2, 3
LIMIT, ACTIVE = 4, 5  # threads numbered from LIMIT on exit; jobs run on at most ACTIVE threads
READY = 6  # threads inside the native loop: waiting for a job, or running one
ARRIVED = 16  # threads at the barrier
OPENED = 32  # how often the barrier has opened
IDLE, HELD = 48, 49  # threads asleep waiting for a job, and at the barrier
LOCK, NEW_JOB, NEW_OPENING = 64, 96, 128  # the operating system's: a mutex and two condition variables
WORDS = 160

CALL_WORDS = 2  # words per call: the addresses of the kernel's code and of its arguments


def _const(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


class _Builder:
    """Builds the functions of the pool, one after the other."""

    def __init__(self, triple: str) -> None:
        self.module = ir.Module(SYMBOL)
        self.module.triple = triple
        self.pause = self._pause(triple.partition("-")[0])
        self.state = ir.GlobalVariable(self.module, ir.ArrayType(I64, WORDS), "onfoot.pool.words")
        self.state.initializer = ir.Constant(self.state.value_type, None)
        self.state.align = 64
        self.state.linkage = "internal"
        pointer = BYTE.as_pointer()
        self.lock = self._outside("lock", I32, [pointer])
        self.unlock = self._outside("unlock", I32, [pointer])
        self.sleep = self._outside("sleep", I32, [pointer, pointer, I32, I32])
        self.wake = self._outside("wake", I32, [pointer])

    def _pause(self, cpu: str) -> Any:
        """Returns a builder of the CPU's spin-wait hint, or of nothing where it has none."""
        if cpu in ("x86_64", "i686", "i386"):
            pause = ir.Function(self.module, ir.FunctionType(VOID, []), "llvm.x86.sse2.pause")
            return lambda build: build.call(pause, [])
        if cpu in ("aarch64", "arm64"):
            hint = ir.Function(self.module, ir.FunctionType(VOID, [I32]), "llvm.aarch64.hint")
            return lambda build: build.call(hint, [ir.Constant(I32, 1)])
        return lambda build: None

    def _outside(self, name: str, result: Any, args: list[Any]) -> Any:
        return ir.Function(self.module, ir.FunctionType(result, args), f"onfoot_{name}")

    def word(self, build: Any, at: int) -> Any:
        return build.gep(self.state, [ir.Constant(I32, 0), ir.Constant(I32, at)], inbounds=True)

    def system(self, build: Any, at: int) -> Any:
        return build.bitcast(self.word(build, at), BYTE.as_pointer())

    def read(self, build: Any, at: int, order: str = "acquire") -> Any:
        return build.load_atomic(self.word(build, at), order, 8)

    def function(self, name: str, result: Any, args: list[Any], internal: bool = True) -> tuple[Any, Any]:
        made = ir.Function(self.module, ir.FunctionType(result, args), name)
        if internal:
            made.linkage = "internal"
        return made, ir.IRBuilder(made.append_basic_block("begin"))

    def waiter(self, name: str, watched: int, sleepers: int, condition: int) -> Any:
        """void(old): returns once the watched word differs from `old`."""
        made, build = self.function(name, VOID, [I64])
        (old,) = made.args
        look, again, slow, check, rest, leave, end = (
            made.append_basic_block(x) for x in ("look", "again", "slow", "check", "rest", "leave", "end")
        )
        begin = build.block
        build.branch(look)
        build.position_at_end(look)
        looks = build.phi(I64)
        looks.add_incoming(_const(0), begin)
        build.cbranch(build.icmp_signed("==", self.read(build, watched), old), again, end)
        build.position_at_end(again)
        self.pause(build)
        more = build.add(looks, _const(1))
        looks.add_incoming(more, again)
        build.cbranch(build.icmp_signed("<", more, _const(SPINS)), look, slow)
        build.position_at_end(slow)
        build.call(self.lock, [self.system(build, LOCK)])
        build.atomic_rmw("add", self.word(build, sleepers), _const(1), "seq_cst")
        build.branch(check)
        build.position_at_end(check)
        build.cbranch(build.icmp_signed("==", self.read(build, watched, "seq_cst"), old), rest, leave)
        build.position_at_end(rest)
        forever, nothing = ir.Constant(I32, -1), ir.Constant(I32, 0)
        build.call(self.sleep, [self.system(build, condition), self.system(build, LOCK), forever, nothing])
        build.branch(check)
        build.position_at_end(leave)
        build.atomic_rmw("sub", self.word(build, sleepers), _const(1), "seq_cst")
        build.call(self.unlock, [self.system(build, LOCK)])
        build.branch(end)
        build.position_at_end(end)
        build.ret_void()
        return made

    def announce(self, build: Any, watched: int, value: Any, sleepers: int, condition: int) -> None:
        """Stores a word, and wakes the threads that sleep until it changes."""
        build.store_atomic(value, self.word(build, watched), "seq_cst", 8)
        asleep = build.icmp_signed(">", self.read(build, sleepers, "seq_cst"), _const(0))
        with build.if_then(asleep, likely=False):
            build.call(self.lock, [self.system(build, LOCK)])
            build.call(self.wake, [self.system(build, condition)])
            build.call(self.unlock, [self.system(build, LOCK)])

    def barrier(self, wait: Any) -> Any:
        """void(threads): returns once this many threads have arrived."""
        made, build = self.function("onfoot.pool.barrier", VOID, [I64])
        opened = self.read(build, OPENED)
        before = build.atomic_rmw("add", self.word(build, ARRIVED), _const(1), "acq_rel")
        last = build.icmp_signed("==", build.add(before, _const(1)), made.args[0])
        with build.if_else(last) as (opens, waits):
            with opens:
                build.store_atomic(_const(0), self.word(build, ARRIVED), "release", 8)
                self.announce(build, OPENED, build.add(opened, _const(1)), HELD, NEW_OPENING)
            with waits:
                build.call(wait, [opened])
        build.ret_void()
        return made

    def list_runner(self, barrier: Any) -> Any:
        """void(calls, count, thread, threads, barriers): runs a list on one thread, with or without barriers."""
        made, build = self.function("onfoot.pool.list", VOID, [I64] * 5)
        calls, count, thread, threads, together = made.args
        with self.for_each(build, count) as i:
            at = build.add(calls, build.mul(i, _const(8 * CALL_WORDS)))
            kind = ir.FunctionType(VOID, [I64, I64, I64])
            code = build.load(build.inttoptr(at, kind.as_pointer().as_pointer()))
            arguments = build.load(build.inttoptr(build.add(at, _const(8)), I64.as_pointer()))
            build.call(code, [arguments, thread, threads])
            with build.if_then(build.icmp_signed("!=", together, _const(0))):
                build.call(barrier, [threads])
        build.ret_void()
        return made

    @contextlib.contextmanager
    def for_each(self, build: Any, count: Any) -> Iterator[Any]:
        """A loop over 0 ... count."""
        begin, function = build.block, build.function
        head, body, end = (function.append_basic_block(x) for x in ("each", "one", "done"))
        build.branch(head)
        build.position_at_end(head)
        i = build.phi(I64)
        i.add_incoming(_const(0), begin)
        build.cbranch(build.icmp_signed("<", i, count), body, end)
        build.position_at_end(body)
        yield i
        i.add_incoming(build.add(i, _const(1)), build.block)
        build.branch(head)
        build.position_at_end(end)

    def list_at(self, build: Any, lists: Any, i: Any) -> tuple[Any, Any]:
        """Where list number i begins, and how many calls it has."""
        at = build.add(lists, build.mul(i, _const(16)))
        first = build.load(build.inttoptr(at, I64.as_pointer()))
        return first, build.load(build.inttoptr(build.add(at, _const(8)), I64.as_pointer()))

    def share(self, run_list: Any, barrier: Any) -> Any:
        """void(thread, threads): one thread's part of the job."""
        made, build = self.function("onfoot.pool.share", VOID, [I64, I64])
        thread, threads = made.args
        calls, count = self.read(build, CALLS, "monotonic"), self.read(build, COUNT, "monotonic")
        own = build.icmp_signed("!=", self.read(build, OWN, "monotonic"), _const(0))
        with build.if_else(own) as (alone, together):
            with alone:
                first, many = self.list_at(build, calls, thread)
                build.call(run_list, [first, many, _const(0), _const(1), _const(0)])
                build.call(barrier, [threads])
            with together:
                build.call(run_list, [calls, count, thread, threads, _const(1)])
        build.ret_void()
        return made

    def runner(self, run_list: Any, share: Any) -> None:
        """void(calls, count, threads, own): starts a job from the calling thread; `own`: one list per thread."""
        made, build = self.function(SYMBOL, VOID, [I64] * 4, internal=False)
        calls, count, threads, own = made.args
        limit = self.read(build, ACTIVE)  # there may be fewer by now than whoever calls has seen
        fewer = build.icmp_signed("<", limit, threads)
        apart = build.icmp_signed("!=", own, _const(0))
        with build.if_then(build.and_(apart, fewer), likely=False):  # one list after the other
            with self.for_each(build, count) as i:
                first, many = self.list_at(build, calls, i)
                build.call(run_list, [first, many, _const(0), _const(1), _const(0)])
            build.ret_void()
        threads = build.select(fewer, limit, threads)
        with build.if_then(build.icmp_signed("<=", threads, _const(1))):
            build.call(run_list, [calls, count, _const(0), _const(1), _const(0)])
            build.ret_void()
        for at, value in ((CALLS, calls), (COUNT, count), (OWN, own)):
            build.store_atomic(value, self.word(build, at), "monotonic", 8)
        number = build.add(build.lshr(self.read(build, JOB), _const(THREAD_BITS)), _const(1))
        job = build.or_(build.shl(number, _const(THREAD_BITS)), threads)
        self.announce(build, JOB, job, IDLE, NEW_JOB)
        build.call(share, [_const(0), threads])
        build.ret_void()

    def worker(self, wait: Any, share: Any) -> None:
        """void(thread, last job before this thread): runs jobs until the thread's number reaches LIMIT."""
        made, build = self.function(WORKER, VOID, [I64, I64], internal=False)
        thread, first = made.args
        build.atomic_rmw("add", self.word(build, READY), _const(1), "seq_cst")
        begin = build.block
        loop, check, work, end = (made.append_basic_block(x) for x in ("loop", "check", "work", "end"))
        build.branch(loop)
        build.position_at_end(loop)
        seen = build.phi(I64)
        seen.add_incoming(first, begin)
        build.call(wait, [seen])
        job = self.read(build, JOB)
        build.cbranch(build.icmp_signed("<", thread, self.read(build, LIMIT)), check, end)
        build.position_at_end(check)
        threads = build.and_(job, _const((1 << THREAD_BITS) - 1))
        seen.add_incoming(job, check)
        build.cbranch(build.icmp_signed("<", thread, threads), work, loop)
        build.position_at_end(work)
        build.call(share, [thread, threads])
        seen.add_incoming(job, work)
        build.branch(loop)
        build.position_at_end(end)
        build.atomic_rmw("sub", self.word(build, READY), _const(1), "seq_cst")
        build.ret_void()

    def stirrer(self) -> None:
        """void(): posts an empty job, so that threads beyond LIMIT wake and exit."""
        _, build = self.function(STIR, VOID, [], internal=False)
        number = build.add(build.lshr(self.read(build, JOB), _const(THREAD_BITS)), _const(1))
        self.announce(build, JOB, build.shl(number, _const(THREAD_BITS)), IDLE, NEW_JOB)
        build.ret_void()

    def where(self) -> None:
        """int(): the address of the state."""
        _, build = self.function(STATE, I64, [], internal=False)
        build.ret(build.ptrtoint(self.state, I64))


def module(triple: str) -> str:
    """The pool as LLVM IR."""
    make = _Builder(triple)
    barrier = make.barrier(make.waiter("onfoot.pool.held", OPENED, HELD, NEW_OPENING))
    run_list = make.list_runner(barrier)
    share = make.share(run_list, barrier)
    make.runner(run_list, share)
    make.worker(make.waiter("onfoot.pool.idle", JOB, IDLE, NEW_JOB), share)
    make.stirrer()
    make.where()
    return str(make.module)
