"""One key tile of attention: S = K Q, visibility, softmax, O = O alpha + P V."""

from __future__ import annotations

from typing import NamedTuple

from .compile import kernel
from .context import (
    ANY_NONFINITE,
    COLUMN_STEP,
    COPY,
    GRANULE,
    INTERLEAVE,
    K_PACK,
    KEY_PADDING,
    MASK,
    SCORE,
    SCORE_ROWS,
    SOFTMAX,
    TRANSPOSE_STEPS,
    VECTOR_WIDTH,
    WEIGH_VALUES,
)
from .memory import call, call_int, load_i32, load_i64, store_i64


class Lanes(NamedTuple):
    """A lane group: its queries, packed, and what each lane sees.

    A lane sees the keys from ``low`` to before ``high`` (int32 a lane), and every lane those from
    ``common_start`` to before ``common_end``; none sees less than the lane before it. ``num`` lanes are real;
    ``padded``, whole vectors, are computed. ``stride`` is the bytes of a dot step of the queries, and of a key of
    the scores.
    """

    num: int
    padded: int
    stride: int
    q_packed: int
    low: int
    high: int
    common_start: int
    common_end: int


class State(NamedTuple):
    """The online softmax's state of a lane group: maximum, sum, and output not yet divided by the sum."""

    m: int
    l: int  # noqa: E741 - the field's letter
    out: int
    out_stride: int


class Spare(NamedTuple):
    """Memory that one key tile may use as it likes: row addresses, scores, outputs, and pairs of value rows.

    ``limits`` is for the keys of a tile that each vector of lanes takes, ``starts`` for the first vector that each
    block of keys is seen by. ``zeros`` is a row of zeros.
    """

    limits: int
    starts: int
    rows: int
    scores: int
    out: int
    pairs: int
    pairs_stride: int
    zeros: int


@kernel
def _find_limits(context, first, num_keys, padded_keys, lanes, spare):
    """For each vector of lanes, the keys of a tile that any of them sees; for each block of keys, the first vector.

    What lies beyond is not computed: its probabilities are zeros.
    """
    width, rows = context[VECTOR_WIDTH], context[SCORE_ROWS]
    vectors = lanes.padded // width
    for vector in range(vectors):
        # A vector's last lane sees the most.
        high = load_i32(lanes.high + 4 * ((vector + 1) * width - 1))
        store_i64(spare.limits + 8 * vector, max(0, min(num_keys, high - first)))
    vector = 0
    for block in range(padded_keys // rows):
        while vector < vectors and load_i64(spare.limits + 8 * vector) <= block * rows:
            vector += 1
        store_i64(spare.starts + 8 * block, vector)


@kernel
def _fill_limits(limits, vectors, num_keys):
    """The same number of keys for all vectors of lanes."""
    for vector in range(vectors):
        store_i64(limits + 8 * vector, num_keys)


@kernel
def weigh_values(context, rows, num_keys, probabilities, row_bytes, num_lanes, padded_lanes, value_width, out,
                 out_stride, alpha, accumulate, spare):  # fmt: skip
    """O[lane] = O[lane] alpha[lane] + sum_key P[key, lane] V[key], for keys up to each vector's limit.

    P is used up: where the product runs on tiles, it is transposed where it stands.
    """
    columns = -(-value_width // context[COLUMN_STEP]) * context[COLUMN_STEP]
    values = rows
    if context[TRANSPOSE_STEPS] != 0:
        call(context[TRANSPOSE_STEPS], (probabilities, row_bytes, num_keys // context[K_PACK], padded_lanes))
    if context[INTERLEAVE] != 0:
        call(context[INTERLEAVE], (rows, num_keys, columns, spare.pairs, spare.pairs_stride))
        values = spare.pairs
    granule = context[GRANULE]
    call(
        context[WEIGH_VALUES],
        (values, spare.pairs_stride, columns, spare.limits, probabilities, row_bytes,
         -(-num_lanes // granule) * granule, out, out_stride, alpha, accumulate),
    )  # fmt: skip


@kernel
def attend(context, key_rows, ahead, value_rows, first, num_keys, lanes, state, scores, alpha, steps,
           value_width, exponent_scale, accumulate, spare):  # fmt: skip
    """Take one key tile into a lane group's state.

    Parameters
    ----------
    context : int64 array
        The instruction set's table.
    key_rows, value_rows : address
        Addresses of the tile's rows, padded with rows of zeros to KEY_PADDING.
    ahead : tuple of address
        Addresses of as many rows to prefetch on each of the first four passes over lanes, or 0.
    first, num_keys : int
        Position of the tile's first key; its keys.
    lanes : Lanes
    state : State
    scores, alpha : address
        Scratch: [key tile + padding] rows of ``stride`` bytes, float32 [padded lanes].
    steps, value_width : int
        Dot steps of a score; value columns.
    exponent_scale : float32
        scale * log2(e).
    accumulate : int
        0 for the first tile of a split.
    spare : Spare
    """
    padding = context[KEY_PADDING]
    padded_keys = -(-num_keys // padding) * padding
    _find_limits(context, first, num_keys, padded_keys, lanes, spare)
    call(
        context[SCORE],
        (key_rows, ahead[0], ahead[1], ahead[2], ahead[3], padded_keys, lanes.q_packed, lanes.padded, steps, scores,
         lanes.stride, spare.starts),
    )  # fmt: skip
    same = lanes.common_start <= first and first + num_keys <= lanes.common_end
    if not same:
        call(context[MASK], (scores, lanes.stride, spare.limits, lanes.padded, first, lanes.low, lanes.high))
    call(
        context[SOFTMAX],
        (scores, lanes.stride, spare.limits, padded_keys, lanes.padded, state.m, state.l, alpha, exponent_scale),
    )
    # Rows that all lanes see may hold what they like.
    seen = 0 if lanes.common_start > first else max(0, min(num_keys, lanes.common_end - first))
    if not same and call_int(context[ANY_NONFINITE], (value_rows + 8 * seen, num_keys - seen, value_width)) != 0:
        _weigh_seen_values(context, value_rows, first, num_keys, padded_keys, lanes, state, scores, alpha,
                           value_width, accumulate, spare)  # fmt: skip
        return
    weigh_values(context, value_rows, padded_keys, scores, lanes.stride, lanes.num, lanes.padded, value_width,
                 state.out, state.out_stride, alpha, accumulate, spare)  # fmt: skip


@kernel
def _weigh_seen_values(context, value_rows, first, num_keys, padded_keys, lanes, state, scores, alpha, value_width,
                       accumulate, spare):  # fmt: skip
    """The value product where a row that some lane does not see holds NaN or inf, which 0 would not silence.

    Lanes that see the same keys go together, in memory of their own, with every other row replaced by zeros:
    0 * 0 adds exactly nothing, as 0 * v does for a finite v, so the other lanes' bits are those of the plain
    product.
    """
    vector_width, stride = context[VECTOR_WIDTH], state.out_stride
    lane = 0
    while lane < lanes.num:
        low = load_i32(lanes.low + 4 * lane)
        high = load_i32(lanes.high + 4 * lane)
        end = lane + 1
        while end < lanes.num and load_i32(lanes.low + 4 * end) == low and load_i32(lanes.high + 4 * end) == high:
            end += 1
        for key in range(padded_keys):
            seen = key < num_keys and low <= first + key and first + key < high
            store_i64(spare.rows + 8 * key, load_i64(value_rows + 8 * key) if seen else spare.zeros)
        count = end - lane
        padded = -(-count // vector_width) * vector_width
        for step in range(padded_keys // context[K_PACK]):
            source = scores + step * lanes.stride + 4 * lane
            call(context[COPY], (spare.scores + 4 * step * padded, source, 4 * count))
        call(context[COPY], (spare.out, state.out + lane * stride, count * stride))
        _fill_limits(spare.limits, padded // vector_width, padded_keys)
        weigh_values(context, spare.rows, padded_keys, spare.scores, 4 * padded, count, padded, value_width, spare.out,
                     stride, alpha + 4 * lane, accumulate, spare)  # fmt: skip
        call(context[COPY], (state.out + lane * stride, spare.out, count * stride))
        lane = end
