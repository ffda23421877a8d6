"""``lane_group``: the memory of lanes that attend together, and where everything lies in it."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..kernels.attend import Spare, State
from ..kernels.compile import kernel
from ..kernels.context import (
    CLEAR,
    COLUMN_STEP,
    INTERLEAVE,
    K_PACK,
    KEY_PADDING,
    NATIVE_BYTES,
    VECTOR_WIDTH,
)
from ..kernels.memory import call
from ..kernels.rows import padded_width
from ..kernels.scratch import lane_stride, line_up
from ..memory import LINE
from .arrays import check_that

# Rows whose addresses follow those of a tile: they are prefetched, but not read.
ROWS_AHEAD = 16
# Where a lane group's numbers are: its lanes, the keys of its tile, the tiles that it has taken, what it waits for.
LANES, KEYS, TILES, STAGE, NUM_COUNTS = range(5)
# What it waits for: queries, a tile's scores (or to be finished), a softmax over them, values.
EMPTY, PACKED, SCORED, WEIGHTED = range(4)


class LaneGroup(NamedTuple):
    """Lanes that attend to the same keys, tile by tile: their queries, scores and results so far.

    The fields are for the functions of this package. Those before ``table`` are what it was made for; the others
    are memory, addresses in it, and bytes from row to row.
    """

    num_lanes: int
    num_keys: int
    width: int
    value_width: int
    scale: float
    table: np.ndarray
    refusals: np.ndarray
    counts: np.ndarray
    memory: np.ndarray
    scores: np.ndarray
    places: Places


class Places(NamedTuple):
    """Where the pieces of a lane group's memory lie.

    ``stride`` is that of a dot step of the queries and of a key of the scores.
    """

    q_packed: int
    scores: int
    stride: int
    state: State
    alpha: int
    low: int
    high: int
    rows: int
    panel: int
    panel_stride: int
    spare: Spare
    end: int


@kernel
def round_up(number, step):
    """The next multiple of a step."""
    return -(-number // step) * step


@kernel
def _lay_out(table, num_lanes, num_keys, width, value_width, base):
    """The pieces, from an address on."""
    padded_lanes, padded_keys = round_up(num_lanes, table[VECTOR_WIDTH]), round_up(num_keys, table[KEY_PADDING])
    padded, columns = padded_width(table, width), round_up(value_width, table[COLUMN_STEP])
    stride, out_stride, lane_bytes = lane_stride(padded_lanes), lane_stride(columns), line_up(4 * padded_lanes)
    panel_stride = lane_stride(-(-table[NATIVE_BYTES] * max(padded, columns) // 4))
    row_bytes = line_up(8 * (padded_keys + ROWS_AHEAD))
    scores = base + padded // table[K_PACK] * stride
    out = scores + padded_keys * stride
    m = out + padded_lanes * out_stride
    l = m + lane_bytes  # noqa: E741 - the field's letter
    alpha = l + lane_bytes
    low = alpha + lane_bytes
    high = low + lane_bytes
    limits = high + lane_bytes
    starts = limits + 2 * lane_bytes
    rows = starts + row_bytes
    panel = rows + max(row_bytes, 2 * lane_bytes)
    pairs = panel + padded_keys * panel_stride
    zeros = pairs + (numba.int64(0) if table[INTERLEAVE] == 0 else padded_keys // 2 * out_stride)
    end = zeros + max(line_up(4 * width), panel_stride, out_stride)
    spare = Spare(limits, starts, rows, scores, out, pairs, out_stride, zeros)
    return Places(base, scores, stride, State(m, l, out, out_stride), alpha, low, high, rows, panel, panel_stride,
                  spare, end)  # fmt: skip


@kernel
def lane_group(kernels, num_lanes, num_keys, width, value_width, scale):
    """Memory for lanes that attend to the same keys, a key tile at a time.

    Parameters
    ----------
    kernels : Kernels
    num_lanes, num_keys : int
        Queries of a group, and keys of a tile, at most.
    width, value_width : int
        Elements of a query and of a key; of a value.
    scale : float
        Factor on scores, finite and positive.

    Returns
    -------
    LaneGroup

    Raises
    ------
    ValueError
        A size below 1, or a scale that is not positive.

    Notes
    -----
    128 lanes and 256 keys serve well: about 0.4 MB for rows of 192 and 128 bfloat16. In a ``prange`` each turn needs a
    group of its own.
    """
    table, refusals = kernels.table, kernels.refusals
    sizes = min(num_lanes, num_keys, width, value_width)
    check_that(refusals, sizes > 0, "lane_group", "num_lanes, num_keys, width and value_width of at least 1")
    check_that(refusals, 0.0 < scale < np.inf, "scale", "a finite and positive number")
    size = _lay_out(table, num_lanes, num_keys, width, value_width, numba.int64(0)).end
    memory = np.empty(size + LINE, np.uint8)
    start = np.int64(memory.ctypes.data)
    base = line_up(start)
    places = _lay_out(table, num_lanes, num_keys, width, value_width, base)
    call(table[CLEAR], (places.spare.starts, places.rows - places.spare.starts))
    call(table[CLEAR], (places.spare.zeros, places.end - places.spare.zeros))
    first, last = places.scores - start, places.state.out - start
    scores = memory[first:last].view(np.float32).reshape((last - first) // places.stride, places.stride // 4)
    return LaneGroup(num_lanes, num_keys, width, value_width, scale, table, refusals, np.zeros(NUM_COUNTS, np.int64),
                     memory, scores, places)  # fmt: skip
