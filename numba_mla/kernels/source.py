"""Row sources: where attention's key and value rows come from, one key tile at a time."""

from __future__ import annotations

from typing import NamedTuple

from .compile import kernel
from .context import KEY_PADDING, TO_NATIVE
from .memory import call, load_i64, store_i64
from .rows import FP8_DS_MLA, widen_row
from .schedule import KEY_TILE

# Rows that are prefetched before the row in hand.
ROWS_AHEAD = 16


class RowSource(NamedTuple):
    """Rows of one element type behind a block table, and memory to hand a tile of them out.

    ``pointers`` and ``panel_pointers`` have room for the addresses of KEY_TILE + padding + ROWS_AHEAD rows.
    Where a row's elements are what the products take (``in_place``), the first are handed out; else rows are
    converted into the panel. The choice changes no bit.
    """

    base: int
    page_stride: int
    row_stride: int
    block_size: int
    element: int
    width: int
    in_place: int
    pointers: int
    panel_pointers: int
    panel: int
    panel_stride: int
    zeros: int


@kernel
def _locate(context, source, table, request, first, end):
    """Addresses of a key tile's rows through the block table, and of those that follow, up to ``end``.

    After the last key come rows of zeros: padding must not meet what an unused row holds (0 * NaN).
    """
    present = min(KEY_TILE + ROWS_AHEAD, end - first)
    page = first // source.block_size
    inside = first - page * source.block_size
    i = 0
    while i < present:
        address = source.base + table[request, page] * source.page_stride + inside * source.row_stride
        for _ in range(min(source.block_size - inside, present - i)):
            store_i64(source.pointers + 8 * i, address)
            address += source.row_stride
            i += 1
        page += 1
        inside = 0
    for i in range(present, KEY_TILE + context[KEY_PADDING] + ROWS_AHEAD):
        store_i64(source.pointers + 8 * i, source.zeros)


@kernel
def fetch(context, source, table, request, first, num_keys, end):
    """Addresses of a tile's rows, padded with rows of zeros, and of the rows to prefetch meanwhile."""
    _locate(context, source, table, request, first, end)
    if source.in_place != 0:
        return source.pointers, source.pointers + 8 * ROWS_AHEAD
    for i in range(num_keys):
        here = source.panel + i * source.panel_stride
        row = load_i64(source.pointers + 8 * i)
        ahead = load_i64(source.pointers + 8 * (i + ROWS_AHEAD))
        if source.element == FP8_DS_MLA:
            widen_row(context, here, row, source.element, source.width, ahead)
        else:
            call(context[TO_NATIVE + source.element], (here, row, source.width, ahead))
        store_i64(source.panel_pointers + 8 * i, here)
    for i in range(num_keys, num_keys + context[KEY_PADDING]):
        store_i64(source.panel_pointers + 8 * i, source.zeros)
    return source.panel_pointers, source.panel_pointers
