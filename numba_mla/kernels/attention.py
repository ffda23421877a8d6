"""Work items of attention: pack the queries, walk the splits, merge in the fixed tree, write the result."""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from .attend import attend
from .combine import clear, merge
from .compile import kernel
from .context import (
    CONFIGURE_TILES,
    ITEM_ORDER,
    KEY_PADDING,
    KEY_TILE,
    KV_SPLIT,
    LANE_GROUP,
    LEAST_LANES,
    LIST_ROWS,
    RELEASE_TILES,
)
from .lanes import list_outputs, list_queries, pack_lanes, write_lanes
from .memory import call, fetch_add, load_i64, store_i64
from .problem import unpack
from .schedule import (
    DONE_HALVES,
    END,
    FIRST,
    FIRST_HEAD,
    FIRST_SPLIT,
    GROUP,
    NUM_LANES,
    NUM_SPLITS,
    REQUEST,
    SLOT,
    SLOT_SIZE,
    Cut,
    plan_attention,
)
from .scratch import (
    dot_steps,
    few_lanes,
    key_source,
    lay_out,
    padded_columns,
    state_at,
    value_source,
    workspace_bytes,
)
from .source import announce, fetch
from .validity import DONE, admit

LOG2_E = 1 / math.log(2)
# In the place of a list of rows to prefetch.
NO_ROWS = np.int64(0)


class Outlook(NamedTuple):
    """What a worker's next item may be: the plan, where queries begin, and where the next item's place is counted."""

    items: np.ndarray
    groups: np.ndarray
    query_start_loc: np.ndarray
    counter: int


@kernel
def _fill_list(context, num_listed, rows, scratch):
    """Fill a list of rows to prefetch up with rows of zeros: as many as a key tile has."""
    missing = context[KEY_TILE] + context[KEY_PADDING] - num_listed
    call(context[LIST_ROWS], (rows + 8 * num_listed, scratch.zeros, 0, missing))


@kernel
def _take_next(context, p, outlook, scratch):
    """Take the next item, and list its queries, which come from far away.

    Prefetched while one of the last key tiles of the item before is in hand, they are there when it is done.
    """
    index = fetch_add(outlook.counter, 1)
    store_i64(scratch.following, index)
    if index >= len(outlook.items):
        return NO_ROWS
    group = outlook.groups[outlook.items[index, GROUP]]
    num_listed = min(context[KEY_TILE], group[NUM_LANES])
    list_queries(context, p, group, outlook.query_start_loc[group[REQUEST]], num_listed, scratch.upcoming)
    _fill_list(context, num_listed, scratch.upcoming, scratch)
    return scratch.upcoming


@kernel
def _list_results(context, p, outlook, group, item, scratch):
    """List where an item's results go, which a store would wait for."""
    if item[SLOT] >= 0:
        return NO_ROWS
    num_listed = min(context[KEY_TILE], group[NUM_LANES])
    list_outputs(context, p, group, outlook.query_start_loc[group[REQUEST]], num_listed, scratch.results)
    _fill_list(context, num_listed, scratch.results, scratch)
    return scratch.results


@kernel
def _announce_next(context, p, outlook, table, num_keys, scratch):
    """Let the next item's first rows follow those of the last key tile, of ``num_keys``, of the item before."""
    index = load_i64(scratch.following)
    if index >= len(outlook.items):
        return
    item = outlook.items[index]
    group = outlook.groups[item[GROUP]]
    request, head, end = group[REQUEST], group[FIRST_HEAD], group[END]
    first = item[FIRST_SPLIT] * context[KV_SPLIT]
    announce(context, key_source(context, p, head, scratch), table, request, first, num_keys, end)
    if p.values != 0:
        announce(context, value_source(context, p, head, scratch), table, request, first, num_keys, end)


@kernel
def _attend_split(context, p, sources, table, group, lanes, item, split, outlook, state, scratch, exponent_scale):
    """One split from an empty state on, key tile by key tile; the last one of an item looks ahead."""
    keys, values = sources
    end = group[END]
    clear(state, lanes.padded)
    first_key, key_tile = split * context[KV_SPLIT], context[KEY_TILE]
    last = min(end, first_key + context[KV_SPLIT])
    final = last - 1 - (last - 1 - first_key) % key_tile
    is_last = split + 1 == item[FIRST_SPLIT] + item[NUM_SPLITS]
    # A tile of fewer keys than lanes would not prefetch the rows of all of them.
    looks_ahead = final if last - final >= lanes.num else max(first_key, final - key_tile)
    for first in range(first_key, last, key_tile):
        num_keys = min(key_tile, last - first)
        key_rows, keys_ahead = fetch(context, keys, table, group[REQUEST], first, num_keys, end)
        value_rows, values_ahead, queries_ahead, results_ahead = key_rows, NO_ROWS, NO_ROWS, NO_ROWS
        if p.values != 0:
            value_rows, values_ahead = fetch(context, values, table, group[REQUEST], first, num_keys, end)
        if is_last and first == looks_ahead:
            queries_ahead = _take_next(context, p, outlook, scratch)
            results_ahead = _list_results(context, p, outlook, group, item, scratch)
        if is_last and first == final:
            _announce_next(context, p, outlook, table, num_keys, scratch)
        attend(context, key_rows, (keys_ahead, queries_ahead, values_ahead, results_ahead), value_rows, first,
               num_keys, lanes, state, scratch.scores, scratch.alpha, dot_steps(context, p), p.value_width,
               exponent_scale, int(first > first_key), scratch.spare)  # fmt: skip


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
        _attend_split(context, p, sources, table, group, lanes, item, item[FIRST_SPLIT] + i, outlook, top, scratch,
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
def _merge_upward(context, p, group, item, partials, slots, lanes, scratch, exponent_scale):
    """The upper part of the fixed tree, from an item on, as far as both halves are done: the root's slot, or -1.

    A subtree's result is in the slot of its first item. Whoever comes second to a node merges its halves, so that
    little is left to do when the last item is done.
    """
    first, slot, run = item[FIRST_SPLIT], item[SLOT], 1
    num_splits = -(-group[END] // context[KV_SPLIT])
    while run < item[NUM_SPLITS]:
        run *= 2
    while run < num_splits:
        start = first - first % (2 * run)
        middle = start + run
        # A subtree at the end may be without a second half.
        if middle < num_splits:
            left = right = slot
            while partials[left, FIRST] > start:
                left -= 1
            while partials[right, FIRST] < middle:
                right += 1
            done = partials.ctypes.data + 8 * (right * SLOT_SIZE + DONE_HALVES)
            if fetch_add(done, 1) == 0:
                return -1
            a = state_at(scratch, slots + left * scratch.state_bytes)
            b = state_at(scratch, slots + right * scratch.state_bytes)
            merge(context, a, b, lanes.num, lanes.padded, padded_columns(context, p), scratch.weights, exponent_scale)
            slot = left
        first, run = start, 2 * run
    return slot


@kernel
def _run_item(context, p, item, outlook, seq_lens, table, partials, slots, scratch, score_scale, value_scale):
    """One work item; whoever finishes the last item of a split group writes the group."""
    exponent_scale = numba.float32(score_scale * LOG2_E)
    group = outlook.groups[item[GROUP]]
    request = group[REQUEST]
    first_token = outlook.query_start_loc[request]
    num_new = outlook.query_start_loc[request + 1] - first_token
    lanes = pack_lanes(context, p, group, first_token, seq_lens[request], num_new, scratch)
    head = group[FIRST_HEAD]
    sources = key_source(context, p, head, scratch), value_source(context, p, head, scratch)
    result = scratch.states if item[SLOT] < 0 else slots + item[SLOT] * scratch.state_bytes
    _attend_run(context, p, sources, table, group, lanes, item, outlook, result, scratch, exponent_scale)
    if item[SLOT] >= 0:
        root = _merge_upward(context, p, group, item, partials, slots, lanes, scratch, exponent_scale)
        if root < 0:
            return
        result = slots + root * scratch.state_bytes
    write_lanes(context, p, group, first_token, state_at(scratch, result), score_scale, value_scale, scratch)


@kernel
def _work(worker, context, placed, score_scale, value_scale, metadata, plan, next_item, workspace, num_workers):
    """One worker: take items until there are none."""
    p = unpack(placed)
    seq_lens, query_start_loc, table = metadata
    items, groups, partials, longest_run = plan
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
        _run_item(
            context, p, items[index], outlook, seq_lens, table, partials, slots, scratch, score_scale, value_scale
        )
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
    _, _, partials, longest_run = plan
    needed = workspace_bytes(context, unpack(placed), longest_run, len(partials), one)
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
    items, _, partials, longest_run = plan
    workers = min(num_workers, len(items))
    needed = workspace_bytes(context, unpack(placed), longest_run, len(partials), workers)
    if needed > workspace_size:
        return needed
    next_item = np.zeros(1, np.int64)
    for worker in numba.prange(workers):
        # prange counts in unsigned integers, for which all that is called would be compiled again.
        _work(numba.int64(worker), context, placed, score_scale, value_scale, metadata, plan, next_item, workspace,
              workers)  # fmt: skip
    return DONE
