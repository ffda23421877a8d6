"""One worker's memory: where everything lies from a base address on."""

from __future__ import annotations

from typing import NamedTuple

import numba

from ..memory import LINE
from .attend import Spare, State
from .compile import kernel
from .context import (
    COLUMN_STEP,
    INTERLEAVE,
    K_PACK,
    KEY_PADDING,
    KEY_TILE,
    LANE_GROUP,
    LEAST_LANES,
    NATIVE,
    NATIVE_BYTES,
    PREFETCH_ROWS,
    VECTOR_WIDTH,
)
from .rows import padded_width
from .schedule import FEW_LANES
from .source import RowSource, most_rows_listed


class Scratch(NamedTuple):
    """Addresses of the pieces; ``end`` is one past the last. ``states`` is a stack of ``state_bytes`` each.

    ``first_rows`` and ``second_rows`` are for two addresses of each lane: of its query's parts, or its results.
    ``following`` is for the place of the item that is taken next, ``upcoming`` for addresses of its queries, and
    ``results`` for where those of the item in hand go.
    """

    q_packed: int
    scores: int
    key_rows: int
    key_panel: int
    key_stride: int
    value_rows: int
    value_panel: int
    value_stride: int
    rows_bytes: int
    spare: Spare
    first_rows: int
    second_rows: int
    following: int
    upcoming: int
    results: int
    low: int
    high: int
    alpha: int
    weights: int
    zeros: int
    group: int
    out_stride: int
    state_bytes: int
    states: int
    end: int


@kernel
def line_up(num_bytes):
    """Rounded up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE


@kernel
def _panel_stride(num_bytes):
    """Bytes from row to row: whole lines, and an odd number, so that a column of rows uses every cache set."""
    lines = -(-num_bytes // LINE)
    return (lines + 1 - lines % 2) * LINE


@kernel
def lane_stride(padded_lanes):
    """Bytes of a row of float32, one a lane."""
    return _panel_stride(4 * padded_lanes)


@kernel
def padded_columns(context, p):
    """Value columns, the last vectors filled up."""
    return -(-p.value_width // context[COLUMN_STEP]) * context[COLUMN_STEP]


@kernel
def dot_steps(context, p):
    """Steps of a score's dot product, the last ones filled up with zeros."""
    return padded_width(context, p.width) // context[K_PACK]


@kernel
def lay_out(context, p, longest_run, base):
    """The memory of a worker whose longest item runs over that many splits."""
    group = context[LANE_GROUP]
    padded_keys = context[KEY_TILE] + context[KEY_PADDING]
    lane_bytes = line_up(4 * group)
    rows_bytes = line_up(8 * most_rows_listed(context))
    columns = padded_columns(context, p)
    out_stride = _panel_stride(4 * columns)
    width = padded_width(context, p.width)
    shared = p.values == 0
    key_stride = _panel_stride(context[NATIVE_BYTES] * (max(width, columns) if shared else width))
    value_stride = key_stride if shared else _panel_stride(context[NATIVE_BYTES] * columns)
    pairs_stride = _panel_stride(4 * columns)
    state_bytes = group * out_stride + 2 * lane_bytes
    levels = 2
    while (1 << (levels - 2)) < longest_run:
        levels += 1
    q_packed = base
    scores = q_packed + dot_steps(context, p) * lane_stride(group)
    key_rows = scores + padded_keys * lane_stride(group)
    key_panel = key_rows + 2 * rows_bytes
    value_rows = key_panel + padded_keys * key_stride
    value_panel = value_rows + 2 * rows_bytes
    pairs = value_panel + (numba.int64(0) if shared else padded_keys * value_stride)
    spare_rows = pairs + (numba.int64(0) if context[INTERLEAVE] == 0 else padded_keys // 2 * pairs_stride)
    spare_scores = spare_rows + rows_bytes
    spare_out = spare_scores + line_up(4 * padded_keys * group)
    limits = spare_out + group * out_stride
    starts = limits + line_up(8 * (group // context[VECTOR_WIDTH]))
    first_rows = starts + rows_bytes
    second_rows = first_rows + 2 * lane_bytes
    following = second_rows + 2 * lane_bytes
    upcoming = following + LINE
    results = upcoming + rows_bytes
    low = results + rows_bytes
    high = low + lane_bytes
    alpha = high + lane_bytes
    weights = alpha + lane_bytes
    zeros = weights + 2 * lane_bytes
    states = zeros + line_up(max(4 * p.width, key_stride, value_stride, out_stride))
    end = states + levels * state_bytes
    spare = Spare(limits, starts, spare_rows, spare_scores, spare_out, pairs, pairs_stride, zeros)
    return Scratch(q_packed, scores, key_rows, key_panel, key_stride, value_rows, value_panel, value_stride,
                   rows_bytes, spare, first_rows, second_rows, following, upcoming, results, low, high, alpha, weights,
                   zeros, group, out_stride, state_bytes, states, end)  # fmt: skip


@kernel
def few_lanes(context, p):
    """Lanes that make an item worth its rows: all that it may have, where each item converts them anew."""
    in_place = p.row_element == context[NATIVE] and p.value_width % context[COLUMN_STEP] == 0
    return max(FEW_LANES, context[LEAST_LANES]) if in_place else context[LANE_GROUP]


@kernel
def _is_dense(row_stride, row_bytes):
    """Whether rows lie close enough to be read in place, one column of many of them at a time.

    Rows of one head among many are far apart, often by a power of two, and would share a few cache sets.
    """
    return row_stride < 2 * row_bytes


@kernel
def key_source(context, p, head, scratch):
    """The key rows of a head; they serve as value rows too where these have no address of their own."""
    native = p.row_element == context[NATIVE] and padded_width(context, p.width) == p.width
    if p.values == 0:
        in_place = native and p.value_width % context[COLUMN_STEP] == 0
    else:
        in_place = native
    return RowSource(p.keys + head * p.key_head_stride, p.key_page_stride, p.key_row_stride, p.block_size,
                     p.row_element, p.width, int(in_place), context[PREFETCH_ROWS] if in_place else context[KEY_TILE],
                     scratch.key_rows,
                     scratch.key_rows + scratch.rows_bytes, scratch.key_panel, scratch.key_stride,
                     scratch.zeros)  # fmt: skip


@kernel
def value_source(context, p, head, scratch):
    """The value rows of a head, read in place where they are whole vectors."""
    whole = p.row_element == context[NATIVE] and p.value_width % context[COLUMN_STEP] == 0
    in_place = whole and _is_dense(p.value_row_stride, context[NATIVE_BYTES] * p.value_width)
    return RowSource(p.values + head * p.value_head_stride, p.value_page_stride, p.value_row_stride, p.block_size,
                     p.row_element, p.value_width, int(in_place), context[KEY_TILE], scratch.value_rows,
                     scratch.value_rows + scratch.rows_bytes, scratch.value_panel, scratch.value_stride,
                     scratch.zeros)  # fmt: skip


@kernel
def state_at(scratch, address):
    """The softmax state that lies at an address."""
    m = address + scratch.group * scratch.out_stride
    return State(m, m + line_up(4 * scratch.group), address, scratch.out_stride)


@kernel
def workspace_bytes(context, p, longest_run, num_slots, num_workers):
    """Bytes that a planned call needs for its workers and its partial results."""
    scratch = lay_out(context, p, longest_run, numba.int64(0))
    return num_workers * scratch.end + num_slots * scratch.state_bytes
