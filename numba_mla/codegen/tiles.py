"""Register blocks of tile operands: 16 rows of 64 bytes each, and what lays their operands out.

The two products have the arguments of ``blocks``' ones, so that the loops need not know the difference. Rows
must come 16 at a time, a constant stride apart; steps and keys in whole tiles.
"""

from __future__ import annotations

from ..isa import Isa
from .blocks import dot_name, scaled_name, value_name
from .rows import transpose
from .text import Function
from .vector import constant, multiply_add

TILE_ROWS = 16
TILE_ROW_BYTES = 64
NUM_TILES = 8
# Tiles of sums that the peak loop keeps under way.
PEAK_TILES = 6


def tile_configuration() -> bytes:
    """The 64 bytes that shape all tiles alike, palette 1: 16 rows of 64 bytes."""
    configuration = bytearray(64)
    configuration[0] = 1
    for tile in range(NUM_TILES):
        configuration[16 + 2 * tile : 18 + 2 * tile] = TILE_ROW_BYTES.to_bytes(2, "little")
        configuration[48 + tile] = TILE_ROWS
    return bytes(configuration)


class _TileWriter:
    """Writes a record's tile instructions into a function; the registers are numbered by hand."""

    def __init__(self, function: Function, isa: Isa) -> None:
        assert isa.tiles is not None
        self.function = function
        self.tiles = isa.tiles

    def load(self, tile: int, pointer: str, stride: str) -> None:
        self.function.do(self.tiles.load.format(tile=tile, pointer=pointer, stride=stride))

    def store(self, tile: int, pointer: str, stride: str) -> None:
        self.function.do(self.tiles.store.format(tile=tile, pointer=pointer, stride=stride))

    def zero(self, tile: int) -> None:
        self.function.do(self.tiles.zero.format(tile=tile))

    def dot(self, total: int, left: int, right: int) -> None:
        self.function.do(self.tiles.dot.format(total=total, left=left, right=right))


def _emit_product(f: Function, write: _TileWriter, c: list[list[str]], ldc: str, turns: tuple[str, int],
                  left, right) -> None:  # fmt: skip
    """C (+)= sum over turns of left tiles times right tiles; ``left`` and ``right`` load one for a turn.

    Tiles of C come first, then those of the left operand, then one or more of the right one in turn.
    """
    rows, columns = len(c), len(c[0])
    first_left, first_right = rows * columns, rows * columns + rows
    spare_right = NUM_TILES - first_right
    f.do("br i1 %keep, label %present, label %nothing")
    f.label("present")
    for i in range(rows):
        for j in range(columns):
            write.load(i * columns + j, c[i][j], ldc)
    f.do("br label %start")
    f.label("nothing")
    for tile in range(rows * columns):
        write.zero(tile)
    f.do("br label %start")
    f.label("start")
    stop, step = turns
    with f.loop(0, stop, step) as loop:
        for i in range(rows):
            left(loop.index, i, first_left + i)
        for j in range(columns):
            tile = first_right + j % spare_right
            right(loop.index, j, tile)
            for i in range(rows):
                write.dot(i * columns + j, first_left + i, tile)
    for i in range(rows):
        for j in range(columns):
            write.store(i * columns + j, c[i][j], ldc)


def build_dot(isa: Isa, rows: int, vectors: int) -> Function:
    """``C[row, lane] (+)= sum_k A[row, k] B[k, lane]``, as ``blocks.build_dot`` has it."""
    f = Function(
        dot_name(rows, vectors),
        [("ptr", "a"), ("ptr", "ahead"), ("ptr", "b"), ("i64", "ldb"), ("i64", "k"), ("ptr", "c"), ("i64", "ldc"),
         ("i64", "accumulate")],
    )  # fmt: skip
    write = _TileWriter(f, isa)
    groups = rows // TILE_ROWS
    base, stride = [], []
    for group in range(groups):
        first, second = (f.load("ptr", f.offset("%a", 8 * (TILE_ROWS * group + n)), align=8) for n in (0, 1))
        base.append(first)
        ends = [f.value(f"ptrtoint ptr {pointer} to i64") for pointer in (second, first)]
        stride.append(f.value(f"sub i64 {ends[0]}, {ends[1]}"))
    below = [f.offset("%c", f.value(f"mul i64 %ldc, {TILE_ROWS * group}")) for group in range(groups)]
    c = [[f.offset(pointer, TILE_ROW_BYTES * v) for v in range(vectors)] for pointer in below]

    def left(index: str, i: int, tile: int) -> None:
        at = f.value(f"shl i64 {index}, 2")
        for row in range(TILE_ROWS * i, TILE_ROWS * (i + 1)):
            soon = f.offset(f.load("ptr", f.offset("%ahead", 8 * row), align=8), at)
            f.do(f"call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 2, i32 1)")
        write.load(tile, f.offset(base[i], at), stride[i])

    def right(index: str, j: int, tile: int) -> None:
        packed = f.offset("%b", f.value(f"mul i64 {index}, %ldb"))
        write.load(tile, f.offset(packed, TILE_ROW_BYTES * j), "%ldb")

    f.do("%keep = icmp ne i64 %accumulate, 0")
    _emit_product(f, write, c, "%ldc", ("%k", TILE_ROWS), left, right)
    return f


def build_dot_scaled(isa: Isa, rows: int, vectors: int) -> Function:
    """``C[row, column] (+)= scales[column] sum_k A[row, k] B[k, column]``, as ``blocks.build_dot_scaled`` has it.

    The sum goes through memory, since tiles only add.
    """
    f = Function(
        scaled_name(rows, vectors),
        [("ptr", "a"), ("ptr", "ahead"), ("ptr", "b"), ("i64", "ldb"), ("i64", "k"), ("ptr", "c"), ("i64", "ldc"),
         ("ptr", "scales"), ("i64", "accumulate")],
    )  # fmt: skip
    width, kind, row_bytes = TILE_ROWS, f"<{TILE_ROWS} x float>", TILE_ROW_BYTES * vectors
    f.do(f"%sums = alloca [{rows * row_bytes} x i8], align {TILE_ROW_BYTES}")
    f.do(
        f"call void @{dot_name(rows, vectors)}(ptr %a, ptr %ahead, ptr %b, i64 %ldb, i64 %k, ptr %sums, "
        f"i64 {row_bytes}, i64 0)"
    )
    f.do("%keep = icmp ne i64 %accumulate, 0")
    scales = [f.load(kind, f.offset("%scales", TILE_ROW_BYTES * v)) for v in range(vectors)]
    with f.loop(0, rows, 1) as row:
        sums = f.offset("%sums", f.value(f"mul i64 {row.index}, {row_bytes}"))
        target = f.offset("%c", f.value(f"mul i64 {row.index}, %ldc"))
        for v, scale in enumerate(scales):
            total, place = (f.offset(pointer, TILE_ROW_BYTES * v) for pointer in (sums, target))
            present = f.value(f"select i1 %keep, {kind} {f.load(kind, place)}, {kind} {constant(width, 0.0)}")
            f.store(kind, multiply_add(f, width, f.load(kind, total), scale, present), place)
    return f


def build_value(isa: Isa, lanes: int, vectors: int) -> Function:
    """``O[lane, column] = O[lane, column] alpha[lane] + sum_k P[k, lane] V[k, column]``.

    As ``blocks.build_value`` has it, but ``v`` is a panel of pairs of rows, ``ldv`` bytes each, and P has been
    transposed, 16 steps x 16 lanes at a time.
    """
    f = Function(
        value_name(lanes, vectors),
        [("ptr", "v"), ("i64", "ldv"), ("i64", "at"), ("i64", "k"), ("ptr", "p"), ("i64", "ldp"), ("ptr", "o"),
         ("i64", "ldo"), ("ptr", "alpha"), ("i64", "accumulate")],
    )  # fmt: skip
    write = _TileWriter(f, isa)
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    groups = lanes // TILE_ROWS
    panel = f.offset("%v", f.value(f"mul i64 %at, {isa.k_pack}"))
    below = [f.offset("%o", f.value(f"mul i64 %ldo, {TILE_ROWS * group}")) for group in range(groups)]
    o = [[f.offset(pointer, TILE_ROW_BYTES * v) for v in range(vectors)] for pointer in below]
    f.do("%keep = icmp ne i64 %accumulate, 0")
    scaled_lanes = f.value(f"select i1 %keep, i64 {lanes}, i64 0")
    with f.loop(0, scaled_lanes, 1) as lane:
        alpha = f.splat(width, "float", f.load("float", f.offset("%alpha", f.value(f"shl i64 {lane.index}, 2"))))
        row = f.offset("%o", f.value(f"mul i64 {lane.index}, %ldo"))
        for v in range(vectors):
            pointer = f.offset(row, v * isa.vector_bytes)
            f.store(kind, f.value(f"fmul {kind} {f.load(kind, pointer)}, {alpha}"), pointer)

    def step(index: str) -> str:
        return f.value(f"udiv i64 {index}, {isa.k_pack}")

    def left(index: str, i: int, tile: int) -> None:
        block = f.offset("%p", f.value(f"mul i64 {step(index)}, %ldp"))
        write.load(tile, f.offset(block, TILE_ROW_BYTES * i), "%ldp")

    def right(index: str, j: int, tile: int) -> None:
        pairs = f.offset(panel, f.value(f"mul i64 {step(index)}, %ldv"))
        write.load(tile, f.offset(pairs, TILE_ROW_BYTES * j), "%ldv")

    _emit_product(f, write, o, "%ldo", ("%k", TILE_ROWS * isa.k_pack), left, right)
    return f


def peak_flops(isa: Isa) -> int:
    """Floating point operations of one turn of the peak loop."""
    return 2 * PEAK_TILES * TILE_ROWS * TILE_ROWS * TILE_ROWS * isa.k_pack


def build_peak(isa: Isa) -> Function:
    """As ``blocks.build_peak`` has it, on tiles that hold zeros."""
    f = Function("peak", [("ptr", "operand"), ("i64", "turns"), ("ptr", "target")])
    write = _TileWriter(f, isa)
    left, right = PEAK_TILES, PEAK_TILES + 1
    f.do(write.tiles.configure.format(pointer="@tile_configuration"))
    for tile in range(right + 1):
        write.zero(tile)
    with f.loop(0, "%turns", 1):
        for tile in range(PEAK_TILES):
            write.dot(tile, left, right)
    f.do(write.tiles.release)
    return f


def build_transpose_steps(isa: Isa) -> Function:
    """Turn probabilities [step][lane] to [lane][step], 16 x 16 at a time, each block where it stands."""
    f = Function("transpose_steps", [("ptr", "p"), ("i64", "ldp"), ("i64", "steps"), ("i64", "lanes")])
    kind = f"<{TILE_ROWS} x float>"
    with f.loop(0, "%steps", TILE_ROWS) as step:
        rows = f.offset("%p", f.value(f"mul i64 {step.index}, %ldp"))
        with f.loop(0, "%lanes", TILE_ROWS) as lane:
            block = f.offset(rows, f.value(f"shl i64 {lane.index}, 2"))
            pointers = [f.offset(block, f.value(f"mul i64 %ldp, {n}")) for n in range(TILE_ROWS)]
            columns = transpose(f, TILE_ROWS, [f.load(kind, pointer) for pointer in pointers])
            for pointer, column in zip(pointers, columns, strict=True):
                f.store(kind, column, pointer)
    return f


def build_configure(isa: Isa) -> Function:
    """Give the tiles their shapes, in the calling thread."""
    assert isa.tiles is not None
    f = Function("configure_tiles", [])
    f.do(isa.tiles.configure.format(pointer="@tile_configuration"))
    return f


def build_release(isa: Isa) -> Function:
    """Give the tiles back, in the calling thread."""
    assert isa.tiles is not None
    f = Function("release_tiles", [])
    f.do(isa.tiles.release)
    return f
