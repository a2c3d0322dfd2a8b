"""SIMD in Numba: what its auto-vectorised loops cannot do, as LLVM instructions.

Addresses are plain integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onfoot.kernels.cpu import TILE_ROWS, TILE_VECTORS, WIDTH
from onfoot.kernels.jit import arrayobj, cgutils, exact, intrinsic, types

TILE_COLUMNS = TILE_VECTORS * WIDTH
UNROLL = 4

I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, WIDTH)
BYTES = 4  # per float
AHEAD = 4096  # bytes: prefetch distance for memory that is read once


def _const(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


def _pointer(build: Any, address: Any, element: Any, offset: int = 0) -> Any:
    return build.inttoptr(build.add(address, _const(offset)), element.as_pointer())


def _load(build: Any, address: Any, offset: int = 0) -> Any:
    return build.load(_pointer(build, address, VECTOR, offset), align=BYTES)


def _store(build: Any, value: Any, address: Any, offset: int = 0) -> None:
    build.store(value, _pointer(build, address, VECTOR, offset), align=BYTES)


def _choose(build: Any, first: list[Any], first_block: Any, second: list[Any], second_block: Any) -> list[Any]:
    """Phi nodes: the values from whichever block was executed before this one."""
    chosen = []
    for a, b in zip(first, second, strict=True):
        phi = build.phi(a.type)
        phi.add_incoming(a, first_block)
        phi.add_incoming(b, second_block)
        chosen.append(phi)
    return chosen


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """The address of an array's first element."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return build.ptrtoint(context.make_array(array)(context, build, args[0]).data, I64)

    return types.int64(array), build


@intrinsic
def keep_apart(typing: Any) -> Any:
    """Keeps LLVM from inlining the function that contains this: it compiles slowly and gains nothing."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        build.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float with these 32 bits."""
    return types.float32(types.int32), lambda context, build, signature, args: build.bitcast(args[0], FLOAT)


@intrinsic
def bits_from_float(typing: Any, number: Any) -> Any:
    """The 32 bits of a float."""
    return types.int32(types.float32), lambda context, build, signature, args: build.bitcast(args[0], I32)


def _prefetch(build: Any, at: Any, write: int) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
    build.call(function, [build.inttoptr(at, byte)] + [ir.Constant(I32, n) for n in (write, 3, 1)])


def _view(number: Any, args: list[Any]) -> Any:
    """args = (address, *shape): the memory at an address as an array in C order."""
    kind = types.Array(number, len(args) - 1, "C")

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        at, *shape = args
        element = context.get_data_type(number)
        made = context.make_array(kind)(context, build)
        size = context.get_abi_sizeof(element)
        strides = [_const(size)]
        for n in reversed(shape[1:]):
            strides.insert(0, build.mul(strides[0], n))
        arrayobj.populate_array(
            made,
            data=build.inttoptr(at, element.as_pointer()),
            shape=shape,
            strides=strides,
            itemsize=size,
            meminfo=None,
            parent=None,
        )
        return made._getvalue()

    return kind(*[types.int64] * len(args)), build


@intrinsic
def floats(typing: Any, at: Any, n: Any) -> Any:
    """The n floats at an address, as an array."""
    return _view(types.float32, [at, n])


@intrinsic
def shorts(typing: Any, at: Any, n: Any) -> Any:
    """The n unsigned 16-bit integers at an address, as an array."""
    return _view(types.uint16, [at, n])


@intrinsic
def integers(typing: Any, at: Any, n: Any) -> Any:
    """The n 64-bit integers at an address, as an array."""
    return _view(types.int64, [at, n])


@intrinsic
def load(typing: Any, at: Any) -> Any:
    """The float at an address."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return build.load(_pointer(build, args[0], FLOAT))

    return types.float32(types.int64), build


@intrinsic
def store(typing: Any, at: Any, value: Any) -> Any:
    """Writes a float to an address."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        build.store(args[1], _pointer(build, args[0], FLOAT))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), build


@intrinsic
def greatest(typing: Any, at: Any, n: Any) -> Any:
    """The maximum of the n ≥ 1 floats at an address; LLVM would compare them one by one."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        at, n = args

        def each(count: Any, step: int, kind: Any, best: Any) -> None:
            with cgutils.for_range(build, count) as loop:
                where = build.add(at, build.mul(loop.index, _const(step)))
                value = build.load(_pointer(build, where, kind), align=BYTES)
                build.store(larger(build, build.load(best), value), best)

        first = build.load(_pointer(build, at, FLOAT))
        best = cgutils.alloca_once_value(build, lanes(build, first))
        vectors = build.sdiv(n, _const(WIDTH))
        each(vectors, WIDTH * BYTES, VECTOR, best)
        top, half = build.load(best), WIDTH // 2
        while half:
            top, half = larger(build, top, _turned(build, top, half)), half // 2
        last = cgutils.alloca_once_value(build, build.extract_element(top, ir.Constant(I32, 0)))
        done = build.mul(vectors, _const(WIDTH))
        at = build.add(at, build.mul(done, _const(BYTES)))
        each(build.sub(n, done), BYTES, FLOAT, last)
        return build.load(last)

    return types.float32(types.int64, types.int64), build


def larger(build: Any, a: Any, b: Any) -> Any:
    """The elementwise maximum."""
    return build.select(build.fcmp_ordered(">", a, b), a, b)


def lanes(build: Any, number: Any) -> Any:
    """A vector with the same number in all lanes."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = build.insert_element(undefined, number, ir.Constant(I32, 0))
    return build.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))


def multiply_add(build: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c of vectors."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return build.call(cgutils.get_or_insert_function(build.module, kind, f"llvm.fmuladd.v{WIDTH}f32"), [a, b, c])


@intrinsic
def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c of numbers."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOAT, [FLOAT] * 3)
        return build.call(cgutils.get_or_insert_function(build.module, kind, "llvm.fmuladd.f32"), args)

    return types.float32(types.float32, types.float32, types.float32), code


@exact
def add_product(a: float, b: float, c: float) -> float:
    """a b + c. LLVM may not reorder a sum of these, so that it has the same bits in every loop."""
    return _fused(a, b, c)


def _turned(build: Any, vector: Any, by: int) -> Any:
    """The vector with its lanes rotated."""
    mask = ir.Constant(ir.VectorType(I32, WIDTH), [(i + by) % WIDTH for i in range(WIDTH)])
    return build.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), mask)


@intrinsic
def copy_vector(typing: Any, source: Any, target: Any) -> Any:
    """Copies one vector of floats."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        _store(build, _load(build, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def multiply_vector(typing: Any, source: Any, target: Any) -> Any:
    """Multiplies one vector of floats by another."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        _store(build, build.fmul(_load(build, args[0]), _load(build, args[1])), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def transpose_square(typing: Any, source: Any, source_row: Any, target: Any, target_row: Any) -> Any:
    """Transposes WIDTH × WIDTH floats in registers. Row strides are in bytes."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        source, source_row, target, target_row = args
        rows = [_load(build, build.add(source, build.mul(source_row, _const(i)))) for i in range(WIDTH)]
        half = WIDTH // 2
        masks = [
            ir.Constant(
                ir.VectorType(I32, WIDTH), [lane for i in range(half) for lane in (start + i, start + i + WIDTH)]
            )
            for start in (0, half)
        ]
        for _ in range(WIDTH.bit_length() - 1):  # each round interleaves row i with row i + WIDTH/2
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [build.shuffle_vector(a, b, mask) for a, b in pairs for mask in masks]
        for i, row in enumerate(rows):
            _store(build, row, build.add(target, build.mul(target_row, _const(i))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


def _tile(name: str, rows_contiguous: bool, vectors: int = TILE_VECTORS) -> Any:
    """The register tile, for a with contiguous rows or columns; or only its first vectors."""

    def tile(
        typing: Any,
        depth: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        c: Any,
        c_row: Any,
        bias: Any,
        skip: Any,
        skip_row: Any,
    ) -> Any:
        def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
            _build_tile(build, rows_contiguous, vectors, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    tile.__name__ = tile.__qualname__ = name
    tile.__doc__ = f"""c = a b + bias + skip for one register tile: TILE_ROWS × depth times depth × TILE_COLUMNS.

    Strides are in bytes. `a_stride` is between a's {"rows" if rows_contiguous else "columns"}; along the other axis a
    is contiguous, and so is b. `bias` is one row or 0; `skip` is a tile (it may be c itself) or 0.
    """
    return intrinsic(tile)


def _build_tile(
    build: Any,
    rows_contiguous: bool,
    vectors: int,
    depth: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    c: Any,
    c_row: Any,
    bias: Any,
    skip: Any,
    skip_row: Any,
) -> None:
    c_rows = [build.add(c, build.mul(c_row, _const(i))) for i in range(TILE_ROWS)]
    for row in c_rows:
        _prefetch(build, row, write=1)
    if rows_contiguous:
        offsets = [build.mul(a_stride, _const(i)) for i in range(TILE_ROWS)]
        a_step: Any = _const(BYTES)
    else:
        offsets = [_const(i * BYTES) for i in range(TILE_ROWS)]
        a_step = a_stride

    def step(a: Any, b: Any, sums: list[Any]) -> list[Any]:
        """One column of a times one row of b, added to the tile."""
        row = [_load(build, b, j * WIDTH * BYTES) for j in range(vectors)]
        new = []
        for i in range(TILE_ROWS):
            number = lanes(build, build.load(_pointer(build, build.add(a, offsets[i]), FLOAT)))
            new += [multiply_add(build, number, row[j], sums[i * vectors + j]) for j in range(vectors)]
        return new

    def repeat(times: Any, unroll: int, state: list[Any]) -> list[Any]:
        """`times` rounds of `unroll` steps. The state is [a, b, *sums]."""
        before, body, after = build.block, build.append_basic_block(), build.append_basic_block()
        build.cbranch(build.icmp_signed(">", times, _const(0)), body, after)
        build.position_at_end(body)
        count = build.phi(I64)
        count.add_incoming(_const(0), before)
        held = [build.phi(value.type) for value in state]
        for phi, value in zip(held, state, strict=True):
            phi.add_incoming(value, before)
        a, b, *sums = held
        for _ in range(unroll):
            sums = step(a, b, sums)
            a, b = build.add(a, a_step), build.add(b, _const(TILE_COLUMNS * BYTES))
        counted = build.add(count, _const(1))
        count.add_incoming(counted, body)
        for phi, value in zip(held, [a, b, *sums], strict=True):
            phi.add_incoming(value, body)
        build.cbranch(build.icmp_signed("<", counted, times), body, after)
        build.position_at_end(after)
        return _choose(build, state, before, [a, b, *sums], body)

    def add_tile(at: Any, row: Any, sums: list[Any]) -> list[Any]:
        """Adds a tile from memory, unless its address is 0."""
        before, body, after = build.block, build.append_basic_block(), build.append_basic_block()
        build.cbranch(build.icmp_signed("!=", at, _const(0)), body, after)
        build.position_at_end(body)
        added = []
        for i in range(TILE_ROWS):
            start = build.add(at, build.mul(row, _const(i)))
            for j in range(vectors):
                added.append(build.fadd(sums[i * vectors + j], _load(build, start, j * WIDTH * BYTES)))
        build.branch(after)
        build.position_at_end(after)
        return _choose(build, sums, before, added, body)

    zero = ir.Constant(VECTOR, [0.0] * WIDTH)
    state = [a, b] + [zero] * (TILE_ROWS * vectors)
    state = repeat(build.sdiv(depth, _const(UNROLL)), UNROLL, state)
    sums = repeat(build.srem(depth, _const(UNROLL)), 1, state)[2:]
    sums = add_tile(bias, _const(0), sums)
    sums = add_tile(skip, skip_row, sums)
    for i in range(TILE_ROWS):
        for j in range(vectors):
            _store(build, sums[i * vectors + j], c_rows[i], j * WIDTH * BYTES)


tile_of_rows = _tile("tile_of_rows", rows_contiguous=True)
tile_of_columns = _tile("tile_of_columns", rows_contiguous=False)
# Narrower tiles, for the last columns of a product: one vector wide, and two if a full tile has three.
row_tile_1 = _tile("row_tile_1", rows_contiguous=True, vectors=1)
column_tile_1 = _tile("column_tile_1", rows_contiguous=False, vectors=1)
row_tile_2 = _tile("row_tile_2", rows_contiguous=True, vectors=min(2, TILE_VECTORS))
column_tile_2 = _tile("column_tile_2", rows_contiguous=False, vectors=min(2, TILE_VECTORS))
