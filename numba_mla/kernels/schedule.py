"""The plan of an attention call: pure integers from lengths to work items.

Keys are cut at fixed absolute positions, into key tiles, and splits of several tiles. An item is one lane
group over an aligned run of 2**k splits; the splits' results merge in a binary tree over the absolute split
index, of which an item computes a whole subtree. So k, which depends on the number of workers, changes no
bit of the result. What remains is shared out again and again, so that items get smaller: large ones leave
little to merge, and small ones, which come last, even the load out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import check_count
from .compile import kernel

# The parts of a worker's share that an item may be at most: of what remains, or if that is more, of everything, which
# evens the load out well enough.
PARTS_OF_THE_REST, PARTS_OF_ALL = 3, 24
# Lanes that share a row's way through the caches well enough, where it need not be converted: fewer only where
# workers would have nothing to do.
FEW_LANES = 32
# How finely items are told apart by what they cost.
NUM_RANKS = 1024
# Which items come first: the heaviest, or by their rows, which the next item finds in a cache. Where a worker finds
# more items than SORTED_ITEMS, each is too small a part for its place to matter.
AUTO, HEAVIEST, ROWS = range(3)
ITEM_ORDERS = {"auto": AUTO, "heaviest": HEAVIEST, "rows": ROWS}
SORTED_ITEMS = 24

# Columns of a lane group: its request and heads, its lanes, one past the last key that any of them sees.
REQUEST, FIRST_HEAD, FIRST_LANE, NUM_LANES, END, GROUP_SIZE = range(6)
# Columns of an item: its group, its run of splits, and the slot of its partial result (-1: the whole result).
GROUP, FIRST_SPLIT, NUM_SPLITS, SLOT, ITEM_SIZE = range(5)
# Columns of a slot: the first split of its item; and how many halves of the subtree whose second half begins there
# are done.
FIRST, DONE_HALVES, SLOT_SIZE = range(3)


class Cut(NamedTuple):
    """How work may be cut: lanes of an item at most, what they are halved down to where an item is too large a part of
    the work, and where workers would have nothing to do; keys of a split; the order of items.
    """

    lane_group: int
    few_lanes: int
    least_lanes: int
    kv_split: int
    item_order: int


def num_kv_splits(max_seq_len, num_threads):
    """KV splits as vLLM's schedule has them, for comparison: this package's own are of fixed length.

    The smallest power of two that is at least ``max(1, max_seq_len // 512)``, but at most
    ``2 * num_threads``.

    Parameters
    ----------
    max_seq_len : int
        Tokens of the longest request, at least 0.
    num_threads : int
        At least 1.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Examples
    --------
    >>> from numba_mla import num_kv_splits
    >>> [num_kv_splits(length, 64) for length in (0, 1023, 1024, 1536, 4096)], num_kv_splits(4096, 3)
    ([1, 1, 2, 4, 8], 6)
    """
    wanted = max(1, check_count("max_seq_len", max_seq_len, 0) // 512)
    return min(1 << (wanted - 1).bit_length(), 2 * check_count("num_threads", num_threads, 1))


@kernel
def last_seen(token, seq_len, num_new, causal):
    """The last key that one of a request's new tokens sees; -1 if none."""
    if causal == 0:
        return seq_len - 1
    return max(-1, seq_len - num_new + token)


@kernel
def _largest_share(remaining, total, num_workers):
    """What the next item should cost at most, lanes times keys; a worker alone takes each group whole."""
    if num_workers == 1:
        return remaining
    return max(remaining // (num_workers * PARTS_OF_THE_REST), total // (num_workers * PARTS_OF_ALL))


@kernel
def _total_cost(seq_lens, query_start_loc, num_heads, causal):
    """Lanes times the keys that they see, of all requests."""
    total, token = np.int64(0), np.int64(0)
    for r in range(len(seq_lens)):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        first = last_seen(token, seq_lens[r], num_new, causal)
        last = last_seen(num_new - 1, seq_lens[r], num_new, causal)
        total += num_new * num_heads * (first + last + 2) // 2
    return total


@kernel
def _lanes_of(lanes, keys, cut, most, total, num_workers):
    """Lanes of the next group, of those that are left: halved while an item would cost too much.

    Halving lanes leaves less to merge than cutting keys does. Below ``few_lanes``, only where workers would have
    nothing to do even if keys are cut.
    """
    size = cut.lane_group
    while num_workers > 1 and size > cut.least_lanes:
        is_large = min(size, lanes) * keys > most
        is_needed = min(size, lanes) * min(keys, cut.kv_split) * 2 * num_workers > total
        if not (is_large if size > cut.few_lanes else is_needed):
            break
        size //= 2
    return min(size, lanes)


@kernel
def _walk_groups(requests, groups):
    """List the lane groups of all requests, in order, as far as there is room; how many they are."""
    seq_lens, query_start_loc, num_heads, group_heads, causal, cut, num_workers = requests
    total = _total_cost(seq_lens, query_start_loc, num_heads, causal)
    remaining, group = total, 0
    for r in range(len(seq_lens)):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        lanes = num_new * group_heads
        for head in range(0, num_heads, group_heads):
            first = np.int64(0)
            while first < lanes:
                most = _largest_share(remaining, total, num_workers)
                keys = last_seen(first // group_heads, seq_lens[r], num_new, causal) + 1
                count = _lanes_of(lanes - first, keys, cut, most, total, num_workers)
                end = last_seen((first + count - 1) // group_heads, seq_lens[r], num_new, causal) + 1
                if group < len(groups):
                    groups[group, REQUEST] = r
                    groups[group, FIRST_HEAD] = head
                    groups[group, FIRST_LANE] = first
                    groups[group, NUM_LANES] = count
                    groups[group, END] = end
                remaining -= count * (keys + end) // 2
                first += count
                group += 1
    return group


@kernel
def _run_length(first, end, kv_split, most):
    """Splits of the item that begins with split ``first``: the largest subtree there, of at most ``most`` keys."""
    run, start = 1, first * kv_split
    while first % (2 * run) == 0 and start + run * kv_split < end:
        if min(end, start + 2 * run * kv_split) - start > most:
            break
        run *= 2
    return run


@kernel
def _room(num_items, num_slots):
    """Room for items, what they cost, and their slots."""
    return (np.empty((num_items, ITEM_SIZE), np.int64), np.empty(num_items, np.int64),
            np.empty((num_slots, SLOT_SIZE), np.int64))  # fmt: skip


@kernel
def _walk_items(groups, kv_split, num_workers, room):
    """Cut all groups into items, and list these and their slots as far as there is room.

    Returns how many items and slots there are, and the longest run.
    """
    items, costs, slots = room
    total = np.int64(0)
    for group in range(len(groups)):
        total += groups[group, NUM_LANES] * groups[group, END]
    remaining, item, num_slots, longest_run = total, 0, 0, np.int64(0)
    for group in range(len(groups)):
        lanes, end = groups[group, NUM_LANES], groups[group, END]
        splits, first_item, first = -(-end // kv_split), item, np.int64(0)
        while first < splits or item == first_item:
            most = _largest_share(remaining, total, num_workers)
            run = _run_length(first, end, kv_split, most // lanes)
            cost = lanes * (min(end, (first + run) * kv_split) - first * kv_split)
            slot = num_slots + item - first_item
            if item < len(items):
                items[item, GROUP] = group
                items[item, FIRST_SPLIT] = first
                items[item, NUM_SPLITS] = min(run, splits - first)
                items[item, SLOT] = slot if run < splits else -1
                costs[item] = cost
            if slot < len(slots):
                slots[slot, FIRST] = first
                slots[slot, DONE_HALVES] = 0
            longest_run = max(longest_run, min(run, splits - first))
            remaining -= cost
            first += run
            item += 1
        if item - first_item > 1:
            num_slots += item - first_item
    return item, num_slots, longest_run


@kernel
def _order_by_rows(items, groups):
    """The items by their key rows: head after head, and of a head's groups those that see the most keys first."""
    ordered = np.empty_like(items)
    first = 0
    while first < len(items):
        head = groups[items[first, GROUP]]
        end = first + 1
        while end < len(items):
            other = groups[items[end, GROUP]]
            if other[REQUEST] != head[REQUEST] or other[FIRST_HEAD] != head[FIRST_HEAD]:
                break
            end += 1
        for item in range(first, end):
            for column in range(ITEM_SIZE):
                ordered[item, column] = items[first + end - 1 - item, column]
        first = end
    return ordered


@kernel
def _sort(items, costs):
    """The items from the costliest to the cheapest, to a part in NUM_RANKS; equal ranks stay in order."""
    largest = np.int64(1)
    for cost in costs:
        largest = max(largest, cost)
    place = np.zeros(NUM_RANKS + 1, np.int64)
    for cost in costs:
        place[(largest - cost) * (NUM_RANKS - 1) // largest + 1] += 1
    for rank in range(NUM_RANKS):
        place[rank + 1] += place[rank]
    ordered = np.empty_like(items)
    for item in range(len(items)):
        rank = (largest - costs[item]) * (NUM_RANKS - 1) // largest
        for column in range(ITEM_SIZE):
            ordered[place[rank], column] = items[item, column]
        place[rank] += 1
    return ordered


@kernel(entry=True)
def plan_attention(seq_lens, query_start_loc, num_heads, group_heads, causal, cut, num_workers):
    """Plan a call: its work items, in the order in which they are taken.

    Parameters
    ----------
    seq_lens : int64 (B,)
        Keys of each request, the new ones included.
    query_start_loc : int64 (B + 1,)
        Where each request's query tokens begin.
    num_heads, group_heads : int
        Heads of a token; those that share key rows.
    causal : int
        1 if token i of n sees ``seq_len - n + i + 1`` keys, 0 if all.
    cut : Cut
    num_workers : int
        Threads.

    Returns
    -------
    items : int64 (items, ITEM_SIZE)
    groups : int64 (groups, GROUP_SIZE)
    slots : int64 (slots, SLOT_SIZE)
        Partial results that the items of split groups leave in the workspace.
    longest_run : int
        Splits of the longest item.
    """
    requests = seq_lens, query_start_loc, num_heads, group_heads, causal, cut, num_workers
    groups = np.zeros((_walk_groups(requests, np.zeros((0, GROUP_SIZE), np.int64)), GROUP_SIZE), np.int64)
    _walk_groups(requests, groups)
    none = np.int64(0)
    num_items, num_slots, longest_run = _walk_items(groups, cut.kv_split, num_workers, _room(none, none))
    room = _room(num_items, num_slots)
    _walk_items(groups, cut.kv_split, num_workers, room)
    items, costs, slots = room
    many = len(items) > SORTED_ITEMS * num_workers
    if cut.item_order == ROWS or (cut.item_order == AUTO and many):
        return _order_by_rows(items, groups), groups, slots, longest_run
    return _sort(items, costs), groups, slots, longest_run
