"""Work items of attention: pack the queries, walk the splits, merge in the fixed tree, write the result."""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from .attend import Lanes, attend
from .combine import clear, merge
from .compile import kernel
from .context import (
    CLEAR,
    CONFIGURE_TILES,
    COPY,
    FINISH,
    ITEM_ORDER,
    K_PACK,
    KEY_PADDING,
    KEY_TILE,
    KV_SPLIT,
    LANE_GROUP,
    LEAST_LANES,
    LIST_ROWS,
    NARROW,
    NATIVE_BYTES,
    PACK,
    PREFETCH,
    RELEASE_TILES,
    VECTOR_WIDTH,
)
from .memory import call, fetch_add, load_f32, load_i64, store_f32, store_i32, store_i64
from .problem import unpack
from .schedule import (
    END,
    FIRST_HEAD,
    FIRST_LANE,
    FIRST_SLOT,
    FIRST_SPLIT,
    GROUP,
    GROUP_SIZE,
    NUM_ITEMS,
    NUM_LANES,
    NUM_SPLITS,
    REMAINING,
    REQUEST,
    SLOT,
    Cut,
    last_seen,
    plan_attention,
)
from .scratch import (
    dot_steps,
    few_lanes,
    key_source,
    lane_stride,
    lay_out,
    padded_columns,
    state_at,
    value_source,
    workspace_bytes,
)
from .source import fetch
from .validity import DONE, admit

LOG2_E = 1 / math.log(2)


class Outlook(NamedTuple):
    """What a worker's next item may be: the plan, where queries begin, and where the next item's place is counted."""

    items: np.ndarray
    groups: np.ndarray
    query_start_loc: np.ndarray
    counter: int


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
def _fill_steps(context, p, stride, scratch):
    """Zeros for the dot steps that a row does not fill."""
    real = -(-p.width // context[K_PACK])
    call(context[CLEAR], (scratch.q_packed + real * stride, (dot_steps(context, p) - real) * stride))


@kernel
def _prefetch_queries(context, p, group, first_token, start, stop):
    """Ask for some lanes' queries, which come from far away, before they are packed."""
    for lane in range(group[FIRST_LANE] + start, group[FIRST_LANE] + min(stop, group[NUM_LANES])):
        token = lane // p.group_heads
        row, column = first_token + token, group[FIRST_HEAD] + lane - token * p.group_heads
        size = context[NATIVE_BYTES]
        call(context[PREFETCH], (p.q + row * p.q_token_stride + column * p.q_head_stride, size * p.q_split))
        if p.width > p.q_split:
            rotary = p.q_pe + row * p.q_pe_token_stride + column * p.q_pe_head_stride
            call(context[PREFETCH], (rotary, size * (p.width - p.q_split)))


@kernel
def _prefetch_outputs(context, p, group, first_token):
    """Ask for the memory that a group's result will be written to, which a store would wait for."""
    for lane in range(group[FIRST_LANE], group[FIRST_LANE] + group[NUM_LANES]):
        token = lane // p.group_heads
        row, column = first_token + token, group[FIRST_HEAD] + lane - token * p.group_heads
        target = p.out + row * p.out_token_stride + column * p.out_head_stride
        call(context[PREFETCH], (target, p.out_bytes * p.value_width))


@kernel
def _pack_lanes(context, p, group, first_token, seq_len, num_new, scratch):
    """Read a lane group's queries into [dot step][lane], and note what each lane sees."""
    vector = context[VECTOR_WIDTH]
    first_lane, num_lanes = group[FIRST_LANE], group[NUM_LANES]
    padded = -(-num_lanes // vector) * vector
    stride = lane_stride(padded)
    latent, rotary = scratch.key_rows, scratch.spare.rows
    token = first_lane // p.group_heads
    head = first_lane - token * p.group_heads
    _prefetch_queries(context, p, group, first_token, numba.int64(0), 2 * vector)
    for block in range(0, padded, vector):
        _prefetch_queries(context, p, group, first_token, block + 2 * vector, block + 3 * vector)
        for i in range(vector):
            store_i32(scratch.low + 4 * (block + i), 0)
            store_i32(scratch.high + 4 * (block + i), last_seen(token, seq_len, num_new, p.causal) + 1)
            if block + i < num_lanes:
                row, column = first_token + token, group[FIRST_HEAD] + head
                store_i64(latent + 8 * i, p.q + row * p.q_token_stride + column * p.q_head_stride)
                store_i64(rotary + 8 * i, p.q_pe + row * p.q_pe_token_stride + column * p.q_pe_head_stride)
            else:
                store_i64(latent + 8 * i, scratch.zeros)
                store_i64(rotary + 8 * i, scratch.zeros)
            # Lanes of padding repeat what the last lane sees, so that they ask for no mask of their own.
            if block + i < num_lanes - 1:
                head += 1
                if head == p.group_heads:
                    head = 0
                    token += 1
        target = scratch.q_packed + 4 * block
        if p.q_split % context[K_PACK] != 0:
            _join_parts(context, p, latent, rotary, scratch.key_panel)
            call(context[PACK + p.q_element], (target, stride, latent, p.width))
            continue
        call(context[PACK + p.q_element], (target, stride, latent, p.q_split))
        target += stride * (p.q_split // context[K_PACK])
        call(context[PACK + p.q_element], (target, stride, rotary, p.width - p.q_split))
    _fill_steps(context, p, stride, scratch)
    common_end = last_seen(first_lane // p.group_heads, seq_len, num_new, p.causal) + 1
    return Lanes(num_lanes, padded, stride, scratch.q_packed, scratch.low, scratch.high, 0, common_end)


@kernel
def _look_ahead(context, p, outlook, scratch):
    """Take the next item, and list its queries, as many as a key tile has rows: they come from far away.

    Prefetched while the last key tile of the item before is in hand, they are there when it is done.
    """
    index = fetch_add(outlook.counter, 1)
    store_i64(scratch.following, index)
    if index >= len(outlook.items):
        return numba.int64(0)
    group = outlook.groups[outlook.items[index, GROUP]]
    first_token = outlook.query_start_loc[group[REQUEST]]
    num_rows = context[KEY_TILE] + context[KEY_PADDING]
    num_listed = min(num_rows, group[NUM_LANES])
    for i in range(num_listed):
        lane = group[FIRST_LANE] + i
        token = lane // p.group_heads
        row, column = first_token + token, group[FIRST_HEAD] + lane - token * p.group_heads
        store_i64(scratch.upcoming + 8 * i, p.q + row * p.q_token_stride + column * p.q_head_stride)
    call(context[LIST_ROWS], (scratch.upcoming + 8 * num_listed, scratch.zeros, 0, num_rows - num_listed))
    return scratch.upcoming


@kernel
def _attend_split(context, p, sources, table, group, lanes, split, is_last, outlook, state, scratch, exponent_scale):
    """One split from an empty state on, key tile by key tile; the last one of an item looks ahead."""
    keys, values = sources
    end = group[END]
    clear(state, lanes.padded)
    first_key, key_tile = split * context[KV_SPLIT], context[KEY_TILE]
    last = min(end, first_key + context[KV_SPLIT])
    for first in range(first_key, last, key_tile):
        num_keys = min(key_tile, last - first)
        key_rows, ahead = fetch(context, keys, table, group[REQUEST], first, num_keys, end)
        value_rows = key_rows
        if p.values != 0:
            value_rows, _ = fetch(context, values, table, group[REQUEST], first, num_keys, end)
        later = numba.int64(0)
        if is_last and first + key_tile >= last:
            later = _look_ahead(context, p, outlook, scratch)
        attend(context, key_rows, ahead, later, value_rows, first, num_keys, lanes, state, scratch.scores,
               scratch.alpha, dot_steps(context, p), p.value_width, exponent_scale, int(first > first_key),
               scratch.spare)  # fmt: skip


@kernel
def _attend_run(context, p, sources, table, group, lanes, item, outlook, result, scratch, exponent_scale):
    """A run of splits, merged as the fixed tree has it, into the state at ``result``.

    A stack holds finished subtrees of falling sizes, the first of them at ``result``: after split i it merges as
    often as i + 1 is even.
    """
    depth, num_splits = 0, item[NUM_SPLITS]
    if num_splits == 0:
        clear(state_at(scratch, result), lanes.padded)
    for i in range(num_splits):
        top = state_at(scratch, result if depth == 0 else scratch.states + depth * scratch.state_bytes)
        is_last = i + 1 == num_splits
        _attend_split(context, p, sources, table, group, lanes, item[FIRST_SPLIT] + i, is_last, outlook, top, scratch,
                      exponent_scale)  # fmt: skip
        depth += 1
        finished = i + 1
        while depth > 1 and (finished % 2 == 0 or is_last):
            below = result if depth == 2 else scratch.states + (depth - 2) * scratch.state_bytes
            a = state_at(scratch, below)
            b = state_at(scratch, scratch.states + (depth - 1) * scratch.state_bytes)
            merge(context, a, b, lanes.num, lanes.padded, padded_columns(context, p), scratch.weights, exponent_scale)
            depth -= 1
            finished //= 2


@kernel
def _merge_slots(context, p, group, slots, lanes, scratch, exponent_scale):
    """The upper part of the fixed tree, over a group's partial results; the result is in the first slot."""
    first_slot, num_slots = group[FIRST_SLOT], group[NUM_ITEMS]
    distance = 1
    while distance < num_slots:
        for i in range(0, num_slots - distance, 2 * distance):
            a = state_at(scratch, slots + (first_slot + i) * scratch.state_bytes)
            b = state_at(scratch, slots + (first_slot + i + distance) * scratch.state_bytes)
            merge(context, a, b, lanes.num, lanes.padded, padded_columns(context, p), scratch.weights, exponent_scale)
        distance *= 2


@kernel
def _write_lanes(context, p, group, first_token, state, score_scale, value_scale, scratch):
    """Divide by the sums, round to the output's format, write; and lse = ln(l) + m * scale."""
    token = group[FIRST_LANE] // p.group_heads
    head = group[FIRST_LANE] - token * p.group_heads
    for i in range(group[NUM_LANES]):
        row, column = first_token + token, group[FIRST_HEAD] + head
        total = float(load_f32(state.l + 4 * i))
        target = p.out + row * p.out_token_stride + column * p.out_head_stride
        lse = -math.inf
        if total == 0.0:
            call(context[NARROW + p.out_element], (target, scratch.zeros, p.value_width))
        else:
            out = state.out + i * state.out_stride
            call(context[FINISH + p.out_element], (target, out, p.value_width, value_scale / total))
            lse = math.log(total) + float(load_f32(state.m + 4 * i)) * score_scale
        store_f32(p.lse + row * p.lse_token_stride + column * p.lse_head_stride, lse)
        head += 1
        if head == p.group_heads:
            head = 0
            token += 1


@kernel
def _run_item(context, p, item, outlook, seq_lens, table, slots, scratch, score_scale, value_scale):
    """One work item; whoever finishes the last item of a split group merges and writes the group."""
    exponent_scale = numba.float32(score_scale * LOG2_E)
    groups = outlook.groups
    group = groups[item[GROUP]]
    request = group[REQUEST]
    first_token = outlook.query_start_loc[request]
    num_new = outlook.query_start_loc[request + 1] - first_token
    lanes = _pack_lanes(context, p, group, first_token, seq_lens[request], num_new, scratch)
    head = group[FIRST_HEAD]
    sources = key_source(context, p, head, scratch), value_source(context, p, head, scratch)
    result = scratch.states
    if item[SLOT] < 0:
        _prefetch_outputs(context, p, group, first_token)
    else:
        result = slots + item[SLOT] * scratch.state_bytes
    _attend_run(context, p, sources, table, group, lanes, item, outlook, result, scratch, exponent_scale)
    if item[SLOT] >= 0:
        if fetch_add(groups.ctypes.data + 8 * (item[GROUP] * GROUP_SIZE + REMAINING), -1) > 1:
            return
        _merge_slots(context, p, group, slots, lanes, scratch, exponent_scale)
        result = slots + group[FIRST_SLOT] * scratch.state_bytes
    _write_lanes(context, p, group, first_token, state_at(scratch, result), score_scale, value_scale,
                 scratch)  # fmt: skip


@kernel
def _work(worker, context, placed, score_scale, value_scale, metadata, plan, next_item, workspace, num_workers):
    """One worker: take items until there are none."""
    p = unpack(placed)
    seq_lens, query_start_loc, table = metadata
    items, groups, _, longest_run = plan
    size = lay_out(context, p, longest_run, numba.int64(0)).end
    scratch = lay_out(context, p, longest_run, workspace + worker * size)
    for at in range(scratch.zeros, scratch.states, 8):
        store_i64(at, 0)
    slots = workspace + num_workers * size
    if context[CONFIGURE_TILES] != 0:
        call(context[CONFIGURE_TILES], ())
    outlook = Outlook(items, groups, query_start_loc, next_item.ctypes.data)
    index = fetch_add(outlook.counter, 1)
    while index < len(items):
        store_i64(scratch.following, -1)
        _run_item(context, p, items[index], outlook, seq_lens, table, slots, scratch, score_scale, value_scale)
        index = load_i64(scratch.following)
        # An item without keys has no last key tile, in which the next one is taken.
        if index < 0:
            index = fetch_add(outlook.counter, 1)
    if context[RELEASE_TILES] != 0:
        call(context[RELEASE_TILES], ())


@kernel
def _prepare(context, packed, forms, apart, checks, arrays, num_workers):
    """Check a call's arrays and plan its work: a status, the problem with its addresses, metadata, and the plan."""
    status, placed, seq_lens, query_start_loc, table = admit(packed, forms, apart, checks, arrays)
    if status != DONE:
        query_start_loc = np.zeros(1, np.int64)
        seq_lens = query_start_loc[:0]
    p = unpack(placed)
    cut = Cut(context[LANE_GROUP], few_lanes(context, p), context[LEAST_LANES], context[KV_SPLIT], context[ITEM_ORDER])
    plan = plan_attention(seq_lens, query_start_loc, p.num_heads, p.group_heads, p.causal, cut, num_workers)
    return status, placed, (seq_lens, query_start_loc, table), plan


@kernel(entry=True)
def attention_serial(context, packed, forms, apart, score_scale, value_scale, checks, q, q_pe, keys, values, out, lse,
                     seq_lens, query_start_loc, table, workspace, workspace_size, num_workers):  # fmt: skip
    """Check, plan, and run all items in the calling thread; as ``attention_parallel``."""
    arrays = (q, q_pe, keys, values, out, lse, seq_lens, query_start_loc, table)
    one = numba.int64(1)
    status, placed, metadata, plan = _prepare(context, packed, forms, apart, checks, arrays, one)
    if status != DONE:
        return status
    _, _, num_slots, longest_run = plan
    needed = workspace_bytes(context, unpack(placed), longest_run, num_slots, one)
    if needed > workspace_size:
        return needed
    _work(numba.int64(0), context, placed, score_scale, value_scale, metadata, plan, np.zeros(1, np.int64), workspace,
          one)  # fmt: skip
    return DONE


@kernel(entry=True, parallel=True)
def attention_parallel(context, packed, forms, apart, score_scale, value_scale, checks, q, q_pe, keys, values, out,
                       lse, seq_lens, query_start_loc, table, workspace, workspace_size, num_workers):  # fmt: skip
    """Check, plan, and run all items, by as many workers as asked for.

    All in one call, so that what Python does before and after a kernel, which finds the caches full of the
    kernel's data, is as little as can be.

    Parameters
    ----------
    context : int64 array
        The instruction set's table.
    packed : int64 array
        The problem, with offsets in the place of addresses.
    forms : int64 (ARRAYS, FORM_SIZE)
        What the arrays must look like.
    apart : int64 (n, 4)
        Arrays and outputs that must not meet, as ``may_meet`` has it.
    score_scale, value_scale : float
        Factors on scores and values.
    checks : int
        Which metadata to check: STARTS, PAGES or NEW_TOKENS.
    q, q_pe, keys, values, out, lse, seq_lens, query_start_loc, table : address
        The arrays' objects; 0 for none.
    workspace : address
    workspace_size : int
        Its bytes.
    num_workers : int
        Threads.

    Returns
    -------
    int
        DONE; or the bytes of workspace that the call needs, if that is more than it has; or why it is refused:
        OTHER_FORM, MAY_MEET or BAD_METADATA. Nothing is written then.
    """
    arrays = (q, q_pe, keys, values, out, lse, seq_lens, query_start_loc, table)
    status, placed, metadata, plan = _prepare(context, packed, forms, apart, checks, arrays, num_workers)
    if status != DONE:
        return status
    items, _, num_slots, longest_run = plan
    workers = min(num_workers, len(items))
    needed = workspace_bytes(context, unpack(placed), longest_run, num_slots, workers)
    if needed > workspace_size:
        return needed
    next_item = np.zeros(1, np.int64)
    for worker in numba.prange(workers):
        # prange counts in unsigned integers, for which all that is called would be compiled again.
        _work(numba.int64(worker), context, placed, score_scale, value_scale, metadata, plan, next_item, workspace,
              workers)  # fmt: skip
    return DONE
