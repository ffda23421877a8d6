"""What the attention kernels are told: one attention problem as integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compile import kernel


class Problem(NamedTuple):
    """Addresses, strides in bytes and sizes of one call; the fields are the order of the packed integers.

    A query is read in two parts (latent and rotary), the first ``q_split`` wide; a single array is two parts
    of itself. A lane is one (token, head) pair. Key rows of request r are found through its row of the block
    table; value rows are the first ``value_width`` elements of the key rows.
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
    keys: int
    page_stride: int
    row_stride: int
    key_element: int
    block_size: int
    width: int
    value_width: int
    causal: int
    out: int
    out_token_stride: int
    out_head_stride: int
    out_element: int
    lse: int
    lse_token_stride: int
    lse_head_stride: int

    def packed(self) -> np.ndarray:
        """The fields as an int64 array: one cheap argument instead of many."""
        return np.array(self, np.int64)


@kernel
def unpack(n):
    """The problem from its packed integers."""
    return Problem(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14],
                   n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23])  # fmt: skip
