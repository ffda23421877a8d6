"""What must hold of a call's addresses and metadata, checked where it costs nothing and told by a number.

The caller, who knows the arguments' names, says in words what is wrong.
"""

from __future__ import annotations

from ..checks import MAX_POSITIONS
from .compile import kernel
from .problem import ENDLESS, unpack

# Nothing is wrong; an output's span of memory meets that of another array; metadata do not fit the arrays.
DONE, MAY_MEET, BAD_METADATA = 0, -1, -2
# Which metadata are checked: where queries begin, always; lengths and pages too; that new tokens are counted, too.
STARTS, PAGES, NEW_TOKENS = range(3)


@kernel
def may_meet(packed, apart):
    """Whether an output's span of memory meets that of another array.

    ``apart`` has a row for each array: the place of its address among the packed integers, the bytes that it
    spans before and from its first element on, and 1 for an output.
    """
    for i in range(len(apart)):
        for j in range(len(apart)):
            if i == j or apart[i, 3] == 0:
                continue
            here, there = packed[apart[i, 0]], packed[apart[j, 0]]
            start, end = here - apart[i, 1], here + apart[i, 2]
            other_start, other_end = there - apart[j, 1], there + apart[j, 2]
            if start < end and other_start < other_end and start < other_end and other_start < end:
                return True
    return False


@kernel
def _starts_hold(starts, num_tokens):
    """Whether start locations run from 0 to all tokens without falling."""
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != num_tokens:
        return False
    falls = 0
    for r in range(len(starts) - 1):
        falls += starts[r + 1] < starts[r]
    return falls == 0


@kernel
def _rows_hold(seq_lens, table, num_rows):
    """Whether the requests' rows follow one another from 0 to all of them."""
    end = 0
    for r in range(len(seq_lens)):
        if seq_lens[r] < 0 or table[r, 0] != end:
            return False
        end += seq_lens[r]
    return end == num_rows


@kernel
def _pages_hold(seq_lens, table, block_size, num_pages):
    """Whether the table has room for the lengths, and its used entries are pages of the cache."""
    longest = min(table.shape[1] * block_size, MAX_POSITIONS)
    for r in range(len(seq_lens)):
        if seq_lens[r] < 0 or seq_lens[r] > longest:
            return False
        for page in range(-(-seq_lens[r] // block_size)):
            if table[r, page] < 0 or table[r, page] >= num_pages:
                return False
    return True


@kernel
def _new_tokens_hold(seq_lens, starts):
    """Whether lengths count the new tokens."""
    for r in range(len(seq_lens)):
        new = starts[r + 1] - starts[r]
        if new > 0 and seq_lens[r] < new:
            return False
    return True


@kernel
def refuse(packed, apart, seq_lens, query_start_loc, table, checks):
    """Why a call must not run, or DONE; the shapes of the metadata agree."""
    p = unpack(packed)
    if may_meet(packed, apart):
        return MAY_MEET
    if not _starts_hold(query_start_loc, p.num_tokens):
        return BAD_METADATA
    if p.block_size == ENDLESS:
        return DONE if _rows_hold(seq_lens, table, p.num_pages) else BAD_METADATA
    if checks >= PAGES and not _pages_hold(seq_lens, table, p.block_size, p.num_pages):
        return BAD_METADATA
    if checks >= NEW_TOKENS and not _new_tokens_hold(seq_lens, query_start_loc):
        return BAD_METADATA
    return DONE
