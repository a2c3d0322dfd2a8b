"""Compiles the kernels into a folder; run by `compiler` in a separate process.

Several such processes share the work: each takes the next kernel that none has taken. A kernel that does not compile is
recorded as an error; a temporary failure (a full disk, no memory) ends the process, and nothing is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
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

from onfoot.kernels import FILES, cpu
from onfoot.kernels.jit import ALL, OPTIONS, Kernel, arrayobj, cgutils, types
from onfoot.kernels.library import ALIGNED, C_CONTIGUOUS, DATA, DTYPE, DTYPE_NUMBER, FLAGS, NDIM, SHAPE, STRIDES
from onfoot.kernels.private import write_own
from onfoot.recording import native_loop
from onfoot.recording.native_loop import CALL_WORDS, SYMBOL

BYTE, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
ANYWHERE = 4096  # a dummy address for symbols that are resolved when the code is loaded; nothing runs here
# External symbols that machine code may use: the C library's, and those that `library` provides.
KNOWN = {"memset", "memcpy", "memmove", "logf", "expf", "sqrtf", "sqrt", "log", SYMBOL}


def compiled(kernel: Kernel) -> bytes:
    """The machine code of a kernel and its entry point, as an object file."""
    typing, context = cpu_target.typing_context, cpu_target.target_context
    kinds, _ = sigutils.normalize_signature(f"void({kernel.signature}, i8, i8)")
    result = compile_extra(typing, context, kernel.function, kinds, types.void, _flags(), {})
    with global_compiler_lock:
        library = context.codegen().create_library(kernel.symbol)
        library.enable_object_caching()
        module = library.create_ir_module(kernel.symbol)
        kind = context.call_conv.get_function_type(types.void, result.signature.args)
        body = ir.Function(module, kind, result.fndesc.llvm_func_name)
        _kernel_entry(kernel, context, module, body, result.signature.args)
        library.add_ir_module(module)
        library.add_linking_library(result.library)
        _hide_all_but({kernel.symbol, f"{kernel.symbol}.thread"}, library)
        library.finalize()
        for one in library._final_module.functions:
            if one.is_declaration and not one.name.startswith("llvm.") and one.name not in KNOWN:
                raise NotImplementedError(f"undefined symbol {one.name}")
        return library._get_compiled_object()


def _hide_all_but(entries: set[str], library: Any) -> None:
    """Makes the entry points the only names that an object file defines for others.

    Numba numbers functions in each process: two object files could define different functions of the same name, of
    which the loader would take one for both.
    """
    optimize = library._optimize_final_module

    def optimize_and_hide() -> None:
        optimize()
        module = library._final_module
        for one in (*module.functions, *module.global_variables):
            if not one.is_declaration and one.name not in entries:
                one.linkage = "internal"

    library._optimize_final_module = optimize_and_hide


def _flags() -> Flags:
    """Numba's flags, plus noalias: arrays do not overlap, which Numba does not assume by default."""
    flags: Any = Flags()
    flags.noalias = flags.no_cpython_wrapper = True
    flags.error_model = OPTIONS["error_model"]
    flags.fastmath = FastMathOptions(OPTIONS["fastmath"])
    return flags


def _kernel_entry(kernel: Kernel, context: Any, module: Any, body: Any, kinds: Any) -> None:
    """int entry(arguments, threads, out): 0, or the number of an invalid array argument.

    The arguments are written to a frame of 64-bit words, which every thread reads: for an array its address, shape and
    strides; for a scalar its value; and at the end the maximum number of threads. If `out` is given, the frame is only
    written there, for a call that is made later.
    """
    kinds = kinds[:-2]  # without `thread` and `threads`
    pointer = BYTE.as_pointer()
    passed = {types.boolean: I64}
    given = [pointer if _is_array(k) else passed.get(k) or context.get_value_type(k) for k in kinds]
    entry = ir.Function(module, ir.FunctionType(I32, [*given, I64, I64]), kernel.symbol)
    build = ir.IRBuilder(entry.append_basic_block())
    words: list[Any] = []
    for number, (kind, value) in enumerate(zip(kinds, entry.args, strict=False), start=1):
        if _is_array(kind):
            with build.if_then(_is_wrong(build, kind, value), likely=False):
                build.ret(ir.Constant(I32, number))
            words += _array_words(build, kind, value)
        else:
            words.append(_as_word(build, value))
    limit = _checked_sizes(build, kernel, entry.args)
    words.append(limit)
    one = _thread_entry(kernel, context, module, body, kinds)
    own = build.alloca(I64, len(words))
    to = entry.args[-1]
    asked = build.icmp_signed("!=", to, ir.Constant(I64, 0))
    frame = build.select(asked, to, build.ptrtoint(own, I64))
    for i, word in enumerate(words):
        build.store(word, build.inttoptr(build.add(frame, ir.Constant(I64, 8 * i)), I64.as_pointer()))
    with build.if_then(asked, likely=False):
        build.ret(ir.Constant(I32, 0))
    with build.if_else(build.icmp_signed("==", limit, ir.Constant(I64, 1))) as (alone, together):
        with alone:
            build.call(one, [frame, ir.Constant(I64, 0), ir.Constant(I64, 1)])
        with together:
            call = build.alloca(I64, CALL_WORDS)
            build.store(build.ptrtoint(one, I64), call)
            build.store(frame, build.gep(call, [ir.Constant(I64, 1)]))
            run = cgutils.get_or_insert_function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), SYMBOL)
            build.call(run, [build.ptrtoint(call, I64), ir.Constant(I64, 1), limit, ir.Constant(I64, 0)])
    build.ret(ir.Constant(I32, 0))


def _checked_sizes(build: Any, kernel: Kernel, arguments: Any) -> Any:
    """The number of threads; if sizes do not match, the entry returns minus the number of that array."""
    threads = arguments[-2]
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


def _thread_entry(kernel: Kernel, context: Any, module: Any, body: Any, kinds: Any) -> Any:
    """void(frame, thread, threads): the function that the pool calls on each thread."""
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), f"{kernel.symbol}.thread")
    build = ir.IRBuilder(entry.append_basic_block())
    frame, thread, threads = entry.args
    index = 0

    def word() -> Any:
        nonlocal index
        index += 1
        return build.load(build.inttoptr(build.add(frame, ir.Constant(I64, 8 * (index - 1))), I64.as_pointer()))

    values = [_array(context, build, k, word) if _is_array(k) else _from_word(build, k, word()) for k in kinds]
    limit = word()
    some = build.select(build.icmp_signed("<", limit, threads), limit, threads)
    every = (*kinds, types.int64, types.int64)
    with build.if_then(build.icmp_signed("<", thread, some)):
        context.call_conv.call_function(build, body, types.void, every, [*values, thread, some])
    build.ret_void()
    return entry


def _as_word(build: Any, value: Any) -> Any:
    """A scalar as a 64-bit word."""
    if value.type == ir.FloatType():
        return build.zext(build.bitcast(value, I32), I64)
    return build.bitcast(value, I64) if value.type == ir.DoubleType() else value


def _from_word(build: Any, kind: Any, word: Any) -> Any:
    """A scalar from a 64-bit word."""
    if kind == types.float32:
        return build.bitcast(build.trunc(word, I32), ir.FloatType())
    if kind == types.float64:
        return build.bitcast(word, ir.DoubleType())
    return build.icmp_signed("!=", word, ir.Constant(I64, 0)) if kind == types.boolean else word


def _is_array(kind: Any) -> bool:
    return isinstance(kind, types.Array)


def _field(build: Any, at: Any, offset: int, kind: Any) -> Any:
    return build.load(build.bitcast(build.gep(at, [ir.Constant(I64, offset)]), kind.as_pointer()))


def _is_wrong(build: Any, kind: Any, array: Any) -> Any:
    """Whether an array has the wrong dtype, number of axes or order, or is not aligned."""

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


def _array_words(build: Any, kind: Any, array: Any) -> list[Any]:
    """The words that describe a NumPy array: its address, shape and strides."""
    shape, strides = (_field(build, array, at, I64.as_pointer()) for at in (SHAPE, STRIDES))
    sizes = [build.load(build.gep(at, [ir.Constant(I64, i)])) for at in (shape, strides) for i in range(kind.ndim)]
    return [_field(build, array, DATA, I64), *sizes]


def _array(context: Any, build: Any, kind: Any, word: Any) -> Any:
    """Numba's array structure from those words."""
    element = context.get_data_type(kind.dtype)
    made = context.make_array(kind)(context, build)
    arrayobj.populate_array(
        made,
        data=build.inttoptr(word(), element.as_pointer()),
        shape=[word() for _ in range(kind.ndim)],
        strides=[word() for _ in range(kind.ndim)],
        itemsize=context.get_abi_sizeof(element),
        meminfo=None,
        parent=None,
    )
    return made._getvalue()


def pool_code() -> bytes:
    """The machine code of the thread pool."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_process_triple()
    machine = binding.Target.from_triple(triple).create_target_machine(opt=2, reloc="pic", codemodel="jitdefault")
    made = binding.parse_assembly(native_loop.module(triple))
    made.verify()
    return machine.emit_object(made)


def main() -> None:
    folder = Path(sys.argv[1])
    settings: Any = numba.config
    settings.CPU_NAME, settings.CPU_FEATURES = cpu.NAME, cpu.FEATURES
    assert cpu_target.target_context.codegen().magic_tuple()[1:] == (cpu.NAME, cpu.FEATURES)
    for file in FILES:
        import_module(f"onfoot.kernels.{file}")
    binding.add_symbol(SYMBOL, ANYWHERE)
    tasks: dict[str, Callable[[], bytes]] = {"pool": pool_code}
    tasks |= {kernel.name: partial(compiled, kernel) for kernel in ALL}
    for name, task in tasks.items():
        try:
            (folder / f"{name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            write_own(folder / f"{name}.o", task())
        except (OSError, MemoryError):
            raise
        except Exception as error:
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
