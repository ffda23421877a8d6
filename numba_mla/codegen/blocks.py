"""Register blocks: the two matrix products of attention, unrolled over rows and vectors.

Both are written in terms of a record's tile operations and sizes; which instructions these are is the
record's affair.
"""

from __future__ import annotations

from collections.abc import Callable

from ..isa import Isa
from ..memory import LINE
from .interleave import join_pair
from .text import Function
from .vector import constant, multiply_add

# Bytes of one step of a dot product, whatever the element: one float32 or a pair of 16-bit elements.
STEP_BYTES = 4
# Steps of a product with weights written out between two turns of its loop: one cache line of a row.
WEIGHT_UNROLL = 16
# How far memory is prefetched that is read once: weights by a single block of rows, and by the bandwidth loop.
STREAM_AHEAD_BYTES = 8192
# Sums that the peak loop keeps under way.
PEAK_SUMS = 12


def dot_name(rows: int, vectors: int) -> str:
    """Symbol of the score block for that many rows and vectors of lanes."""
    return f"dot_{rows}x{vectors}"


def scaled_name(rows: int, vectors: int) -> str:
    """Symbol of the block of scaled weights for that many rows and vectors of columns."""
    return f"dot_scaled_{rows}x{vectors}"


def value_name(lanes: int, vectors: int) -> str:
    """Symbol of the value block for that many lanes and vectors of columns."""
    return f"value_{lanes}x{vectors}"


def _multiply_add(f: Function, isa: Isa, row: str, b: list[str], sums: list[str]) -> list[str]:
    """sums[v] + (the row's next step, in all lanes) . b[v].

    Each straight from memory, several times over where there are several: the load units have room, and
    a register less is taken.
    """
    text = isa.multiply_add.text
    return [f.operation(text, width=isa.vector_width, row=row, b=x, acc=acc) for x, acc in zip(b, sums, strict=True)]


def build_dot(isa: Isa, rows: int, vectors: int) -> Function:
    """``C[row, lane] (+)= sum_k A[row, k] B[k, lane]``: rows by pointer, B packed, C float32.

    Arguments of the function: ``a``, the addresses of the rows; ``ahead``, the addresses of rows that will be
    read soon, prefetched line by line; ``b`` with ``ldb`` bytes a step; ``k`` steps; ``c`` with ``ldc`` bytes
    a row; ``accumulate``, 0 to start from zero; ``soon``, what will be read for B, and ``soon_step``, how many
    bytes of it a step prefetches. One sum runs over k in order for every element of C, so that
    neither the block's shape nor the way k is cut into calls changes a bit.
    """
    f = Function(
        dot_name(rows, vectors),
        [("ptr", "a"), ("ptr", "ahead"), ("ptr", "b"), ("i64", "ldb"), ("i64", "k"), ("ptr", "c"), ("i64", "ldc"),
         ("i64", "accumulate"), ("ptr", "soon"), ("i64", "soon_step")],
    )  # fmt: skip
    target = [f.offset("%c", f.value(f"mul i64 %ldc, {r}")) for r in range(rows)]
    row = [f.load("ptr", f.offset("%a", 8 * r), align=8) for r in range(rows)]
    sums = emit_dot(f, isa, row, "%ahead", ("%b", "%ldb"), "%k", start_sums(f, isa, target, vectors),
                    ("%soon", "%soon_step"))  # fmt: skip
    store_block(f, isa, target, sums, vectors)
    return f


def build_dot_scaled(isa: Isa, rows: int, vectors: int) -> Function:
    """``C[row, column] (+)= scales[column] sum_k A[row, k] B[k, column]``: a block of k of scaled weights.

    Arguments of the function: as ``build_dot`` has them, and ``scales``, a float32 for each column. The sum starts
    from zero, and is scaled as it is added.
    """
    f = Function(
        scaled_name(rows, vectors),
        [("ptr", "a"), ("ptr", "ahead"), ("ptr", "b"), ("i64", "ldb"), ("i64", "k"), ("ptr", "c"), ("i64", "ldc"),
         ("ptr", "scales"), ("i64", "accumulate")],
    )  # fmt: skip
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    row = [f.load("ptr", f.offset("%a", 8 * r), align=8) for r in range(rows)]
    zeros = [constant(width, 0.0)] * (rows * vectors)
    sums = emit_dot(f, isa, row, "%ahead", ("%b", "%ldb"), "%k", zeros)
    scales = [f.load(kind, f.offset("%scales", v * isa.vector_bytes)) for v in range(vectors)]
    add_scaled(f, isa, [f.offset("%c", f.value(f"mul i64 %ldc, {r}")) for r in range(rows)], sums, scales)
    return f


def emit_dot(f: Function, isa: Isa, row: list[str], ahead: str | None, b: tuple[str, str], k: str, sums: list[str],
             soon: tuple[str, str] | None = None, unroll: int = WEIGHT_UNROLL,
             take: Callable[[str], list[str]] | None = None) -> list[str]:  # fmt: skip
    """The sums of a dot block over ``k`` steps, from those given on.

    ``row`` are the addresses of the rows, ``ahead`` the place of those to prefetch, if any; ``b`` is B's address
    and the bytes of its steps; ``soon``, if B streams from memory, what to prefetch for it, and how many bytes of that
    in a step; ``unroll``, a power of two, the steps of a turn. (A turn prefetches as much as it reads; where less is
    asked for, most of it is on its way already. Steps of float32 prefetch B itself.) ``take`` writes how the vectors
    of a step of B come from its address, where they are not simply loaded.
    """
    kind = f"<{isa.vector_width} x float>"
    rows, vectors = len(row), len(sums) // len(row)
    packed_b, ldb = b
    lines = -(-vectors * isa.vector_bytes // LINE)
    # A few rows take less time than their weights do to come from memory, which go straight to the nearest cache.
    locality = 2 if rows == isa.blocks.weight[0] else 3

    def load(here: str) -> list[str]:
        return [f.load(kind, f.offset(here, v * isa.vector_bytes)) for v in range(vectors)]

    def step(index: str, unrolled: int, sums: list[str], ahead: list[str]) -> list[str]:
        at = f.value(f"shl i64 {index}, 2")
        packed = f.offset(packed_b, f.value(f"mul i64 {index}, {ldb}"))
        here = [f.offset(pointer, at) for pointer in row]
        for pointer in ahead:
            for line in range(0, unrolled * STEP_BYTES, LINE):
                place = f.offset(pointer, at if line == 0 else f.value(f"add i64 {at}, {line}"))
                f.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 2, i32 1)")
        streams = soon is not None and unrolled > 1
        if soon is not None and isa.k_pack > 1:
            stream = f.offset(soon[0], f.value(f"mul i64 {index}, {soon[1]}"))
        for u in range(unrolled):
            b = load(packed) if take is None else take(packed)
            for line in range(lines if streams else 0):
                # LLVM spills sums of float32 where prefetches have addresses of their own.
                place = (
                    f.offset(stream, LINE * (u * lines + line))
                    if isa.k_pack > 1
                    else f.offset(packed, STREAM_AHEAD_BYTES + LINE * line)
                )
                f.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {locality}, i32 1)")
            for r in range(rows):
                block_row = slice(r * vectors, (r + 1) * vectors)
                sums[block_row] = _multiply_add(f, isa, f.offset(here[r], u * STEP_BYTES), b, sums[block_row])
            if u + 1 < unrolled:
                packed = f.offset(packed, ldb)
        return sums

    def rows_ahead() -> list[str]:
        return [] if ahead is None else [f.load("ptr", f.offset(ahead, 8 * r), align=8) for r in range(rows)]

    whole = f.value(f"and i64 {k}, {-unroll}")
    with f.loop(0, whole, unroll, [(kind, s) for s in sums]) as loop:
        loop.following = step(loop.index, unroll, list(loop.carried), rows_ahead())
    # Rows that begin anywhere have a line more than their length has.
    last = f.value(f"sub i64 {f.value(f'shl i64 {k}, 2')}, 1")
    for pointer in rows_ahead():
        f.do(f"call void @llvm.prefetch.p0(ptr {f.offset(pointer, last)}, i32 0, i32 2, i32 1)")
    with f.loop(whole, k, 1, [(kind, s) for s in loop.carried]) as rest:
        rest.following = step(rest.index, 1, list(rest.carried), [])
    return rest.carried


def build_value(isa: Isa, lanes: int, vectors: int) -> Function:
    """``O[lane, column] = O[lane, column] alpha[lane] + sum_k P[k, lane] V[k, column]``.

    Arguments of the function: ``v``, the addresses of the value rows (``ldv`` is not looked at), or where pairs of
    them have been brought together, the panel of these, with ``ldv`` bytes each; ``at``, the bytes from a row's
    start to the block's first column; ``k`` keys, whole dot steps; ``p`` with ``ldp`` bytes a step; ``o`` with ``ldo``
    bytes a lane; ``alpha``, the lanes' rescaling; ``accumulate``, 0 to start from zero. Columns of O are in the order
    of ``join_pair``.
    """
    f = Function(
        value_name(lanes, vectors),
        [("ptr", "v"), ("i64", "ldv"), ("i64", "at"), ("i64", "k"), ("ptr", "p"), ("i64", "ldp"), ("ptr", "o"),
         ("i64", "ldo"), ("ptr", "alpha"), ("i64", "accumulate")],
    )  # fmt: skip
    kind = f"<{isa.vector_width} x float>"
    target = [f.offset("%o", f.value(f"mul i64 %ldo, {i}")) for i in range(lanes)]
    sums = start_sums(f, isa, target, vectors)
    for i in range(lanes):
        alpha = f.splat(isa.vector_width, "float", f.load("float", f.offset("%alpha", 4 * i)))
        for j in range(vectors):
            sums[i * vectors + j] = f.value(f"fmul {kind} {sums[i * vectors + j]}, {alpha}")

    def steps(first: str, num_keys: int, sums: list[str]) -> list[str]:
        step = f.value(f"udiv i64 {first}, {isa.k_pack}")
        rows = f.offset("%v", f.value(f"mul i64 {step}, %ldv" if isa.separate_values else f"shl i64 {first}, 3"))
        weights = f.offset("%p", f.value(f"mul i64 {step}, %ldp"))
        for u in range(0, num_keys, isa.k_pack):
            if isa.separate_values:
                value = _load_pairs(f, isa, rows, vectors)
                rows = f.offset(rows, "%ldv")
            else:
                pointers = [f.load("ptr", f.offset(rows, 8 * (u + key)), align=8) for key in range(isa.k_pack)]
                value = _load_values(f, isa, [f.offset(pointer, "%at") for pointer in pointers], vectors)
            for i in range(lanes):
                block_row = slice(i * vectors, (i + 1) * vectors)
                sums[block_row] = _multiply_add(f, isa, f.offset(weights, STEP_BYTES * i), value, sums[block_row])
            if u + isa.k_pack < num_keys:
                weights = f.offset(weights, "%ldp")
        return sums

    unroll = isa.tiling.value_unroll
    whole = f.value(f"and i64 %k, {-unroll}")
    with f.loop(0, whole, unroll, [(kind, s) for s in sums]) as loop:
        loop.following = steps(loop.index, unroll, list(loop.carried))
    with f.loop(whole, "%k", isa.k_pack, [(kind, s) for s in loop.carried]) as rest:
        rest.following = steps(rest.index, isa.k_pack, list(rest.carried))
    store_block(f, isa, target, rest.carried, vectors)
    return f


def _load_pairs(f: Function, isa: Isa, row: str, vectors: int) -> list[str]:
    """Vectors of a row of pairs."""
    here = f.offset(row, f.value(f"mul i64 %at, {isa.k_pack}"))
    return [f.load(f"<{isa.vector_width} x float>", f.offset(here, j * isa.vector_bytes)) for j in range(vectors)]


def _load_values(f: Function, isa: Isa, row: list[str], vectors: int) -> list[str]:
    """Vectors of values of the keys of one step, each lane holding one column of all its keys."""
    width = isa.vector_width
    if isa.k_pack == 1:
        return [f.load(f"<{width} x float>", f.offset(row[0], j * isa.vector_bytes)) for j in range(vectors)]
    halves = f"<{2 * width} x i16>"
    values = []
    for j in range(vectors // 2):
        first, second = (f.load(halves, f.offset(pointer, j * isa.vector_bytes)) for pointer in row)
        values += join_pair(f, isa, first, second)
    return values


def peak_flops(isa: Isa) -> int:
    """Floating point operations of one turn of the peak loop."""
    return 2 * PEAK_SUMS * isa.vector_width * isa.k_pack


def build_peak(isa: Isa) -> Function:
    """A loop of independent dot steps on what is at hand: the most arithmetic that the machine does.

    Arguments of the function: ``operand``, one vector; ``turns`` of the loop, PEAK_SUMS steps each; ``target``,
    one vector, gets the sum, so that nothing is left out.
    """
    f = Function("peak", [("ptr", "operand"), ("i64", "turns"), ("ptr", "target")])
    kind = f"<{isa.vector_width} x float>"
    operand = f.load(kind, "%operand")
    with f.loop(0, "%turns", 1, [(kind, constant(isa.vector_width, 0.0))] * PEAK_SUMS) as loop:
        loop.following = _multiply_add(f, isa, "%operand", [operand] * PEAK_SUMS, loop.carried)
    total = loop.carried[0]
    for other in loop.carried[1:]:
        total = f.value(f"fadd {kind} {total}, {other}")
    f.store(kind, total, "%target")
    return f


def build_read(isa: Isa) -> Function:
    """Read memory once, prefetching ahead: the most bandwidth that one core gets.

    Arguments of the function: ``source``; ``num_bytes``, whole lines; ``target``, one vector, gets the sum.
    """
    f = Function("read", [("ptr", "source"), ("i64", "num_bytes"), ("ptr", "target")])
    kind = f"<{isa.vector_width} x float>"
    vectors = LINE // isa.vector_bytes
    with f.loop(0, "%num_bytes", LINE, [(kind, constant(isa.vector_width, 0.0))] * vectors) as loop:
        here = f.offset("%source", loop.index)
        f.do(f"call void @llvm.prefetch.p0(ptr {f.offset(here, STREAM_AHEAD_BYTES)}, i32 0, i32 3, i32 1)")
        loop.following = [
            f.value(f"fadd {kind} {total}, {f.load(kind, f.offset(here, v * isa.vector_bytes))}")
            for v, total in enumerate(loop.carried)
        ]
    total = loop.carried[0]
    for other in loop.carried[1:]:
        total = f.value(f"fadd {kind} {total}, {other}")
    f.store(kind, total, "%target")
    return f


def start_sums(f: Function, isa: Isa, target: list[str], vectors: int) -> list[str]:
    """What the sums start from: the block's present content, or zero where nothing is accumulated."""
    kind = f"<{isa.vector_width} x float>"
    keep = f.value("icmp ne i64 %accumulate, 0")
    sums = []
    for pointer in target:
        for v in range(vectors):
            present = f.load(kind, f.offset(pointer, v * isa.vector_bytes))
            sums.append(f.value(f"select i1 {keep}, {kind} {present}, {kind} {constant(isa.vector_width, 0.0)}"))
    return sums


def add_scaled(f: Function, isa: Isa, target: list[str], sums: list[str], scales: list[str]) -> None:
    """Sums times their column's scale, added to the block's content, or to zero where nothing is accumulated.

    Either has code of its own: where a block's content is chosen first, LLVM holds all of it on the stack.
    """
    width, kind, vectors = isa.vector_width, f"<{isa.vector_width} x float>", len(scales)

    def add(emit: Callable[[str, str, str], str]) -> None:
        for n, x in enumerate(sums):
            place = f.offset(target[n // vectors], n % vectors * isa.vector_bytes)
            f.store(kind, emit(place, x, scales[n % vectors]), place)

    def onto(place: str, x: str, scale: str) -> str:
        return multiply_add(f, width, x, scale, f.load(kind, place))

    def alone(place: str, x: str, scale: str) -> str:
        return f.value(f"fadd {kind} {f.value(f'fmul {kind} {x}, {scale}')}, {constant(width, 0.0)}")

    f.branch(f.value("icmp ne i64 %accumulate, 0"), lambda: add(onto), lambda: add(alone))


def store_block(f: Function, isa: Isa, target: list[str], sums: list[str], vectors: int) -> None:
    kind = f"<{isa.vector_width} x float>"
    for r, pointer in enumerate(target):
        for v in range(vectors):
            f.store(kind, sums[r * vectors + v], f.offset(pointer, v * isa.vector_bytes))
