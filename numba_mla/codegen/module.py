"""All functions of one instruction set as one LLVM module."""

from __future__ import annotations

import re
from functools import cache

from ..isa import Isa
from . import blocks, native, products, rows, softmax, tiles
from .text import Function
from .vector import FLOAT8S, FLOATS, FORMATS

_DECLARATIONS = (
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
)


def block_shapes(isa: Isa) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Shapes that the dot block and the value block are written for as functions.

    Key rows are padded (with rows of zeros), so scores need one row count; they have the block written into their
    loops, unless it is of tiles. Lanes of an item and rows of a product are exact, or whole granules.
    """
    rows, vectors = isa.blocks.score
    dots = {(r, isa.blocks.weight[1]) for r in isa.weight_rows}
    if isa.tiles is not None:
        dots |= {(rows, v) for v in range(1, vectors + 1)}
    values = {(n, v) for n in isa.value_lanes for v in range(isa.k_pack, isa.blocks.value[1] + 1, isa.k_pack)}
    return sorted(dots), sorted(values)


def peak_flops(isa: Isa) -> int:
    """Floating point operations of one turn of a record's peak loop."""
    return (blocks if isa.tiles is None else tiles).peak_flops(isa)


def _blocks(isa: Isa) -> list[Function]:
    """The register blocks of both products, of vectors or of tiles, and what only the latter need."""
    dots, values = block_shapes(isa)
    if isa.tiles is None:
        written = [build(isa, *s) for build in (blocks.build_dot, blocks.build_dot_scaled) for s in dots]
        written += [blocks.build_value(isa, *s) for s in values]
        written += [blocks.build_peak(isa)]
    else:
        written = [tiles.build_dot(isa, *s) for s in dots] + [tiles.build_value(isa, *s) for s in values]
        written += [
            tiles.build_dot_scaled(isa, *isa.blocks.weight),
            tiles.build_peak(isa),
            tiles.build_transpose_steps(isa),
            tiles.build_interleave(isa),
            tiles.build_configure(isa),
            tiles.build_release(isa),
        ]
    return written


@cache
def build_module(isa: Isa, triple: str) -> str:
    """The text of the module: every register block and stage of the record, in a fixed order."""
    functions = [
        *_blocks(isa),
        products.build_score(isa),
        products.build_weigh_values(isa),
        products.build_multiply_rows(isa),
        products.build_multiply_scaled(isa),
        *(products.build_narrow_rows(element) for element in FLOATS),
        blocks.build_read(isa),
        softmax.build_mask(isa),
        softmax.build_softmax(isa),
        softmax.build_weigh(isa),
        rows.build_blend(isa),
        rows.build_scale(isa),
        rows.build_any_nonfinite(isa),
        rows.build_list_rows(isa),
        rows.build_prefetch(),
        rows.build_clear(),
        rows.build_copy(),
        *(rows.build_widen(isa, element) for element in FORMATS),
        native.build_widen_ds(isa),
        *(rows.build_widen_pairs(isa, element) for element in FORMATS),
        *(build(isa, n) for n in native.ROW_FORMATS for build in (native.build_native, native.build_native_rows)),
        *(build(isa, element) for element in FLOATS for build in (rows.build_narrow, rows.build_finish)),
        *(rows.build_pack(isa, element) for element in FLOATS if element.name in isa.dtypes),
        *(rows.build_quantise(isa, element) for element in FLOAT8S),
    ]
    body = "\n\n".join(function.text("#0") for function in functions)
    attributes = f'nounwind "target-cpu"="{isa.cpu}" "target-features"="{isa.features}"'
    declarations = {*_DECLARATIONS, *(_multiply_add(width) for width in (1, isa.vector_width))}
    declarations.update(isa.declarations)
    if isa.tiles is not None:
        shape = ", ".join(f"i8 {byte}" for byte in tiles.tile_configuration())
        declarations.update(isa.tiles.declarations)
        declarations.add(f"@tile_configuration = private constant [64 x i8] [{shape}], align 64")
    parts = [
        f'target triple = "{triple}"',
        *sorted(declarations),
        body,
        f"attributes #0 = {{ {attributes} }}",
    ]
    return "\n\n".join(parts) + "\n"


def symbols(text: str) -> tuple[str, ...]:
    """The functions that a module defines, in its order."""
    return tuple(re.findall(r"^define \S+ @(\w+)\(", text, flags=re.MULTILINE))


def function_text(text: str, symbol: str) -> str:
    """One function of a module's text, from its header to its closing brace."""
    found = re.search(rf"^define \S+ @{symbol}\(.*?^}}", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"symbol: expected a function of the module, got {symbol!r}")
    return found[0]


def _multiply_add(width: int) -> str:
    kind = f"<{width} x float>"
    return f"declare {kind} @llvm.fmuladd.v{width}f32({kind}, {kind}, {kind})"
