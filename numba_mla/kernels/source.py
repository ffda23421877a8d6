"""Row sources: where attention's key and value rows come from, one key tile at a time."""

from __future__ import annotations

from typing import NamedTuple

from .compile import kernel
from .context import CLEAR, GRANULE, KEY_PADDING, KEY_TILE, LIST_ROWS, NATIVE_BYTES, NATIVE_ROWS, PREFETCH_ROWS
from .memory import call, load_i64, store_i64
from .rows import native_row, padded_width


@kernel
def most_rows_listed(context):
    """Rows of a tile whose addresses are listed at most: padding, and rows ahead, included."""
    return context[KEY_TILE] + context[KEY_PADDING] + max(context[KEY_TILE], context[PREFETCH_ROWS])


class RowSource(NamedTuple):
    """Rows of one element type behind a block table, and memory to hand a tile of them out.

    ``pointers`` and ``panel_pointers`` have room for the addresses of ``most_rows_listed``.
    Where a row's elements are what the products take (``in_place``), the first are handed out; else rows are
    converted into the panel. The choice changes no bit. ``lead`` is by how many rows those to prefetch are ahead.
    """

    base: int
    page_stride: int
    row_stride: int
    block_size: int
    element: int
    width: int
    in_place: int
    lead: int
    pointers: int
    panel_pointers: int
    panel: int
    panel_stride: int
    zeros: int


@kernel
def _locate(context, source, table, request, first, count, rows):
    """Addresses of some consecutive rows of a request, through the block table."""
    page = first // source.block_size
    inside = first - page * source.block_size
    i = 0
    while i < count:
        address = source.base + table[request, page] * source.page_stride + inside * source.row_stride
        together = min(source.block_size - inside, count - i)
        call(context[LIST_ROWS], (rows + 8 * i, address, source.row_stride, together))
        i += together
        page += 1
        inside = 0


@kernel
def _line_up(context, source, num_keys):
    """Give rows that are not a constant stride apart, where products take several together, places that are.

    Within a page they are; pages' ends and the last rows of a request (zeros follow) may come in between.
    """
    together = context[GRANULE]
    for first in range(0, num_keys, together):
        rows = source.pointers + 8 * first
        stride = load_i64(rows + 8) - load_i64(rows)
        even = True
        for i in range(2, together):
            even = even and load_i64(rows + 8 * i) - load_i64(rows + 8 * (i - 1)) == stride
        if even:
            continue
        for i in range(together):
            here = source.panel + (first + i) * source.panel_stride
            row = load_i64(rows + 8 * i)
            if row == source.zeros:
                call(context[CLEAR], (here, padded_width(context, source.width) * context[NATIVE_BYTES]))
            else:
                native_row(context, here, row, source.element, source.width, row)
            store_i64(rows + 8 * i, here)


@kernel
def fetch(context, source, table, request, first, num_keys, end):
    """Addresses of a tile's rows, padded with rows of zeros, and of the rows to prefetch meanwhile.

    After the last key come rows of zeros: padding must not meet what an unused row holds (0 * NaN).
    """
    present = min(context[KEY_TILE] + source.lead, end - first)
    _locate(context, source, table, request, first, present, source.pointers)
    missing = context[KEY_TILE] + context[KEY_PADDING] + source.lead - present
    call(context[LIST_ROWS], (source.pointers + 8 * present, source.zeros, 0, missing))
    padded_keys = -(-num_keys // context[KEY_PADDING]) * context[KEY_PADDING]
    if source.in_place != 0:
        if context[GRANULE] > 1:
            _line_up(context, source, padded_keys)
        return source.pointers, source.pointers + 8 * source.lead
    padding = (padded_width(context, source.width) - source.width) * context[NATIVE_BYTES]
    call(
        context[NATIVE_ROWS + source.element],
        (source.panel, source.panel_stride, source.pointers, source.pointers + 8 * context[PREFETCH_ROWS], num_keys,
         source.width, padding),
    )  # fmt: skip
    missing = (padded_keys - num_keys) * source.panel_stride
    call(context[CLEAR], (source.panel + num_keys * source.panel_stride, missing))
    call(context[LIST_ROWS], (source.panel_pointers, source.panel, source.panel_stride, padded_keys))
    return source.panel_pointers, source.pointers + 8 * source.lead


@kernel
def announce(context, source, table, request, first, num_keys, end):
    """List the first rows of the next item, from ``first`` to ``end``, as if they followed a last tile's.

    So they are prefetched while that tile, of ``num_keys``, is in hand; after ``fetch``, which lists nothing there.
    """
    padded_keys = -(-num_keys // context[KEY_PADDING]) * context[KEY_PADDING]
    place = context[KEY_TILE] if source.lead == context[KEY_TILE] else padded_keys
    count = max(0, min(source.lead, end - first))
    _locate(context, source, table, request, first, count, source.pointers + 8 * place)
