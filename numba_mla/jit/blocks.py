"""What an attention is made of, for arrays in compiled code: one key tile after another over a lane group."""

from __future__ import annotations

import math

import numba
import numpy as np

from ..kernels.attend import weigh_values as weigh_native
from ..kernels.combine import clear
from ..kernels.compile import kernel
from ..kernels.context import (
    CLEAR,
    COLUMN_STEP,
    CONFIGURE_TILES,
    FINISH_ROWS,
    GRANULE,
    K_PACK,
    KEY_PADDING,
    LIST_ROWS,
    MASK,
    NATIVE,
    NATIVE_BYTES,
    NATIVE_ROWS,
    PACK,
    RELEASE_TILES,
    SCORE,
    SOFTMAX,
    VECTOR_WIDTH,
)
from ..kernels.memory import call, load_f32, store_f32, store_i32, store_i64
from ..kernels.rows import padded_width
from .arrays import address_of, check_length, check_rows, check_that, element_code
from .lane_group import EMPTY, KEYS, LANES, PACKED, ROWS_AHEAD, SCORED, STAGE, TILES, WEIGHTED, round_up

LOG2_E = 1 / math.log(2)


@kernel
def _padded_lanes(group):
    return round_up(group.counts[LANES], group.table[VECTOR_WIDTH])


@kernel
def _padded_keys(group):
    return round_up(group.counts[KEYS], group.table[KEY_PADDING])


@kernel
def _list_rows(group, base, stride, element, num_keys, width, in_place):
    """Addresses of a tile's rows in the native type, padded with rows of zeros."""
    table, places = group.table, group.places
    padded_keys = round_up(num_keys, table[KEY_PADDING])
    # The rows that would come next are prefetched, and may lie anywhere.
    call(table[LIST_ROWS], (places.rows, base, stride, num_keys + ROWS_AHEAD))
    if in_place:
        missing = padded_keys + ROWS_AHEAD - num_keys
        call(table[LIST_ROWS], (places.rows + 8 * num_keys, places.spare.zeros, 0, missing))
        return
    padding = places.panel_stride - width * table[NATIVE_BYTES]
    panel, panel_stride, ahead = places.panel, places.panel_stride, places.rows + 8 * ROWS_AHEAD
    call(table[NATIVE_ROWS + element], (panel, panel_stride, places.rows, ahead, num_keys, width, padding))
    call(table[CLEAR], (panel + num_keys * panel_stride, (padded_keys - num_keys) * panel_stride))
    call(table[LIST_ROWS], (places.rows, panel, panel_stride, padded_keys + ROWS_AHEAD))


@kernel
def _whole(group, num_keys):
    """Whether products that take several rows together, a constant stride apart, find all of them so."""
    return num_keys % group.table[GRANULE] == 0


@kernel
def pack(group, queries):
    """Give a lane group its queries, of which none has seen any key.

    Parameters
    ----------
    group : LaneGroup
    queries : array (lanes, width)
        Up to ``num_lanes`` of them, each contiguous, of the kernels' dtype.

    Raises
    ------
    ValueError
        Another shape or dtype.
    """
    check_rows(group.refusals, "queries", queries, 1, group.num_lanes, group.width)
    table, places = group.table, group.places
    function = table[PACK + element_code(queries)]
    check_that(group.refusals, function != 0, "queries", "elements of the type that the kernels are for")
    base, stride, num_lanes, vector = address_of(queries), queries.strides[0], len(queries), table[VECTOR_WIDTH]
    group.counts[:] = num_lanes, 0, 0, PACKED
    padded = _padded_lanes(group)
    for lane in range(padded):
        store_i64(places.rows + 8 * lane, base + lane * stride if lane < num_lanes else places.spare.zeros)
    for lane in range(0, padded, vector):
        call(function, (places.q_packed + 4 * lane, places.stride, places.rows + 8 * lane, group.width))
    real, steps = -(-group.width // table[K_PACK]), padded_width(table, group.width) // table[K_PACK]
    call(table[CLEAR], (places.q_packed + real * places.stride, (steps - real) * places.stride))
    clear(places.state, padded)


@kernel
def score(group, keys):
    """Scores of a key tile: ``S[key, lane] = keys[key] . queries[lane]``.

    Parameters
    ----------
    group : LaneGroup
        After ``pack``, or ``weigh_values`` for the tile before.
    keys : array (keys, width)
        Up to ``num_keys`` of them, each contiguous: float32, bfloat16, float8_e4m3fn or float8_e5m2.

    Returns
    -------
    array (keys, lanes)
        float32, not yet scaled, for the caller to change as it likes before the softmax; -inf hides a key from a lane.

    Raises
    ------
    ValueError
        Another shape, or out of turn.
    """
    check_rows(group.refusals, "keys", keys, 1, group.num_keys, group.width)
    check_that(group.refusals, group.counts[STAGE] == PACKED, "score", "a lane group after pack or weigh_values")
    table, places, element, num_keys = group.table, group.places, element_code(keys), len(keys)
    steps = padded_width(table, group.width)
    in_place = element == table[NATIVE] and steps == group.width and _whole(group, num_keys)
    _list_rows(group, address_of(keys), keys.strides[0], element, num_keys, group.width, in_place)
    group.counts[KEYS] = num_keys
    group.counts[STAGE] = SCORED
    if table[CONFIGURE_TILES] != 0:
        call(table[CONFIGURE_TILES], ())
    call(
        table[SCORE],
        (places.rows, places.rows + 8 * ROWS_AHEAD, 0, 0, 0, _padded_keys(group), places.q_packed,
         _padded_lanes(group), steps // table[K_PACK], places.scores, places.stride, places.spare.starts),
    )  # fmt: skip
    if table[RELEASE_TILES] != 0:
        call(table[RELEASE_TILES], ())
    return group.scores[:num_keys, : group.counts[LANES]]


@kernel
def _limit(group):
    """Every vector of lanes takes all keys of the tile."""
    for vector in range(_padded_lanes(group) // group.table[VECTOR_WIDTH]):
        store_i64(group.places.spare.limits + 8 * vector, group.counts[KEYS])


@kernel
def mask(group, start, low, high):
    """Hide from each lane the keys of a tile that lie outside ``[low, high)``.

    Parameters
    ----------
    group : LaneGroup
        After ``score``.
    start : int
        Position of the tile's first key.
    low, high : int arrays (lanes,)
        Position of the first key that a lane sees, and one past the last.

    Raises
    ------
    ValueError
        Another shape, or out of turn.
    """
    num_lanes, places = group.counts[LANES], group.places
    check_length(group.refusals, "low", low, num_lanes)
    check_length(group.refusals, "high", high, num_lanes)
    check_that(group.refusals, group.counts[STAGE] == SCORED, "mask", "a lane group after score")
    latest_low, earliest_high = low[0], high[0]
    for lane in range(_padded_lanes(group)):
        here = min(lane, num_lanes - 1)
        latest_low, earliest_high = max(latest_low, low[here]), min(earliest_high, high[here])
        store_i32(places.low + 4 * lane, low[here])
        store_i32(places.high + 4 * lane, high[here])
    if latest_low <= start and start + group.counts[KEYS] <= earliest_high:
        return
    _limit(group)
    call(
        group.table[MASK],
        (places.scores, places.stride, places.spare.limits, _padded_lanes(group), start, places.low, places.high),
    )


@kernel
def softmax(group):
    """Scores of a key tile to probabilities, in place, and the online softmax's maximum and sum of each lane.

    ``m' = max(m, S)``, ``P = exp(scale (S - m'))``, ``alpha = exp(scale (m - m'))``, ``l = l alpha + sum P``.

    Parameters
    ----------
    group : LaneGroup
        After ``score``. What ``score`` returned is used up.

    Raises
    ------
    ValueError
        Out of turn.
    """
    check_that(group.refusals, group.counts[STAGE] == SCORED, "softmax", "a lane group after score")
    group.counts[STAGE] = WEIGHTED
    places = group.places
    _limit(group)
    call(
        group.table[SOFTMAX],
        (places.scores, places.stride, places.spare.limits, _padded_keys(group), _padded_lanes(group),
         places.state.m, places.state.l, places.alpha, numba.float32(group.scale * LOG2_E)),
    )  # fmt: skip


@kernel
def weigh_values(group, values):
    """Add a key tile's values: ``O[lane] = O[lane] alpha[lane] + sum_key P[key, lane] values[key]``.

    Parameters
    ----------
    group : LaneGroup
        After ``softmax``.
    values : array (keys, value_width)
        As many as the tile has keys, each contiguous, of any type that keys may have.

    Raises
    ------
    ValueError
        Another shape, or out of turn.

    Notes
    -----
    A value that is not finite reaches every lane of the group, also those that its key is hidden from (0 * NaN).
    Values that follow one another in memory are read in place; those of one head among many are copied first, which
    takes half as long as the product with 128 lanes.
    """
    num_keys = group.counts[KEYS]
    check_rows(group.refusals, "values", values, num_keys, num_keys, group.value_width)
    check_that(group.refusals, group.counts[STAGE] == WEIGHTED, "weigh_values", "a lane group after softmax")
    group.counts[STAGE] = PACKED
    table, places, element = group.table, group.places, element_code(values)
    # Rows that lie far apart, often by a power of two, would share a few cache sets.
    dense = values.strides[0] < 2 * group.value_width * values.itemsize
    whole = group.value_width % table[COLUMN_STEP] == 0 and _whole(group, num_keys)
    in_place = element == table[NATIVE] and dense and whole
    _list_rows(group, address_of(values), values.strides[0], element, num_keys, group.value_width, in_place)
    if table[CONFIGURE_TILES] != 0:
        call(table[CONFIGURE_TILES], ())
    weigh_native(table, places.rows, _padded_keys(group), places.scores, places.stride, group.counts[LANES],
                 _padded_lanes(group), group.value_width, places.state.out, places.state.out_stride, places.alpha,
                 int(group.counts[TILES] > 0), places.spare)  # fmt: skip
    if table[RELEASE_TILES] != 0:
        call(table[RELEASE_TILES], ())
    group.counts[TILES] += 1


@kernel
def finish(group, out, lse):
    """Write what a lane group has come to: ``out = O / l``, rounded, and ``lse = ln l + scale m``.

    Parameters
    ----------
    group : LaneGroup
        After ``weigh_values``, or after ``pack`` where there are no keys. It then waits for ``pack``.
    out : array (lanes, value_width)
        Where to write: float32 or bfloat16, each row contiguous. A lane that saw no key gets 0.
    lse : array (lanes,)
        Where to write the log-sum-exp, natural; -inf for a lane that saw no key.

    Raises
    ------
    ValueError
        Another shape or dtype, or out of turn.
    """
    num_lanes, table, state = group.counts[LANES], group.table, group.places.state
    check_rows(group.refusals, "out", out, num_lanes, num_lanes, group.value_width)
    check_length(group.refusals, "lse", lse, num_lanes)
    element = element_code(out)
    check_that(group.refusals, table[FINISH_ROWS + element] != 0, "out", "float32 or bfloat16")
    check_that(group.refusals, group.counts[STAGE] == PACKED, "finish", "a lane group after pack or weigh_values")
    group.counts[STAGE] = EMPTY
    rows, factors = group.places.rows, group.places.alpha
    call(table[LIST_ROWS], (rows, address_of(out), out.strides[0], num_lanes))
    for lane in range(num_lanes):
        total = float(load_f32(state.l + 4 * lane))
        factor = 0.0
        lse[lane] = -np.inf
        if total == 0.0:
            call(table[CLEAR], (state.out + lane * state.out_stride, state.out_stride))
        else:
            factor = 1.0 / total
            lse[lane] = math.log(total) + float(load_f32(state.m + 4 * lane)) * group.scale
        store_f32(factors + 4 * lane, factor)
    call(table[FINISH_ROWS + element], (rows, state.out, state.out_stride, num_lanes, group.value_width, factors))
