"""What must hold of a call's addresses and metadata, checked where it costs nothing and told by a number.

The caller, who knows the arguments' names, says in words what is wrong.
"""

from __future__ import annotations

import numpy as np

from ..checks import MAX_POSITIONS
from .arrays import first_element, has_form, read_integers, read_table
from .compile import kernel
from .problem import ADDRESSES, ENDLESS, Q_PE, QUERY_START_LOC, SEQ_LENS, TABLE, Q, unpack

# Nothing is wrong; an output's span of memory meets that of another array; metadata do not fit the arrays; an array is
# not of the form that was checked.
DONE, MAY_MEET, BAD_METADATA, OTHER_FORM = 0, -1, -2, -3
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
def _place(packed, arrays):
    """The problem with the arrays' addresses; one array may hold both parts of the queries."""
    placed = packed.copy()
    for i in range(len(ADDRESSES)):
        array = arrays[Q] if i == Q_PE and arrays[Q_PE] == 0 else arrays[i]
        if array != 0:
            placed[ADDRESSES[i]] += first_element(array)
    return placed


@kernel
def _read_row_metadata(forms, arrays):
    """Metadata of rows that follow one another: lengths, where queries begin, and where rows do, as a table."""
    query_start_loc = read_integers(arrays[QUERY_START_LOC], forms[QUERY_START_LOC])
    starts = query_start_loc
    if arrays[TABLE] != 0:
        starts = read_integers(arrays[TABLE], forms[TABLE])
    num_requests = len(starts) - 1
    seq_lens, table = np.empty(num_requests, np.int64), np.empty((num_requests, 1), np.int64)
    for r in range(num_requests):
        seq_lens[r] = starts[r + 1] - starts[r]
        table[r, 0] = starts[r]
    return seq_lens, query_start_loc, table


@kernel
def _read_page_metadata(p, forms, arrays):
    """Metadata of pages: lengths, where queries begin (one each, if it is not said), and the block table's used part.

    Without a table, page r is request r.
    """
    seq_lens = read_integers(arrays[SEQ_LENS], forms[SEQ_LENS])
    if arrays[QUERY_START_LOC] != 0:
        query_start_loc = read_integers(arrays[QUERY_START_LOC], forms[QUERY_START_LOC])
    else:
        query_start_loc = np.empty(len(seq_lens) + 1, np.int64)
        for r in range(len(query_start_loc)):
            query_start_loc[r] = r
    if arrays[TABLE] != 0:
        table = read_table(arrays[TABLE], forms[TABLE], seq_lens, p.block_size)
    else:
        table = np.empty((len(seq_lens), 1), np.int64)
        for r in range(len(table)):
            table[r, 0] = r
    return seq_lens, query_start_loc, table


@kernel
def admit(packed, forms, apart, checks, arrays):
    """Why a call must not run, or DONE; the problem with its addresses, and the metadata as int64.

    Shapes of the metadata agree with one another in every form that was checked.
    """
    nothing = np.empty(0, np.int64)
    for i in range(len(arrays)):
        if not has_form(arrays[i], forms[i]):
            return OTHER_FORM, packed, nothing, nothing, np.empty((0, 1), np.int64)
    placed = _place(packed, arrays)
    p = unpack(placed)
    if p.block_size == ENDLESS:
        seq_lens, query_start_loc, table = _read_row_metadata(forms, arrays)
    else:
        seq_lens, query_start_loc, table = _read_page_metadata(p, forms, arrays)
    return _refuse(placed, p, apart, checks, seq_lens, query_start_loc, table), placed, seq_lens, query_start_loc, table


@kernel
def _refuse(placed, p, apart, checks, seq_lens, query_start_loc, table):
    """Why a call must not run, or DONE."""
    if may_meet(placed, apart):
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
