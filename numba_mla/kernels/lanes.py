"""A lane group's rows: the queries that go into it, and the results that come out of it."""

from __future__ import annotations

import math

from .attend import Lanes
from .compile import kernel
from .context import CLEAR, COPY, FINISH_ROWS, K_PACK, LIST_ROWS, NATIVE_BYTES, PACK, PREFETCH, VECTOR_WIDTH
from .memory import call, load_f32, load_i64, store_f32, store_i32, store_i64
from .schedule import FIRST_HEAD, FIRST_LANE, NUM_LANES, last_seen
from .scratch import dot_steps, lane_stride, padded_columns


@kernel
def _list_lanes(context, p, group, first_token, base, token_stride, head_stride, num_lanes, rows):
    """Addresses of what an array has for each of a group's first lanes."""
    base += first_token * token_stride + group[FIRST_HEAD] * head_stride
    if p.group_heads == 1:
        call(context[LIST_ROWS], (rows, base + group[FIRST_LANE] * token_stride, token_stride, num_lanes))
        return
    token = group[FIRST_LANE] // p.group_heads
    head = group[FIRST_LANE] - token * p.group_heads
    i = 0
    while i < num_lanes:
        count = min(p.group_heads - head, num_lanes - i)
        first = base + token * token_stride + head * head_stride
        call(context[LIST_ROWS], (rows + 8 * i, first, head_stride, count))
        i += count
        token += 1
        head = 0


@kernel
def list_queries(context, p, group, first_token, num_lanes, rows):
    """Addresses of the first lanes' queries, of their latent parts."""
    _list_lanes(context, p, group, first_token, p.q, p.q_token_stride, p.q_head_stride, num_lanes, rows)


@kernel
def _list_rotary(context, p, group, first_token, num_lanes, rows):
    """Addresses of the first lanes' queries, of their rotary parts."""
    _list_lanes(context, p, group, first_token, p.q_pe, p.q_pe_token_stride, p.q_pe_head_stride, num_lanes, rows)


@kernel
def list_outputs(context, p, group, first_token, num_lanes, rows):
    """Addresses of where the first lanes' results go."""
    _list_lanes(context, p, group, first_token, p.out, p.out_token_stride, p.out_head_stride, num_lanes, rows)


@kernel
def _note_sight(context, p, group, seq_len, num_new, padded, scratch):
    """What each lane sees; lanes of padding as much as the last one, so that they ask for no mask of their own."""
    call(context[CLEAR], (scratch.low, 4 * padded))
    token = group[FIRST_LANE] // p.group_heads
    token_end = (token + 1) * p.group_heads - group[FIRST_LANE]
    high = last_seen(token, seq_len, num_new, p.causal) + 1
    for i in range(padded):
        if i == token_end and i < group[NUM_LANES]:
            token += 1
            token_end += p.group_heads
            high = last_seen(token, seq_len, num_new, p.causal) + 1
        store_i32(scratch.high + 4 * i, high)


@kernel
def _join_parts(context, p, latent, rotary, joined):
    """Put the two parts of a vector's worth of queries side by side, for a dot step that straddles them."""
    size = context[NATIVE_BYTES]
    for i in range(context[VECTOR_WIDTH]):
        here = joined + i * size * p.width
        call(context[COPY], (here, load_i64(latent + 8 * i), size * p.q_split))
        call(context[COPY], (here + size * p.q_split, load_i64(rotary + 8 * i), size * (p.width - p.q_split)))
        store_i64(latent + 8 * i, here)


@kernel
def _pack_vector(context, p, latent, rotary, target, stride, scratch):
    """A vector's worth of lanes."""
    if p.q_split % context[K_PACK] != 0:
        _join_parts(context, p, latent, rotary, scratch.key_panel)
        call(context[PACK + p.q_element], (target, stride, latent, p.width))
        return
    call(context[PACK + p.q_element], (target, stride, latent, p.q_split))
    if p.width > p.q_split:
        target += stride * (p.q_split // context[K_PACK])
        call(context[PACK + p.q_element], (target, stride, rotary, p.width - p.q_split))


@kernel
def _fill_steps(context, p, stride, scratch):
    """Zeros for the dot steps that a row does not fill."""
    real = -(-p.width // context[K_PACK])
    call(context[CLEAR], (scratch.q_packed + real * stride, (dot_steps(context, p) - real) * stride))


@kernel
def _prefetch_queries(context, p, first, count, scratch):
    """Ask for some lanes' queries, which come from far away, before they are packed."""
    size = context[NATIVE_BYTES]
    call(context[PREFETCH], (scratch.first_rows + 8 * first, count, size * p.q_split))
    if p.width > p.q_split:
        call(context[PREFETCH], (scratch.second_rows + 8 * first, count, size * (p.width - p.q_split)))


@kernel
def pack_lanes(context, p, group, first_token, seq_len, num_new, scratch):
    """Read a lane group's queries into [dot step][lane], and note what each lane sees."""
    vector, num_lanes = context[VECTOR_WIDTH], group[NUM_LANES]
    padded = -(-num_lanes // vector) * vector
    stride = lane_stride(padded)
    list_queries(context, p, group, first_token, num_lanes, scratch.first_rows)
    call(context[LIST_ROWS], (scratch.first_rows + 8 * num_lanes, scratch.zeros, 0, padded - num_lanes))
    if p.width > p.q_split:
        _list_rotary(context, p, group, first_token, num_lanes, scratch.second_rows)
        call(context[LIST_ROWS], (scratch.second_rows + 8 * num_lanes, scratch.zeros, 0, padded - num_lanes))
    _prefetch_queries(context, p, 0, min(2 * vector, padded), scratch)
    for lane in range(0, padded, vector):
        soon = min(lane + 2 * vector, padded)
        _prefetch_queries(context, p, soon, min(vector, padded - soon), scratch)
        latent, rotary = scratch.first_rows + 8 * lane, scratch.second_rows + 8 * lane
        _pack_vector(context, p, latent, rotary, scratch.q_packed + 4 * lane, stride, scratch)
    _fill_steps(context, p, stride, scratch)
    _note_sight(context, p, group, seq_len, num_new, padded, scratch)
    common_end = last_seen(group[FIRST_LANE] // p.group_heads, seq_len, num_new, p.causal) + 1
    return Lanes(num_lanes, padded, stride, scratch.q_packed, scratch.low, scratch.high, 0, common_end)


@kernel
def write_lanes(context, p, group, first_token, state, score_scale, value_scale, scratch):
    """Divide by the sums, round to the output's format, write; and lse = ln(l) + m * scale."""
    num_lanes, row_bytes = group[NUM_LANES], 4 * padded_columns(context, p)
    outputs, sums, factors = scratch.first_rows, scratch.second_rows, scratch.weights
    list_outputs(context, p, group, first_token, num_lanes, outputs)
    _list_lanes(context, p, group, first_token, p.lse, p.lse_token_stride, p.lse_head_stride, num_lanes, sums)
    for i in range(num_lanes):
        total = float(load_f32(state.l + 4 * i))
        factor, lse = 0.0, -math.inf
        if total == 0.0:
            call(context[CLEAR], (state.out + i * state.out_stride, row_bytes))
        else:
            factor = value_scale / total
            lse = math.log(total) + float(load_f32(state.m + 4 * i)) * score_scale
        store_f32(factors + 4 * i, factor)
        store_f32(load_i64(sums + 8 * i), lse)
    call(context[FINISH_ROWS + p.out_element],
         (outputs, state.out, state.out_stride, num_lanes, p.value_width, factors))  # fmt: skip
