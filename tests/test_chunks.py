"""plan_context_chunks: every cached token once and in order, within the workspace, cut where it may be cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_mla import plan_context_chunks


def tokens_of(chunk):
    """The (request, position) of every row of a chunk's workspace."""
    return [
        (request, position)
        for request, start, end in zip(chunk.requests, chunk.starts, chunk.ends, strict=True)
        for position in range(start, end)
    ]


@given(data=st.data(), lens=st.lists(st.integers(0, 40), max_size=8), block_size=st.integers(1, 9))
def test_every_token_once_in_order_within_bounds(data, lens, block_size):
    room = data.draw(st.integers(block_size, 40))
    chunks = plan_context_chunks(lens, room, block_size)
    tokens = [token for chunk in chunks for token in tokens_of(chunk)]
    assert tokens == [(request, p) for request, length in enumerate(lens) for p in range(length)]
    for chunk in chunks:
        counts = [end - start for start, end in zip(chunk.starts, chunk.ends, strict=True)]
        assert chunk.kv_start_loc == (0, *itertools.accumulate(counts))
        assert 0 < chunk.num_tokens <= room
        assert counts[0] > 0
        assert counts[-1] > 0
        assert all(start == 0 for start in chunk.starts[1:]), "a request but the first is a continuation"
        whole = [lens[request] for request in chunk.requests]
        assert list(chunk.ends[:-1]) == whole[:-1], "a request but the last goes on"
        assert chunk.ends[-1] == whole[-1] or chunk.ends[-1] % block_size == 0
    for chunk, following in itertools.pairwise(chunks):
        # Not even one more block of what comes next would have fitted.
        start, end = following.starts[0], following.ends[0]
        assert chunk.num_tokens + min(block_size, end - start) > room


@given(lens=st.lists(st.integers(0, 30), min_size=1, max_size=8), room=st.integers(1, 12))
def test_cuts_at_multiples_of_the_workspace_do_not_depend_on_the_batch(lens, room):
    def cuts(lens, request):
        return [tokens for chunk in plan_context_chunks(lens, room, room)
                if (tokens := [p for r, p in tokens_of(chunk) if r == request])]  # fmt: skip

    for request, length in enumerate(lens):
        assert cuts(lens, request) == cuts([length], 0)


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([4], [(range(1), (0,), (4,))]),
        ([0, 3, 0], [(range(1, 2), (0,), (3,))]),
        ([1, 0, 3], [(range(3), (0, 0, 0), (1, 0, 3))]),
        ([9, 0, 4], [(range(1), (0,), (4,)), (range(1), (4,), (8,)),
                     (range(3), (8, 0, 0), (9, 0, 2)), (range(2, 3), (2,), (4,))]),
        ([3, 4], [(range(1), (0,), (3,)), (range(1, 2), (0,), (4,))]),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_of_four_in_blocks_of_two(lens, expected):
    assert [chunk[:3] for chunk in plan_context_chunks(lens, 4, 2)] == expected
