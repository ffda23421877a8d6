"""What the attention kernels are told: one attention problem as integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compile import kernel

# The block size of rows that are simply consecutive: one page without end, which begins at a request's first row.
ENDLESS = 1 << 40


class Problem(NamedTuple):
    """Addresses, strides in bytes and sizes of one call; the fields are the order of the packed integers.

    A lane is one (token, head) pair; the ``group_heads`` heads that share key rows are lanes of one group: all
    heads of absorbed attention, one of materialised attention. A query is read in two parts (latent and
    rotary), the first ``q_split`` wide. Position p of request r lies in row ``p % block_size`` of page
    ``table[r, p // block_size]``; where rows are simply consecutive, the table names the first one, the one page
    is endless, and the rows are what ``num_pages`` counts. ``values`` is 0 where a value row is its key row's first
    ``value_width`` elements.
    """

    q: int
    q_token_stride: int
    q_head_stride: int
    q_pe: int
    q_pe_token_stride: int
    q_pe_head_stride: int
    q_split: int
    q_element: int
    num_heads: int
    group_heads: int
    keys: int
    key_page_stride: int
    key_row_stride: int
    key_head_stride: int
    values: int
    value_page_stride: int
    value_row_stride: int
    value_head_stride: int
    row_element: int
    block_size: int
    width: int
    value_width: int
    causal: int
    out: int
    out_token_stride: int
    out_head_stride: int
    out_element: int
    out_bytes: int
    lse: int
    lse_token_stride: int
    lse_head_stride: int
    num_tokens: int
    num_pages: int

    def packed(self) -> np.ndarray:
        """The fields as an int64 array: one cheap argument instead of many."""
        return np.array(self, np.int64)


# Arrays of a call, in the order in which kernels are told of their objects; the first ones have an address in the
# problem, the others are metadata. 0 stands for one that is not there: queries in one array, values in their key rows.
ARRAYS = ("q", "q_pe", "keys", "values", "out", "lse", "seq_lens", "query_start_loc", "table")
Q, Q_PE, KEYS, VALUES, OUT, LSE, SEQ_LENS, QUERY_START_LOC, TABLE = range(len(ARRAYS))
ADDRESSES = tuple(Problem._fields.index(name) for name in ARRAYS[:SEQ_LENS])


@kernel
def unpack(n):
    """The problem from its packed integers."""
    return Problem(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14],
                   n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], n[24], n[25], n[26], n[27],
                   n[28], n[29], n[30], n[31], n[32])  # fmt: skip
