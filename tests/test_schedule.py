"""The plan of an attention call: every key of every lane once, and work that evens out over any number of cores."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_mla.kernels import schedule
from numba_mla.testing.inputs import start_locations

KV_SPLIT = 1024


def cut(lane_group=64, least_lanes=16, item_order=schedule.AUTO):
    return schedule.Cut(lane_group, max(schedule.FEW_LANES, least_lanes), least_lanes, KV_SPLIT, item_order)


def plan(seq_lens, new_tokens, num_heads, workers, group_heads=None, causal=1, **how):
    return schedule.plan_attention(
        np.array(seq_lens, np.int64), start_locations(new_tokens).astype(np.int64), num_heads,
        group_heads or num_heads, causal, cut(**how), workers,
    )  # fmt: skip


def costs(items, groups):
    """Lanes times keys of each item."""
    group = groups[items[:, schedule.GROUP]]
    first = items[:, schedule.FIRST_SPLIT] * KV_SPLIT
    end = np.minimum(group[:, schedule.END], first + items[:, schedule.NUM_SPLITS] * KV_SPLIT)
    return group[:, schedule.NUM_LANES] * (end - first)


def simulate(work, cores):
    """Time of each core when every item goes, in order, to the core that is free first."""
    free = [0] * cores
    for cost in work.tolist():
        heapq.heappush(free, heapq.heappop(free) + cost)
    return np.array(free)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_key_of_every_lane_is_in_one_item(data):
    new_tokens = data.draw(st.lists(st.integers(0, 70), max_size=5))
    seq_lens = [n + data.draw(st.sampled_from([0, 5, 1023, 1024, 5000])) for n in new_tokens]
    heads, workers = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 2, 64]))
    group_heads = data.draw(st.sampled_from([1, heads]))
    items, groups, slots, longest = plan(seq_lens, new_tokens, heads, workers, group_heads)
    seen = [np.zeros((n * group_heads, heads // group_heads, -(-s // KV_SPLIT) + 1), int)
            for n, s in zip(new_tokens, seq_lens, strict=True)]  # fmt: skip
    for item in items:
        group = groups[item[schedule.GROUP]]
        lanes = slice(group[schedule.FIRST_LANE], group[schedule.FIRST_LANE] + group[schedule.NUM_LANES])
        splits = slice(item[schedule.FIRST_SPLIT], item[schedule.FIRST_SPLIT] + item[schedule.NUM_SPLITS])
        seen[group[schedule.REQUEST]][lanes, group[schedule.FIRST_HEAD] // group_heads, splits] += 1
        assert item[schedule.NUM_SPLITS] <= longest
    for request, (n, s) in enumerate(zip(new_tokens, seq_lens, strict=True)):
        for token in range(n):
            needed = -(-(s - n + token + 1) // KV_SPLIT)
            rows = seen[request][token * group_heads : (token + 1) * group_heads, :, :needed]
            assert (rows == 1).all()
        assert seen[request].max(initial=0) <= 1
    taken = items[items[:, schedule.SLOT] >= 0]
    assert sorted(taken[:, schedule.SLOT]) == list(range(len(slots)))
    assert (slots[taken[:, schedule.SLOT], schedule.FIRST] == taken[:, schedule.FIRST_SPLIT]).all()
    assert (slots[:, schedule.DONE_HALVES] == 0).all()
    # Each is a subtree of the tree over all splits, and what it is cut to is only what its group has no keys for.
    runs = 1 << np.ceil(np.log2(taken[:, schedule.NUM_SPLITS])).astype(int)
    splits = -(-groups[taken[:, schedule.GROUP], schedule.END] // KV_SPLIT)
    assert (taken[:, schedule.FIRST_SPLIT] % runs == 0).all()
    assert (taken[:, schedule.NUM_SPLITS] == np.minimum(runs, splits - taken[:, schedule.FIRST_SPLIT])).all()


@pytest.mark.parametrize("cores", [2, 8, 64, 128])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, 3, 32, 256])
def test_ragged_decodes_even_out(batch, heads, cores):
    """The longest core takes at most the mean and one item; within 1.10 of the mean from 12 items a core on."""
    rng = np.random.default_rng(batch + heads + cores)
    for _ in range(5):
        seq_lens = np.exp(rng.uniform(0, np.log(131072), batch)).astype(int) + 1
        items, groups, slots, _ = plan(seq_lens, [1] * batch, heads, cores)
        work = costs(items, groups)
        times = simulate(work, cores)
        assert times.max() <= times.mean() + work.max()
        if len(items) >= 12 * cores:
            assert times.max() <= 1.10 * times.mean()
        # Partial results, and so the workspace, are bounded by the cores and not by the lengths.
        assert len(slots) <= 2 * schedule.PARTS_OF_ALL * cores


def test_one_long_request_keeps_64_cores_busy():
    """B = 1, H = 128, S = 8192: at least 80 % of 64 cores."""
    items, groups, _, _ = plan([8192], [1], 128, 64)
    times = simulate(costs(items, groups), 64)
    assert times.mean() >= 0.8 * times.max()


def test_longer_requests_do_not_take_more_slots():
    slots = [len(plan([seq_len], [1], 128, 2)[2]) for seq_len in (8192, 32768, 131072, 1 << 20, 1 << 24)]
    assert max(slots) <= 2 * schedule.PARTS_OF_ALL
    assert len(set(slots[-3:])) == 1


@pytest.mark.parametrize("lane_group", [16, 512, 4096])
def test_one_worker_takes_each_group_whole(lane_group):
    """Whatever the numbers: a run that is doubled until it is long enough must not overflow on the way."""
    items, groups, slots, longest = schedule.plan_attention(
        np.array([4096]), np.array([0, 1024]), 16, 1, 1, cut(lane_group), 1
    )
    assert len(items) == len(groups) == 16 * -(-1024 // lane_group)
    assert len(slots) == 0
    assert longest == 4


def test_lanes_are_kept_where_the_tiling_says_so():
    """However many workers wait."""
    _, groups, _, _ = plan([64], [1], 128, 64, lane_group=64, least_lanes=64)
    assert groups[:, schedule.NUM_LANES].tolist() == [64, 64]
    _, groups, _, _ = plan([64], [1], 128, 64, lane_group=64)
    assert groups[:, schedule.NUM_LANES].tolist() == [16] * 8


def test_item_order():
    lengths = [300, 4000, 20, 1000]
    items, groups, _, _ = plan(lengths, [1] * 4, 16, 1, item_order=schedule.HEAVIEST)
    assert groups[items[:, schedule.GROUP], schedule.REQUEST].tolist() == [1, 3, 0, 2]
    items, groups, _, _ = plan(lengths, [1] * 4, 16, 1, item_order=schedule.ROWS)
    assert groups[items[:, schedule.GROUP], schedule.REQUEST].tolist() == [0, 1, 2, 3]


def test_of_a_head_the_items_that_see_the_most_come_first():
    """Heads in their order, so that neighbours in memory follow one another."""
    items, groups, _, _ = plan([100], [100], 3, 1, group_heads=1, lane_group=32, item_order=schedule.ROWS)
    taken = groups[items[:, schedule.GROUP]]
    assert taken[:, schedule.FIRST_HEAD].tolist() == sorted([0, 1, 2] * 4)
    assert taken[:, schedule.END].tolist() == [100, 96, 64, 32] * 3
