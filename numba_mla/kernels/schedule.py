"""The plan of an attention call: pure integers from lengths to work items.

Keys are cut at fixed absolute positions, into key tiles, and splits of several tiles. An item is one lane
group over an aligned run of 2**k splits; the splits' results merge in a binary tree over the absolute split
index, of which an item computes a whole subtree. So k, which depends on the number of workers, changes no
bit of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import check_count
from .compile import kernel

# Items a worker should find at least, so that taking them one by one evens the load out.
ITEMS_PER_WORKER = 12
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

# Columns of a lane group: its request and heads, its lanes, one past the last key that any of them sees; the
# first partial slot of a group of several items, how many these are, and how many of them are not done yet.
REQUEST, FIRST_HEAD, FIRST_LANE, NUM_LANES, END, FIRST_SLOT, NUM_ITEMS, REMAINING, GROUP_SIZE = range(9)
# Columns of an item: its group, its run of splits, and the slot of its partial result (-1: the whole result).
GROUP, FIRST_SPLIT, NUM_SPLITS, SLOT, ITEM_SIZE = range(5)


class Cut(NamedTuple):
    """How work may be cut: lanes of an item at most, what they are halved down to where there are not enough items for
    the load to be even, and where there are more workers than items; keys of a split; the order of items.
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
def _list_groups(seq_lens, query_start_loc, num_heads, group_heads, lane_group, causal):
    """The lane groups of all requests, in order, not yet cut into items."""
    per_request = num_heads // group_heads
    num_groups = 0
    for r in range(len(seq_lens)):
        lanes = (query_start_loc[r + 1] - query_start_loc[r]) * group_heads
        num_groups += per_request * -(-lanes // lane_group)
    groups = np.zeros((num_groups, GROUP_SIZE), np.int64)
    group = 0
    for r in range(len(seq_lens)):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        lanes = num_new * group_heads
        for head in range(0, num_heads, group_heads):
            for first in range(0, lanes, lane_group):
                count = min(lane_group, lanes - first)
                groups[group, REQUEST] = r
                groups[group, FIRST_HEAD] = head
                groups[group, FIRST_LANE] = first
                groups[group, NUM_LANES] = count
                last_token = (first + count - 1) // group_heads
                groups[group, END] = last_seen(last_token, seq_lens[r], num_new, causal) + 1
                group += 1
    return groups


@kernel
def _cut_groups(groups, kv_split, num_workers):
    """Cut the groups into items, and say what each item costs: lanes times keys."""
    total, most_lanes = np.int64(0), np.int64(1)
    for group in range(len(groups)):
        total += groups[group, NUM_LANES] * groups[group, END]
        most_lanes = max(most_lanes, groups[group, NUM_LANES])
    # A worker alone takes each group whole.
    run = 1 << 40 if num_workers == 1 else 1
    while num_workers > 1 and 2 * run * kv_split * most_lanes * num_workers * ITEMS_PER_WORKER <= total:
        run *= 2
    num_items, num_slots = 0, 0
    for group in range(len(groups)):
        splits = -(-groups[group, END] // kv_split)
        pieces = max(1, -(-splits // run))
        groups[group, FIRST_SLOT] = num_slots
        groups[group, NUM_ITEMS] = pieces
        groups[group, REMAINING] = pieces
        num_items += pieces
        if pieces > 1:
            num_slots += pieces

    items = np.empty((num_items, ITEM_SIZE), np.int64)
    costs = np.empty(num_items, np.int64)
    item, longest_run = 0, 0
    for group in range(len(groups)):
        end = groups[group, END]
        splits = -(-end // kv_split)
        pieces = groups[group, NUM_ITEMS]
        for piece in range(pieces):
            first_split = piece * run
            items[item, GROUP] = group
            items[item, FIRST_SPLIT] = first_split
            items[item, NUM_SPLITS] = min(run, splits - first_split)
            items[item, SLOT] = groups[group, FIRST_SLOT] + piece if pieces > 1 else -1
            keys = min(end, (first_split + run) * kv_split) - first_split * kv_split
            costs[item] = groups[group, NUM_LANES] * keys
            longest_run = max(longest_run, items[item, NUM_SPLITS])
            item += 1
    return items, costs, num_slots, longest_run


@kernel
def _count_items(groups, kv_split):
    """Items of a plan whose runs are single splits."""
    count = 0
    for group in range(len(groups)):
        count += max(1, -(-groups[group, END] // kv_split))
    return count


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
    num_slots : int
        Partial results that the items of split groups leave in the workspace.
    longest_run : int
        Splits of the longest item.
    """
    lane_group = cut.lane_group
    groups = _list_groups(seq_lens, query_start_loc, num_heads, group_heads, lane_group, causal)
    # Too few items to go round evenly: smaller lane groups make more of them.
    while num_workers > 1 and lane_group > cut.least_lanes:
        wanted = ITEMS_PER_WORKER if lane_group > cut.few_lanes else 2
        if _count_items(groups, cut.kv_split) >= wanted * num_workers:
            break
        lane_group //= 2
        groups = _list_groups(seq_lens, query_start_loc, num_heads, group_heads, lane_group, causal)
    items, costs, num_slots, longest_run = _cut_groups(groups, cut.kv_split, num_workers)
    many = len(items) > SORTED_ITEMS * num_workers
    if cut.item_order == ROWS or (cut.item_order == AUTO and many):
        return _order_by_rows(items, groups), groups, num_slots, longest_run
    return _sort(items, costs), groups, num_slots, longest_run
