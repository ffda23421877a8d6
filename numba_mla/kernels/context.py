"""The table through which kernels see an instruction set: sizes, and addresses of its generated functions."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..codegen.blocks import VALUE_UNROLL, dot_name, value_name
from ..codegen.link import link
from ..codegen.module import halvings
from ..codegen.vector import FORMATS
from ..isa import Isa

# Element codes: the place of a format in codegen's list.
ELEMENT_CODES = {element.name: code for code, element in enumerate(FORMATS)}
ELEMENT_BYTES = tuple(element.num_bytes for element in FORMATS)
_MAX_FORMATS = 8
_MAX_VECTORS = 4
_MAX_HALVINGS = 5

# Sizes.
VECTOR_WIDTH, SCORE_ROWS, SCORE_VECTORS, VALUE_LANES, VALUE_VECTORS, WEIGHT_ROWS, WEIGHT_VECTORS = range(7)
LANE_GROUP, NATIVE, KEY_PADDING = range(7, 10)
# Functions that stand alone.
MASK, SOFTMAX, WEIGH, BLEND, SCALE, SCALE_COLUMNS, ANY_NONFINITE, COPY, PEAK, READ = range(10, 20)
_ALONE = {MASK: "mask", SOFTMAX: "softmax", WEIGH: "weigh", BLEND: "blend", SCALE: "scale",
          SCALE_COLUMNS: "scale_columns", ANY_NONFINITE: "any_nonfinite", COPY: "copy", PEAK: "peak",
          READ: "read"}  # fmt: skip
# Families of functions: by element code, by vectors - 1, by log2 of the rows, or by both.
WIDEN = 20
NARROW = WIDEN + _MAX_FORMATS
PACK = NARROW + _MAX_FORMATS
QUANTISE = PACK + _MAX_FORMATS
SCORE_DOT = QUANTISE + _MAX_FORMATS
WEIGHT_DOT = SCORE_DOT + _MAX_VECTORS
VALUE = WEIGHT_DOT + _MAX_HALVINGS
CONTEXT_SIZE = VALUE + _MAX_HALVINGS * _MAX_VECTORS


@cache
def build_context(isa: Isa, triple: str) -> np.ndarray:
    """The table for one record, int64 of CONTEXT_SIZE; its functions are compiled on the way."""
    addresses = link(isa, triple)
    table = np.zeros(CONTEXT_SIZE, np.int64)
    table[VECTOR_WIDTH] = isa.vector_width
    table[SCORE_ROWS], table[SCORE_VECTORS] = isa.score_block
    table[VALUE_LANES], table[VALUE_VECTORS] = isa.value_block
    table[WEIGHT_ROWS], table[WEIGHT_VECTORS] = isa.weight_block
    table[LANE_GROUP] = isa.lane_group
    table[NATIVE] = ELEMENT_CODES[isa.native]
    # Both products take whole blocks of keys.
    table[KEY_PADDING] = max(isa.score_block[0], VALUE_UNROLL)
    for place, name in _ALONE.items():
        table[place] = addresses[name]
    for family, word in ((WIDEN, "widen"), (NARROW, "narrow"), (PACK, "pack"), (QUANTISE, "quantise")):
        for name, code in ELEMENT_CODES.items():
            # Queries and results are never fp8, and nothing else is quantised: 0 where there is no function.
            table[family + code] = addresses.get(f"{word}_{name}", 0)
    for v in range(1, isa.score_block[1] + 1):
        table[SCORE_DOT + v - 1] = addresses[dot_name(isa.score_block[0], v)]
    for rows in halvings(isa.weight_block[0]):
        table[WEIGHT_DOT + rows.bit_length() - 1] = addresses[dot_name(rows, isa.weight_block[1])]
    for lanes in halvings(isa.value_block[0]):
        for v in range(1, isa.value_block[1] + 1):
            table[VALUE + (lanes.bit_length() - 1) * _MAX_VECTORS + v - 1] = addresses[value_name(lanes, v)]
    return table


def value_place(log2_lanes: int, vectors: int) -> int:
    """Where the value block of that shape stands in the table."""
    return VALUE + log2_lanes * _MAX_VECTORS + vectors - 1
