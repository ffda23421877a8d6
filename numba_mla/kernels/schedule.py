"""The plan of an attention call: pure integers from lengths to work items.

Keys are cut at fixed absolute positions: key tiles of KEY_TILE, splits of KV_SPLIT. An item is one lane
group over an aligned run of 2**k splits; the splits' results merge in a binary tree over the absolute split
index, of which an item computes a whole subtree. So k, which depends on the number of workers, changes no
bit of the result.
"""

from __future__ import annotations

import numpy as np

from .compile import kernel

KEY_TILE = 256
KV_SPLIT = 1024
# Items a worker should find at least, so that taking them one by one evens the load out.
ITEMS_PER_WORKER = 12

# Columns of an item.
REQUEST, FIRST_LANE, NUM_LANES, FIRST_SPLIT, NUM_SPLITS, GROUP, SLOT, ITEM_SIZE = range(8)
# Columns of a lane group: its first partial slot, its items, and how many of them are not done yet.
FIRST_SLOT, NUM_ITEMS, REMAINING, GROUP_SIZE = range(4)


@kernel
def visible_end(first_lane, num_lanes, num_heads, seq_len, num_new, causal):
    """One past the last key that any of the lanes sees."""
    if causal == 0:
        return seq_len
    return seq_len - num_new + (first_lane + num_lanes - 1) // num_heads + 1


def plan_attention(seq_lens, query_start_loc, num_heads, lane_group, causal, num_workers):
    """Plan a call: its work items, the heaviest first.

    Parameters
    ----------
    seq_lens : int64 (B,)
        Keys of each request, the new ones included.
    query_start_loc : int64 (B + 1,)
        Where each request's query tokens begin.
    num_heads, lane_group, causal, num_workers : int
        Heads of a token; lanes of an item at most; 1 if token i of n sees seq_len - n + i + 1 keys; threads.

    Returns
    -------
    items : int64 (items, ITEM_SIZE)
    groups : int64 (groups, GROUP_SIZE)
    num_slots : int
        Partial results that the items of split groups leave in the workspace.
    longest_run : int
        Splits of the longest item.
    """
    items, costs, groups, num_slots, longest_run = _plan_items(
        seq_lens, query_start_loc, num_heads, lane_group, causal, num_workers
    )
    return items[np.argsort(-costs, kind="stable")], groups, num_slots, longest_run


@kernel
def _plan_items(seq_lens, query_start_loc, num_heads, lane_group, causal, num_workers):
    """The plan in the order of requests, with each item's cost: lanes times keys."""
    num_requests = len(seq_lens)
    total, num_groups = 0, 0
    for r in range(num_requests):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        lanes = num_new * num_heads
        for first in range(0, lanes, lane_group):
            count = min(lane_group, lanes - first)
            total += count * visible_end(first, count, num_heads, seq_lens[r], num_new, causal)
            num_groups += 1
    run = 1
    if num_workers == 1:
        run = 1 << 40
    while 2 * run * KV_SPLIT * lane_group * num_workers * ITEMS_PER_WORKER <= total:
        run *= 2

    groups = np.empty((num_groups, GROUP_SIZE), np.int64)
    num_items, num_slots, group = 0, 0, 0
    for r in range(num_requests):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        lanes = num_new * num_heads
        for first in range(0, lanes, lane_group):
            count = min(lane_group, lanes - first)
            splits = -(-visible_end(first, count, num_heads, seq_lens[r], num_new, causal) // KV_SPLIT)
            pieces = max(1, -(-splits // run))
            groups[group, FIRST_SLOT] = num_slots
            groups[group, NUM_ITEMS] = pieces
            groups[group, REMAINING] = pieces
            num_items += pieces
            if pieces > 1:
                num_slots += pieces
            group += 1

    items = np.empty((num_items, ITEM_SIZE), np.int64)
    costs = np.empty(num_items, np.int64)
    item, group, longest_run = 0, 0, 0
    for r in range(num_requests):
        num_new = query_start_loc[r + 1] - query_start_loc[r]
        lanes = num_new * num_heads
        for first in range(0, lanes, lane_group):
            count = min(lane_group, lanes - first)
            end = visible_end(first, count, num_heads, seq_lens[r], num_new, causal)
            splits = -(-end // KV_SPLIT)
            pieces = groups[group, NUM_ITEMS]
            for piece in range(pieces):
                first_split = piece * run
                items[item, REQUEST] = r
                items[item, FIRST_LANE] = first
                items[item, NUM_LANES] = count
                items[item, FIRST_SPLIT] = first_split
                items[item, NUM_SPLITS] = min(run, splits - first_split)
                items[item, GROUP] = group
                items[item, SLOT] = groups[group, FIRST_SLOT] + piece if pieces > 1 else -1
                costs[item] = count * (min(end, (first_split + run) * KV_SPLIT) - first_split * KV_SPLIT)
                longest_run = max(longest_run, items[item, NUM_SPLITS])
                item += 1
            group += 1
    return items, costs, groups, num_slots, longest_run
