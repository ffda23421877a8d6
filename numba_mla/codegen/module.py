"""All functions of one instruction set as LLVM modules."""

from __future__ import annotations

import re
from functools import cache

from ..isa import Isa
from . import blocks, codes, interleave, native, products, rows, softmax, tiles
from .text import Function
from .vector import FLOAT8S, FLOATS, FORMATS

_DECLARATIONS = (
    "declare i32 @llvm.smax.i32(i32, i32)",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
)


def weight_shapes(isa: Isa) -> list[tuple[int, int]]:
    """Shapes of the dot block that products with weights call: their rows are exact, or whole granules."""
    return [(rows, isa.blocks.weight[1]) for rows in sorted(isa.weight_rows)]


def score_shapes(isa: Isa) -> list[tuple[int, int]]:
    """Shapes of the dot block that scores call, on tiles; of vectors it is written into their loops.

    Key rows are padded (with rows of zeros), so one row count does.
    """
    rows, vectors = isa.tiling.score_block
    return [] if isa.tiles is None else [(rows, v) for v in range(1, vectors + 1)]


def value_shapes(isa: Isa) -> list[tuple[int, int]]:
    """Shapes of the value block: lanes of an item are exact, or whole granules."""
    return sorted((n, v) for n in isa.value_lanes for v in isa.value_vectors)


def peak_flops(isa: Isa) -> int:
    """Floating point operations of one turn of a record's peak loop."""
    return (blocks if isa.tiles is None else tiles).peak_flops(isa)


def _attention(isa: Isa) -> list[Function]:
    """What depends on the tiling: the two products of attention."""
    written = [products.build_score(isa), products.build_weigh_values(isa)]
    written += [tiles.build_dot(isa, *s) for s in score_shapes(isa)]
    written += [(blocks if isa.tiles is None else tiles).build_value(isa, *s) for s in value_shapes(isa)]
    if isa.separate_values:
        written += [interleave.build_interleave(isa)]
    return written


def _weights(isa: Isa) -> list[Function]:
    """Products with packed weights, the peak loop, and what only tiles need."""
    shapes = weight_shapes(isa)
    if isa.tiles is None:
        written = [build(isa, *s) for build in (blocks.build_dot, blocks.build_dot_scaled) for s in shapes]
        written += [blocks.build_peak(isa)]
    else:
        written = [
            *(tiles.build_dot(isa, *s) for s in shapes),
            tiles.build_dot_scaled(isa, *isa.blocks.weight),
            tiles.build_peak(isa),
            tiles.build_transpose_steps(isa),
            tiles.build_configure(isa),
            tiles.build_release(isa),
        ]
    for element in FLOAT8S if codes.multiplies_codes(isa) else ():
        written += codes.build_dots(isa, element)
        written += [codes.build_multiply_codes(isa, element, is_scaled) for is_scaled in (False, True)]
    return [*written, products.build_multiply_rows(isa), products.build_multiply_scaled(isa)]


def _stages(isa: Isa) -> list[Function]:
    """All that is done to rows, scores and states."""
    return [
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
        *(rows.build_finish_rows(element) for element in FLOATS),
        *(rows.build_narrow_rows(isa, element) for element in FLOATS),
        *(rows.build_pack(isa, element) for element in FLOATS if element.name in isa.dtypes),
        *(rows.build_quantise(isa, element) for element in FLOAT8S),
    ]


@cache
def build_modules(isa: Isa, triple: str) -> tuple[str, str]:
    """The texts of the modules, of what depends on the tiling and of all else: in a fixed order, for the disk cache.

    They are apart so that another tiling has little to compile.
    """
    return _build(isa, triple, _attention(isa)), _build(isa, triple, [*_weights(isa), *_stages(isa)])


def _build(isa: Isa, triple: str, functions: list[Function]) -> str:
    """A module of some functions, and all that they may call."""
    attributes = f'nounwind "target-cpu"="{isa.cpu}" "target-features"="{isa.features}"'
    declarations = {*_DECLARATIONS, *(_multiply_add(width) for width in (1, isa.vector_width))}
    bits = f"v{isa.vector_width}i32(<{isa.vector_width} x i32>)"
    declarations.update(f"declare i32 @llvm.vector.reduce.{which}.{bits}" for which in ("smin", "smax"))
    declarations.update(isa.declarations)
    if isa.tiles is not None:
        shape = ", ".join(f"i8 {byte}" for byte in tiles.tile_configuration())
        declarations.update(isa.tiles.declarations)
        declarations.add(f"@tile_configuration = private constant [64 x i8] [{shape}], align 64")
    body = "\n\n".join(function.text("#0") for function in functions)
    parts = [f'target triple = "{triple}"', *sorted(declarations), body, f"attributes #0 = {{ {attributes} }}"]
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
