"""One worker's memory: where everything lies from a base address on."""

from __future__ import annotations

from typing import NamedTuple

import numba

from .attend import State
from .compile import kernel
from .context import KEY_PADDING, LANE_GROUP, VECTOR_WIDTH
from .problem import unpack
from .schedule import KEY_TILE

# Rows that are prefetched before the row in hand.
ROWS_AHEAD = 16
# Every piece of memory starts on a cache line.
LINE = 64


class Scratch(NamedTuple):
    """Addresses of the pieces; ``end`` is one past the last. ``states`` is a stack of ``state_bytes`` each."""

    q_packed: int
    scores: int
    source_rows: int
    panel_rows: int
    spare_rows: int
    panel: int
    panel_stride: int
    low: int
    high: int
    alpha: int
    weights: int
    zeros: int
    out_stride: int
    state_bytes: int
    states: int
    end: int


@kernel
def line_up(num_bytes):
    """Rounded up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE


@kernel
def lay_out(context, p, longest_run, base):
    """The memory of a worker whose longest item runs over that many splits."""
    vector, group = context[VECTOR_WIDTH], context[LANE_GROUP]
    padded_keys = KEY_TILE + context[KEY_PADDING]
    lane_bytes = line_up(4 * group)
    rows_bytes = line_up(8 * (padded_keys + ROWS_AHEAD))
    out_stride = line_up(4 * (-(-p.value_width // vector) * vector))
    panel_stride = line_up(max(4 * p.width, out_stride))
    if panel_stride % 1024 == 0:
        # Rows a large power of two apart would share a few cache sets.
        panel_stride += LINE
    state_bytes = group * out_stride + 2 * lane_bytes
    levels = 2
    while (1 << (levels - 2)) < longest_run:
        levels += 1
    q_packed = base
    scores = q_packed + line_up(4 * p.width * group)
    source_rows = scores + line_up(4 * padded_keys * group)
    panel_rows = source_rows + rows_bytes
    spare_rows = panel_rows + rows_bytes
    panel = spare_rows + rows_bytes
    low = panel + KEY_TILE * panel_stride
    high = low + lane_bytes
    alpha = high + lane_bytes
    weights = alpha + lane_bytes
    zeros = weights + 2 * lane_bytes
    states = zeros + panel_stride
    end = states + levels * state_bytes
    return Scratch(q_packed, scores, source_rows, panel_rows, spare_rows, panel, panel_stride, low, high, alpha,
                   weights, zeros, out_stride, state_bytes, states, end)  # fmt: skip


@kernel
def state_at(context, scratch, address):
    """The softmax state that lies at an address."""
    m = address + context[LANE_GROUP] * scratch.out_stride
    return State(m, m + line_up(4 * context[LANE_GROUP]), address, scratch.out_stride)


@kernel
def workspace_bytes(context, packed_problem, longest_run, num_slots, num_workers):
    """Bytes that a planned call needs for its workers and its partial results."""
    scratch = lay_out(context, unpack(packed_problem), longest_run, numba.int64(0))
    return num_workers * scratch.end + num_slots * scratch.state_bytes
