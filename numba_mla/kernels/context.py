"""The table through which kernels see an instruction set: sizes, and addresses of its generated functions."""

from __future__ import annotations

from functools import cache
from math import lcm

import numpy as np

from ..codegen.link import link
from ..codegen.native import ROW_FORMATS
from ..codegen.vector import FORMATS
from ..isa import Isa
from .schedule import ITEM_ORDERS

# Element codes: the place of a format in codegen's list. Rows of 656 bytes, of several types, have one after those.
ELEMENT_CODES = {element.name: code for code, element in enumerate(FORMATS)}
_ROW_CODES = {name: code for code, name in enumerate(ROW_FORMATS)}
ELEMENT_BYTES = tuple(element.num_bytes for element in FORMATS)
_MAX_FORMATS = 8

# Sizes: of vectors and register blocks; keys or features of a dot step; value columns of a value block at least;
# the native type, its code and bytes; what the number of keys of a tile is padded to; rows, lanes and dot steps that
# products take together; keys of a score block.
VECTOR_WIDTH, WEIGHT_VECTORS, K_PACK, COLUMN_STEP, NATIVE, NATIVE_BYTES, KEY_PADDING, GRANULE, SCORE_ROWS = range(9)
# The rest of the tiling.
LANE_GROUP, LEAST_LANES, KEY_TILE, KV_SPLIT, PREFETCH_ROWS, ITEM_ORDER = range(9, 15)
# Functions that stand alone; tiles have some of their own, and some interleave.
SCORE, WEIGH_VALUES, MULTIPLY_ROWS, MASK, SOFTMAX, WEIGH, BLEND, SCALE, MULTIPLY_SCALED = range(15, 24)
ANY_NONFINITE = 24
CLEAR, COPY, PEAK, READ, PREFETCH = range(25, 30)
LIST_ROWS, TRANSPOSE_STEPS, INTERLEAVE, CONFIGURE_TILES, RELEASE_TILES = range(30, 35)
_ALONE = {
    SCORE: "score",
    WEIGH_VALUES: "weigh_values",
    MULTIPLY_ROWS: "multiply_rows",
    MASK: "mask",
    SOFTMAX: "softmax",
    WEIGH: "weigh",
    BLEND: "blend",
    SCALE: "scale",
    MULTIPLY_SCALED: "multiply_scaled",
    ANY_NONFINITE: "any_nonfinite",
    PREFETCH: "prefetch",
    CLEAR: "clear",
    COPY: "copy",
    PEAK: "peak",
    READ: "read",
    LIST_ROWS: "list_rows",
    TRANSPOSE_STEPS: "transpose_steps",
    INTERLEAVE: "interleave",
    CONFIGURE_TILES: "configure_tiles",
    RELEASE_TILES: "release_tiles",
}
# Families of functions, by element code.
WIDEN = 35
WIDEN_PAIRS = WIDEN + _MAX_FORMATS
TO_NATIVE = WIDEN_PAIRS + _MAX_FORMATS
NARROW = TO_NATIVE + _MAX_FORMATS
FINISH_ROWS = NARROW + _MAX_FORMATS
PACK = FINISH_ROWS + _MAX_FORMATS
QUANTISE = PACK + _MAX_FORMATS
NARROW_ROWS = QUANTISE + _MAX_FORMATS
NATIVE_ROWS = NARROW_ROWS + _MAX_FORMATS
MULTIPLY_CODES = NATIVE_ROWS + _MAX_FORMATS
MULTIPLY_SCALED_CODES = MULTIPLY_CODES + _MAX_FORMATS
CONTEXT_SIZE = MULTIPLY_SCALED_CODES + _MAX_FORMATS
_BY_ELEMENT = {
    WIDEN: "widen",
    WIDEN_PAIRS: "widen_pairs",
    TO_NATIVE: "native",
    NARROW: "narrow",
    FINISH_ROWS: "finish_rows",
    PACK: "pack",
    QUANTISE: "quantise",
    NARROW_ROWS: "narrow_rows",
    NATIVE_ROWS: "native_rows",
    MULTIPLY_CODES: "multiply_codes",
    MULTIPLY_SCALED_CODES: "multiply_scaled_codes",
}


@cache
def build_context(isa: Isa, triple: str) -> np.ndarray:
    """The table for one record, int64 of CONTEXT_SIZE; its functions are compiled on the way."""
    addresses = link(isa, triple)
    table = np.zeros(CONTEXT_SIZE, np.int64)
    table[VECTOR_WIDTH] = isa.vector_width
    table[WEIGHT_VECTORS] = isa.blocks.weight[1]
    table[K_PACK] = isa.k_pack
    table[COLUMN_STEP] = isa.column_step
    table[NATIVE] = ELEMENT_CODES[isa.native]
    table[NATIVE_BYTES] = ELEMENT_BYTES[ELEMENT_CODES[isa.native]]
    table[GRANULE] = isa.granule
    tiling = isa.tiling
    table[SCORE_ROWS] = tiling.score_block[0]
    # Scores take whole blocks of keys, values whole dot steps.
    table[KEY_PADDING] = lcm(tiling.score_block[0], isa.granule * isa.k_pack)
    table[LANE_GROUP] = tiling.lane_group
    table[LEAST_LANES] = tiling.least_lanes
    table[KEY_TILE] = tiling.key_tile
    table[KV_SPLIT] = tiling.kv_split
    table[PREFETCH_ROWS] = tiling.prefetch_rows
    table[ITEM_ORDER] = ITEM_ORDERS[tiling.item_order]
    for place, name in _ALONE.items():
        table[place] = addresses.get(name, 0)
    for family, word in _BY_ELEMENT.items():
        for name, code in _ROW_CODES.items():
            # Queries and results are never fp8, nothing else is quantised: 0 where there is no function.
            table[family + code] = addresses.get(f"{word}_{name}", 0)
    return table
