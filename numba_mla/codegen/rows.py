"""Rows of elements: converted, packed into lanes, scaled, blended, looked through."""

from __future__ import annotations

from collections.abc import Callable

from ..isa import Isa
from ..memory import LINE
from .native import native_format
from .text import Function
from .vector import ElementFormat, constant, emit_bfloat16s, multiply_add


def build_blend(isa: Isa) -> Function:
    """``target = a wa + b wb`` over one row of float32; exact where a weight is 1 and the other 0."""
    f = Function("blend", [("ptr", "target"), ("ptr", "a"), ("ptr", "b"), ("i64", "n"), ("float", "wa"),
                           ("float", "wb")])  # fmt: skip

    def emit(width: int, at: str) -> None:
        kind = f"<{width} x float>"
        first = f.value(f"fmul {kind} {f.load(kind, f.offset('%a', at))}, {f.splat(width, 'float', '%wa')}")
        second = f.load(kind, f.offset("%b", at))
        blended = multiply_add(f, width, second, f.splat(width, "float", "%wb"), first)
        f.store(kind, blended, f.offset("%target", at))

    _each_vector(f, isa, emit)
    return f


def build_scale(isa: Isa) -> Function:
    """``row = row factor`` over one row of float32."""
    f = Function("scale", [("ptr", "row"), ("i64", "n"), ("float", "factor")])

    def emit(width: int, at: str) -> None:
        kind, pointer = f"<{width} x float>", f.offset("%row", at)
        product = f.value(f"fmul {kind} {f.load(kind, pointer)}, {f.splat(width, 'float', '%factor')}")
        f.store(kind, product, pointer)

    _each_vector(f, isa, emit)
    return f


def build_widen(isa: Isa, element: ElementFormat) -> Function:
    """One row to float32; ``ahead`` is a row that will be read soon, prefetched alongside."""
    f = Function(f"widen_{element.name}", [("ptr", "target"), ("ptr", "source"), ("i64", "n"), ("ptr", "ahead")])

    def emit(width: int, at: str) -> None:
        place = f.value(f"mul i64 {f.value(f'lshr i64 {at}, 2')}, {element.num_bytes}")
        raw = f.load(f"<{width} x {element.llvm}>", f.offset("%source", place))
        f.do(f"call void @llvm.prefetch.p0(ptr {f.offset('%ahead', place)}, i32 0, i32 2, i32 1)")
        f.store(f"<{width} x float>", element.emit_widen(f, width, raw), f.offset("%target", at))

    _each_vector(f, isa, emit)
    return f


def build_widen_pairs(isa: Isa, element: ElementFormat) -> Function:
    """A panel of pairs of rows, [row pair][column][2], to float32 rows; ``columns`` are whole vectors."""
    f = Function(f"widen_pairs_{element.name}", [("ptr", "target"), ("ptr", "source"), ("i64", "pairs"),
                                                 ("i64", "columns")])  # fmt: skip
    width, wide = isa.vector_width, f"<{2 * isa.vector_width} x float>"
    row_bytes = f.value("shl i64 %columns, 2")
    with f.loop(0, "%pairs", 1) as pair:
        source = f.offset(
            "%source", f.value(f"mul i64 {f.value(f'mul i64 {pair.index}, %columns')}, {2 * element.num_bytes}")
        )
        even = f.offset("%target", f.value(f"mul i64 {f.value(f'shl i64 {pair.index}, 1')}, {row_bytes}"))
        odd = f.offset(even, row_bytes)
        with f.loop(0, "%columns", width) as column:
            at = f.value(f"mul i64 {column.index}, {2 * element.num_bytes}")
            both = element.emit_widen(f, 2 * width, f.load(f"<{2 * width} x {element.llvm}>", f.offset(source, at)))
            for target, first in ((even, 0), (odd, 1)):
                indices = ", ".join(f"i32 {2 * n + first}" for n in range(width))
                part = f.value(f"shufflevector {wide} {both}, {wide} poison, <{width} x i32> <{indices}>")
                f.store(f"<{width} x float>", part, f.offset(target, f.value(f"shl i64 {column.index}, 2")))
    return f


def build_narrow(isa: Isa, element: ElementFormat) -> Function:
    """One row of float32 to the element's format, rounded to nearest even."""
    f = Function(f"narrow_{element.name}", [("ptr", "target"), ("ptr", "source"), ("i64", "n")])

    def emit(width: int, at: str) -> None:
        _narrow_at(f, element, width, at, f.load(f"<{width} x float>", f.offset("%source", at)))

    _each_vector(f, isa, emit)
    return f


def build_narrow_rows(isa: Isa, element: ElementFormat) -> Function:
    """``num_rows`` rows of float32, ``n`` wide, times ``factor``, to rows of the element's format."""
    f = Function(f"narrow_rows_{element.name}", [("ptr", "target"), ("i64", "ldt"), ("ptr", "source"), ("i64", "lds"),
                                                 ("i64", "num_rows"), ("i64", "n"), ("float", "factor")])  # fmt: skip
    with f.loop(0, "%num_rows", 1) as row:
        target = f.offset("%target", f.value(f"mul i64 {row.index}, %ldt"))
        source = f.offset("%source", f.value(f"mul i64 {row.index}, %lds"))

        def emit(width: int, at: str) -> None:
            kind = f"<{width} x float>"
            x = f.value(f"fmul {kind} {f.load(kind, f.offset(source, at))}, {f.splat(width, 'float', '%factor')}")
            _narrow_at(f, element, width, at, x, target)

        _each_vector(f, isa, emit)
    return f


def build_quantise(isa: Isa, element: ElementFormat) -> Function:
    """One row of float32 over a scale to the element's format, rounded to nearest even.

    A true division: a product with the reciprocal would round otherwise.
    """
    f = Function(f"quantise_{element.name}", [("ptr", "target"), ("ptr", "source"), ("i64", "n"), ("float", "scale")])

    def emit(width: int, at: str) -> None:
        kind = f"<{width} x float>"
        x = f.load(kind, f.offset("%source", at))
        _narrow_at(f, element, width, at, f.value(f"fdiv {kind} {x}, {f.splat(width, 'float', '%scale')}"))

    _each_vector(f, isa, emit)
    return f


def _narrow_at(f: Function, element: ElementFormat, width: int, at: str, x: str, target: str = "%target") -> None:
    """Store float32 values, in the element's format, to the target's place for float32 offset ``at``."""
    place = f.value(f"mul i64 {f.value(f'lshr i64 {at}, 2')}, {element.num_bytes}")
    f.store(f"<{width} x {element.llvm}>", element.emit_narrow(f, width, x), f.offset(target, place))


def build_pack(isa: Isa, element: ElementFormat) -> Function:
    """One vector's worth of rows to columns: ``target[step, lane] = rows[lane][step]``.

    A step is one element, as float32, or two native ones side by side; an odd last one is joined by zero.

    Arguments of the function: ``target`` with ``ldt`` bytes a step; ``rows``, as many addresses as a vector
    has lanes; ``n`` elements a row.
    """
    f = Function(f"pack_{element.name}", [("ptr", "target"), ("i64", "ldt"), ("ptr", "rows"), ("i64", "n")])
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    rows = [f.load("ptr", f.offset("%rows", 8 * lane), align=8) for lane in range(width)]
    step_bytes = isa.k_pack * element.num_bytes

    def load(lanes: int, pointer: str) -> str:
        if isa.k_pack == 1:
            return element.emit_widen(f, lanes, f.load(f"<{lanes} x {element.llvm}>", pointer))
        return f.load(f"<{lanes} x float>", pointer)

    steps = f.value(f"udiv i64 %n, {isa.k_pack}")
    whole = f.value(f"and i64 {steps}, {-width}")
    with f.loop(0, whole, width) as k:
        at = f.value(f"mul i64 {k.index}, {step_bytes}")
        target = f.offset("%target", f.value(f"mul i64 {k.index}, %ldt"))
        for column in transpose(f, width, [load(width, f.offset(row, at)) for row in rows]):
            f.store(kind, column, target)
            target = f.offset(target, "%ldt")
    with f.loop(whole, steps, 1) as k:
        at = f.value(f"mul i64 {k.index}, {step_bytes}")
        target = f.offset("%target", f.value(f"mul i64 {k.index}, %ldt"))
        for lane, row in enumerate(rows):
            f.store("<1 x float>", load(1, f.offset(row, at)), f.offset(target, 4 * lane))
    if isa.k_pack > 1:
        with f.loop(f.value(f"mul i64 {steps}, {isa.k_pack}"), "%n", 1) as rest:
            at = f.value(f"mul i64 {rest.index}, {element.num_bytes}")
            target = f.offset("%target", f.value(f"mul i64 {steps}, %ldt"))
            for lane, row in enumerate(rows):
                last = f.value(f"zext {element.llvm} {f.load(element.llvm, f.offset(row, at))} to i32")
                f.store("i32", last, f.offset(target, 4 * lane))
    return f


def build_any_nonfinite(isa: Isa) -> Function:
    """1 if any of the first ``n`` native elements of any of the rows is NaN or infinite, else 0."""
    f = Function("any_nonfinite", [("ptr", "rows"), ("i64", "keys"), ("i64", "n")], returns="i64")
    native = native_format(isa)
    scalar_bits, exponent = {"float32": ("i32", 0x7F800000), "bfloat16": ("i16", 0x7F80)}[native.name]

    def found(width: int, pointer: str, so_far: str) -> str:
        bits = f"<{width} x {scalar_bits}>"
        mask = "<" + ", ".join([f"{scalar_bits} {exponent}"] * width) + ">"
        high = f.value(f"and {bits} {f.load(bits, pointer)}, {mask}")
        special = f.value(f"icmp eq {bits} {high}, {mask}")
        return f.value(f"or <{width} x i1> {so_far}, {special}")

    width = isa.vector_bytes // native.num_bytes
    whole = f.value(f"and i64 %n, {-width}")
    vector, scalar = f"<{width} x i1>", "<1 x i1>"
    with f.loop(0, "%keys", 1, [(vector, "zeroinitializer"), (scalar, "zeroinitializer")]) as key:
        row = f.load("ptr", f.offset("%rows", f.value(f"shl i64 {key.index}, 3")), align=8)
        with f.loop(0, whole, width, [(vector, key.carried[0])]) as part:
            pointer = f.offset(row, f.value(f"mul i64 {part.index}, {native.num_bytes}"))
            part.following = [found(width, pointer, part.carried[0])]
        with f.loop(whole, "%n", 1, [(scalar, key.carried[1])]) as rest:
            pointer = f.offset(row, f.value(f"mul i64 {rest.index}, {native.num_bytes}"))
            rest.following = [found(1, pointer, rest.carried[0])]
        key.following = [part.carried[0], rest.carried[0]]
    lanes = f.value(f"bitcast {vector} {key.carried[0]} to i{width}")
    any_lane = f.value(f"icmp ne i{width} {lanes}, 0")
    last = f.value(f"extractelement {scalar} {key.carried[1]}, i64 0")
    either = f.value(f"or i1 {any_lane}, {last}")
    f.do(f"ret i64 {f.value(f'zext i1 {either} to i64')}")
    return f


def build_finish(isa: Isa, element: ElementFormat) -> Function:
    """One row of sums to the result: ``row * factor + 0`` in the element's format, columns put in order.

    The sum turns -0 into +0: a key of weight 0 after the last visible one does so too, and padding must not
    show. ``row`` is used up, its columns filled up to whole steps.
    """
    f = Function(f"finish_{element.name}", [("ptr", "target"), ("ptr", "row"), ("i64", "n"), ("float", "factor")])

    def put(width: int, at: str, x: str) -> None:
        kind = f"<{width} x float>"
        product = f.value(f"fmul {kind} {x}, {f.splat(width, 'float', '%factor')}")
        _narrow_at(f, element, width, at, f.value(f"fadd {kind} {product}, {constant(width, 0.0)}"))

    step, start = isa.column_step, "0"
    if isa.has_step_order:
        start = f.value(f"and i64 %n, {-step}")
        with f.loop(0, start, step) as pair:
            at = f.value(f"shl i64 {pair.index}, 2")
            if element.name == isa.native:
                _finish_native_step(f, isa, at)
            else:
                for half, vector in enumerate(load_ordered(f, isa, f.offset("%row", at))):
                    put(isa.vector_width, at if half == 0 else f.value(f"add i64 {at}, {isa.vector_bytes}"), vector)
        with f.loop(start, "%n", step) as last:
            pointer = f.offset("%row", f.value(f"shl i64 {last.index}, 2"))
            for half, vector in enumerate(load_ordered(f, isa, pointer)):
                f.store(f"<{isa.vector_width} x float>", vector, f.offset(pointer, half * isa.vector_bytes))

    def emit(width: int, at: str) -> None:
        put(width, at, f.load(f"<{width} x float>", f.offset("%row", at)))

    _each_vector(f, isa, emit, start)
    return f


def build_finish_rows(element: ElementFormat) -> Function:
    """``num_rows`` rows of sums, ``lds`` bytes apart, to results at the addresses ``rows``, each by its factor."""
    f = Function(f"finish_rows_{element.name}", [("ptr", "rows"), ("ptr", "source"), ("i64", "lds"),
                                                 ("i64", "num_rows"), ("i64", "n"), ("ptr", "factors")])  # fmt: skip
    with f.loop(0, "%num_rows", 1) as row:
        target = f.load("ptr", f.offset("%rows", f.value(f"shl i64 {row.index}, 3")), align=8)
        source = f.offset("%source", f.value(f"mul i64 {row.index}, %lds"))
        factor = f.load("float", f.offset("%factors", f.value(f"shl i64 {row.index}, 2")))
        f.do(f"call void @finish_{element.name}(ptr {target}, ptr {source}, i64 %n, float {factor})")
    return f


def _finish_native_step(f: Function, isa: Isa, at: str) -> None:
    """Two vectors of sums to bfloat16, in order."""
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    factor, zero = f.splat(width, "float", "%factor"), constant(width, 0.0)
    halves = []
    for half in range(2):
        x = f.load(kind, f.offset(f.offset("%row", at), half * isa.vector_bytes))
        halves.append(f.value(f"fadd {kind} {f.value(f'fmul {kind} {x}, {factor}')}, {zero}"))
    words = emit_bfloat16s(f, isa, halves[0], halves[1], _step_order(width))
    f.store(f"<{2 * width} x i16>", words, f.offset("%target", f.value(f"lshr i64 {at}, 1")))


def _step_order(width: int) -> list[int]:
    """Where each column's sum is, of two vectors of them, after steps of two keys.

    Such a step interleaves the low, then the high halves of each 128 bits of its rows.
    """
    return [4 * (c // 8) + c % 4 + (width if c % 8 >= 4 else 0) for c in range(2 * width)]


def load_ordered(f: Function, isa: Isa, pointer: str) -> list[str]:
    """Two vectors of sums from the order in which a value step brings columns to that of memory."""
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    place = _step_order(width)
    both = ", ".join(f"{kind} {f.load(kind, f.offset(pointer, half * isa.vector_bytes))}" for half in range(2))
    halves = [", ".join(f"i32 {n}" for n in place[half * width : (half + 1) * width]) for half in range(2)]
    return [f.value(f"shufflevector {both}, <{width} x i32> <{half}>") for half in halves]


def build_list_rows(isa: Isa) -> Function:
    """``rows[i] = first + i * stride``, addresses of ``count`` rows."""
    f = Function("list_rows", [("ptr", "rows"), ("i64", "first"), ("i64", "stride"), ("i64", "count")])
    width = max(1, isa.vector_width // 2)
    kind = f"<{width} x i64>"
    steps = "<" + ", ".join(f"i64 {n}" for n in range(width)) + ">"
    offsets = f.value(f"mul {kind} {steps}, {f.splat(width, 'i64', '%stride')}")
    whole = f.value(f"and i64 %count, {-width}")
    with f.loop(0, whole, width) as row:
        first = f.value(f"add i64 %first, {f.value(f'mul i64 {row.index}, %stride')}")
        addresses = f.value(f"add {kind} {offsets}, {f.splat(width, 'i64', first)}")
        f.store(kind, addresses, f.offset("%rows", f.value(f"shl i64 {row.index}, 3")))
    with f.loop(whole, "%count", 1) as row:
        address = f.value(f"add i64 %first, {f.value(f'mul i64 {row.index}, %stride')}")
        f.store("i64", address, f.offset("%rows", f.value(f"shl i64 {row.index}, 3")))
    return f


def build_prefetch() -> Function:
    """Ask for ``num_rows`` rows, by address, of ``num_bytes`` each, which will be read or written soon."""
    f = Function("prefetch", [("ptr", "rows"), ("i64", "num_rows"), ("i64", "num_bytes")])
    with f.loop(0, "%num_rows", 1) as row:
        start = f.load("ptr", f.offset("%rows", f.value(f"shl i64 {row.index}, 3")), align=8)
        with f.loop(0, "%num_bytes", LINE) as line:
            f.do(f"call void @llvm.prefetch.p0(ptr {f.offset(start, line.index)}, i32 0, i32 3, i32 1)")
        # Rows that begin anywhere have a line more than their length has.
        last = f.offset(start, f.value("sub i64 %num_bytes, 1"))
        f.do(f"call void @llvm.prefetch.p0(ptr {last}, i32 0, i32 3, i32 1)")
    return f


def build_clear() -> Function:
    """Set bytes to zero."""
    f = Function("clear", [("ptr", "target"), ("i64", "num_bytes")])
    f.do("call void @llvm.memset.p0.i64(ptr %target, i8 0, i64 %num_bytes, i1 false)")
    return f


def build_copy() -> Function:
    """Copy bytes."""
    f = Function("copy", [("ptr", "target"), ("ptr", "source"), ("i64", "num_bytes")])
    f.do("call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %num_bytes, i1 false)")
    return f


def _each_vector(f: Function, isa: Isa, emit: Callable[[int, str], None], start: str = "0") -> None:
    """Loop over elements up to ``n`` by whole vectors, then one by one; ``emit(width, at)`` gets float32 bytes."""
    whole = f.value(f"and i64 %n, {-isa.vector_width}")
    with f.loop(start, whole, isa.vector_width) as part:
        emit(isa.vector_width, f.value(f"shl i64 {part.index}, 2"))
    with f.loop(whole, "%n", 1) as rest:
        emit(1, f.value(f"shl i64 {rest.index}, 2"))


def transpose(f: Function, width: int, rows: list[str]) -> list[str]:
    """A width x width transpose in log2(width) rounds: round ``d`` swaps bit d of the row and lane numbers."""
    kind = f"<{width} x float>"
    distance = 1
    while distance < width:
        low = [i if not i & distance else i - distance + width for i in range(width)]
        high = [i + distance if not i & distance else i + width for i in range(width)]
        following = list(rows)
        for i in range(width):
            if i & distance:
                continue
            pair = f"{kind} {rows[i]}, {kind} {rows[i + distance]}"
            for place, lanes in ((i, low), (i + distance, high)):
                indices = ", ".join(f"i32 {n}" for n in lanes)
                following[place] = f.value(f"shufflevector {pair}, <{width} x i32> <{indices}>")
        rows = following
        distance *= 2
    return rows
