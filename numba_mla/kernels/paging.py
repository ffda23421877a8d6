"""Rows in and out of the paged cache, found by slot or by position."""

from __future__ import annotations

from .compile import kernel
from .context import COPY
from .memory import call
from .rows import convert_row


@kernel
def find_bad_page(table, seq_lens, block_size, num_blocks):
    """Request and column of the first used table entry outside the cache; (-1, -1) if there is none."""
    for request in range(len(seq_lens)):
        for page in range(-(-seq_lens[request] // block_size)):
            if table[request, page] < 0 or table[request, page] >= num_blocks:
                return request, page
    return -1, -1


@kernel
def write_rows(context, source, source_stride, num_bytes, cache, page_stride, row_stride, block_size, slots,
               pad_slot):  # fmt: skip
    """Copy row i of a source to slot i of the cache, except to the padding's slot."""
    for i in range(len(slots)):
        slot = slots[i]
        if slot == pad_slot:
            continue
        page = slot // block_size
        target = cache + page * page_stride + (slot - page * block_size) * row_stride
        call(context[COPY], (target, source + i * source_stride, num_bytes))


@kernel
def gather_rows(context, cache, page_stride, row_stride, block_size, table, starts, ends, target, target_stride, width,
                cache_element, cache_bytes, target_element, wide):  # fmt: skip
    """Copy the rows of positions starts <= p < ends of each request, converted; ``wide`` holds a float32 row."""
    for request in range(len(starts)):
        for position in range(starts[request], ends[request]):
            page = position // block_size
            source = cache + table[request, page] * page_stride + (position - page * block_size) * row_stride
            convert_row(context, target, target_element, source, cache_element, width, cache_bytes, wide)
            target += target_stride


@kernel
def find_bad_slot(slots, num_slots, pad_slot):
    """Index of the first slot that is neither inside the cache nor the padding's; -1 if there is none."""
    for i in range(len(slots)):
        if slots[i] != pad_slot and (slots[i] < 0 or slots[i] >= num_slots):
            return i
    return -1
