"""Compiles the kernels into a folder; run by `compiler` in a process of its own.

Several such processes share the work: each takes the next kernel that nobody has taken. A kernel that does not compile
is noted; what may pass (a full disk, no memory) ends the process, and nothing is remembered.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import sigutils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target

from onfoot.kernels import PAIRS, SINGLES, cpu
from onfoot.kernels.jit import ALL, OPTIONS, Kernel, arrayobj, cgutils, types
from onfoot.kernels.library import ALIGNED, C_CONTIGUOUS, DATA, DTYPE, DTYPE_NUMBER, FLAGS, NDIM, SHAPE, STRIDES
from onfoot.kernels.private import write_own

BYTE, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
ANYWHERE = 4096  # an address for symbols that are found when the code is loaded; nothing is run here
# What machine code may ask for beyond itself: the C library's, and what `library` provides.
KNOWN = {"memset", "memcpy", "memmove", "logf", "expf", "sqrtf", "sqrt", "log", "numba_parallel_for"}


def compiled(kernel: Kernel) -> bytes:
    """The machine code of a kernel and of its entry, as an object file."""
    arguments = kernel.signature if kernel.routine else f"{kernel.signature}, i8, i8"
    typing, context = cpu_target.typing_context, cpu_target.target_context
    kinds, _ = sigutils.normalize_signature(f"void({arguments})")
    result = compile_extra(typing, context, kernel.function, kinds, types.void, _flags(), {})
    with global_compiler_lock:
        library = context.codegen().create_library(kernel.symbol)
        library.enable_object_caching()
        module = library.create_ir_module(kernel.symbol)
        kind = context.call_conv.get_function_type(types.void, result.signature.args)
        body = ir.Function(module, kind, result.fndesc.llvm_func_name)
        (_routine_entry if kernel.routine else _kernel_entry)(kernel, context, module, body, result.signature.args)
        library.add_ir_module(module)
        library.add_linking_library(result.library)
        library.finalize()
        for one in library._final_module.functions:
            if one.is_declaration and not one.name.startswith(("llvm.", "onfoot.")) and one.name not in KNOWN:
                raise NotImplementedError(f"it needs {one.name}")
        return library._get_compiled_object()


def _flags() -> Flags:
    """Arrays do not overlap, which Numba would not assume by itself; the rest is as everywhere."""
    flags: Any = Flags()
    flags.noalias = flags.no_cpython_wrapper = True
    flags.error_model = OPTIONS["error_model"]
    flags.fastmath = FastMathOptions(OPTIONS["fastmath"])
    return flags


def _routine_entry(kernel: Kernel, context: Any, module: Any, body: Any, kinds: Any) -> None:
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * len(kinds)), kernel.symbol)
    build = ir.IRBuilder(entry.append_basic_block())
    context.call_conv.call_function(build, body, types.void, kinds, entry.args)
    build.ret_void()


def _kernel_entry(kernel: Kernel, context: Any, module: Any, body: Any, kinds: Any) -> None:
    """int entry(arguments, threads): 0, or the number of an array that is not what it should be.

    The arguments are put into a frame, which every thread reads.
    """
    kinds = kinds[:-2]  # without the thread and the threads
    pointer = BYTE.as_pointer()
    passed = {types.boolean: I64}
    given = [pointer if _is_array(k) else passed.get(k) or context.get_value_type(k) for k in kinds]
    entry = ir.Function(module, ir.FunctionType(I32, [*given, I64]), kernel.symbol)
    build = ir.IRBuilder(entry.append_basic_block())
    values = []
    for number, (kind, value) in enumerate(zip(kinds, entry.args, strict=False), start=1):
        if _is_array(kind):
            with build.if_then(_is_wrong(build, kind, value), likely=False):
                build.ret(ir.Constant(I32, number))
            values.append(_array(context, build, kind, value))
        elif kind == types.boolean:
            values.append(build.icmp_signed("!=", value, ir.Constant(I64, 0)))
        else:
            values.append(value)
    threads = _checked_sizes(build, kernel, entry.args)
    frame_type = ir.LiteralStructType([value.type for value in [*values, threads]])
    frame = build.alloca(frame_type)
    for i, value in enumerate([*values, threads]):
        build.store(value, build.gep(frame, [ir.Constant(I32, 0), ir.Constant(I32, i)]))
    one = _thread_entry(kernel, context, module, body, kinds, frame_type)
    arguments = build.bitcast(frame, pointer)
    first = build.alloca(pointer)
    build.store(ir.Constant(pointer, None), first)
    step, count = build.alloca(I64), build.alloca(I64)
    build.store(ir.Constant(I64, 1), step)
    build.store(threads, count)
    with build.if_else(build.icmp_signed("==", threads, ir.Constant(I64, 1))) as (alone, together):
        with alone:
            build.call(one, [first, count, step, arguments])
        with together:
            kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, pointer, pointer, pointer, I64, I64, I32])
            run = cgutils.get_or_insert_function(module, kind, "numba_parallel_for")
            four = [build.bitcast(value, pointer) for value in (one, first, count, step)]
            none, single = ir.Constant(I64, 0), ir.Constant(I64, 1)
            build.call(run, [*four, arguments, none, single, build.trunc(threads, I32)])
    build.ret(ir.Constant(I32, 0))


def _checked_sizes(build: Any, kernel: Kernel, arguments: Any) -> Any:
    """Returns the number of threads; or, from the entry, minus the number of an array whose sizes do not agree."""
    threads = arguments[-1]
    known: dict[str, Any] = {}
    for number, (axes, array) in enumerate(zip(kernel.sizes, arguments, strict=False), start=1):
        wrong = ir.Constant(ir.IntType(1), 0)
        names = axes.removesuffix("?").split()
        shape = _field(build, array, SHAPE, I64.as_pointer()) if names else None
        sizes = [build.load(build.gep(shape, [ir.Constant(I64, i)])) for i in range(len(names))]
        for name, size in zip(names, sizes, strict=True):
            if name == "threads":
                threads = build.select(build.icmp_signed("<", size, threads), size, threads)
            elif name != "." and name in known:
                wrong = build.or_(wrong, build.icmp_signed("!=", size, known[name]))
            elif name != "." and not axes.endswith("?"):
                known[name] = size
        if axes.endswith("?"):
            wrong = build.and_(wrong, build.icmp_signed("!=", sizes[0], ir.Constant(I64, 0)))
        with build.if_then(wrong, likely=False):
            build.ret(ir.Constant(I32, -number))
    return threads


def _thread_entry(kernel: Kernel, context: Any, module: Any, body: Any, kinds: Any, frame_type: Any) -> Any:
    """What the pool calls on each thread. Its first pointer began at 0 and was moved on by 1 for each thread."""
    pointer = BYTE.as_pointer()
    arguments = [pointer.as_pointer(), I64.as_pointer(), I64.as_pointer(), pointer]
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), f"{kernel.symbol}.thread")
    build = ir.IRBuilder(entry.append_basic_block())
    thread = build.ptrtoint(build.load(entry.args[0]), I64)
    frame = build.bitcast(entry.args[3], frame_type.as_pointer())
    *values, threads = (
        build.load(build.gep(frame, [ir.Constant(I32, 0), ir.Constant(I32, i)])) for i in range(len(kinds) + 1)
    )
    every = (*kinds, types.int64, types.int64)
    context.call_conv.call_function(build, body, types.void, every, [*values, thread, threads])
    build.ret_void()
    return entry


def _is_array(kind: Any) -> bool:
    return isinstance(kind, types.Array)


def _field(build: Any, at: Any, offset: int, kind: Any) -> Any:
    return build.load(build.bitcast(build.gep(at, [ir.Constant(I64, offset)]), kind.as_pointer()))


def _is_wrong(build: Any, kind: Any, array: Any) -> Any:
    """Whether an array has another dtype, number of axes or order than it should, or lies across its numbers' grid."""

    def differs(value: Any, wanted: int) -> Any:
        return build.icmp_signed("!=", value, ir.Constant(I32, wanted))

    wrong = differs(_field(build, array, NDIM, I32), kind.ndim)
    number = _field(build, _field(build, array, DTYPE, BYTE.as_pointer()), DTYPE_NUMBER, I32)
    wanted = np.dtype(str(kind.dtype))
    same = {np.dtype(code).num for code in "bBhHiIlLqQfd" if np.dtype(code) == wanted}
    other = ir.Constant(ir.IntType(1), 1)
    for one in same:
        other = build.and_(other, differs(number, one))
    wrong = build.or_(wrong, other)
    wanted_flags = ALIGNED | (C_CONTIGUOUS if kind.layout == "C" else 0)
    flags = build.and_(_field(build, array, FLAGS, I32), ir.Constant(I32, wanted_flags))
    return build.or_(wrong, differs(flags, wanted_flags))


def _array(context: Any, build: Any, kind: Any, array: Any) -> Any:
    """A NumPy array as Numba has it."""
    element = context.get_data_type(kind.dtype)
    made = context.make_array(kind)(context, build)
    shape, strides = (_field(build, array, at, I64.as_pointer()) for at in (SHAPE, STRIDES))

    def numbers(at: Any) -> list[Any]:
        return [build.load(build.gep(at, [ir.Constant(I64, i)])) for i in range(kind.ndim)]

    arrayobj.populate_array(
        made,
        data=_field(build, array, DATA, element.as_pointer()),
        shape=numbers(shape),
        strides=numbers(strides),
        itemsize=context.get_abi_sizeof(element),
        meminfo=None,
        parent=None,
    )
    return made._getvalue()


def main() -> None:
    folder = Path(sys.argv[1])
    settings: Any = numba.config
    settings.CPU_NAME, settings.CPU_FEATURES = cpu.NAME, cpu.FEATURES
    assert cpu_target.target_context.codegen().magic_tuple()[1:] == (cpu.NAME, cpu.FEATURES)
    for file in sorted({*PAIRS, *SINGLES}):
        import_module(f"onfoot.kernels.{file}")
    for symbol in ("numba_parallel_for", *(kernel.symbol for kernel in ALL)):
        binding.add_symbol(symbol, ANYWHERE)
    for kernel in ALL:
        try:
            (folder / f"{kernel.name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            write_own(folder / f"{kernel.name}.o", compiled(kernel))
        except (OSError, MemoryError):
            raise
        except Exception as error:
            (folder / f"{kernel.name}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
