"""The batched product with packed weights: out = scale * a w^T."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..memory import LINE
from .arrays import first_element, has_form
from .compile import kernel
from .context import (
    CLEAR,
    CONFIGURE_TILES,
    GRANULE,
    K_PACK,
    LIST_ROWS,
    MULTIPLY_CODES,
    MULTIPLY_ROWS,
    MULTIPLY_SCALED,
    MULTIPLY_SCALED_CODES,
    NARROW_ROWS,
    NATIVE,
    NATIVE_BYTES,
    NATIVE_ROWS,
    RELEASE_TILES,
    TO_NATIVE,
    VECTOR_WIDTH,
    WEIGHT_VECTORS,
    WIDEN_PAIRS,
)
from .memory import call, fetch_add
from .rows import padded_width
from .validity import DONE, MAY_MEET, OTHER_FORM, may_meet

# Rows of a and elements of k that one pass takes: a's rows and a panel stay in the second-level cache, and a panel
# that is converted first, fewer elements of it, nearly in the first-level one. k is cut for the caches alone: sums go
# on where they stopped, but for those that are scaled.
ROW_BLOCK = 128
K_BLOCK = 512
CONVERTED_K = 256
# Weight panels of one work item, at most, and what they amount to in elements of k.
MAX_PANELS = 8
STEPS_AN_ITEM = 1024
# Room for addresses of rows of a that are prefetched: at least those of one register block.
ROWS_AHEAD = 16
# Bytes of weights that are prefetched before those that are converted: what is taken next, while these are used.
BYTES_AHEAD = 8192


class Product(NamedTuple):
    """Addresses, strides in bytes and sizes of one call; the fields are the order of the packed integers.

    A panel of the weight has ``w_pack`` elements of k side by side, ``w_k`` in all, filled up with zeros.
    ``scales`` is 0, or a float32 for each column of a panel and each block of ``scale_rows`` elements of k, which
    take up ``scale_k`` in a panel, filled up too; without scales all of k is one block.
    """

    a: int
    a_head_stride: int
    a_row_stride: int
    a_element: int
    a_bytes: int
    w: int
    w_element: int
    w_bytes: int
    w_pack: int
    w_k: int
    scales: int
    scale_rows: int
    scale_k: int
    out: int
    out_head_stride: int
    out_row_stride: int
    out_element: int
    out_bytes: int
    num_heads: int
    num_rows: int
    num_columns: int
    k: int

    def packed(self) -> np.ndarray:
        """The fields as an int64 array: one cheap argument instead of many."""
        return np.array(self, np.int64)


# Arrays of a call, in the order in which kernels are told of their objects; 0 stands for no scales.
ADDRESSES = tuple(Product._fields.index(name) for name in ("a", "w", "scales", "out"))


class Part(NamedTuple):
    """Elements of k taken together: the first and how many; their block of scales, and their place in a panel."""

    first: int
    num: int
    block: int
    place: int


class Scratch(NamedTuple):
    """Addresses of one worker's memory; ``end`` is one past it."""

    rows: int
    a_panel: int
    w_panel: int
    sums: int
    end: int


@kernel
def unpack(n):
    """The product from its packed integers."""
    return Product(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14],
                   n[15], n[16], n[17], n[18], n[19], n[20], n[21])  # fmt: skip


@kernel
def panel_width(context):
    """Columns of a packed panel."""
    return context[WEIGHT_VECTORS] * context[VECTOR_WIDTH]


@kernel
def lay_out(context, base):
    """One worker's memory from an address on."""
    width = panel_width(context)
    a_panel = base + 8 * (ROW_BLOCK + ROWS_AHEAD)
    w_panel = a_panel + ROW_BLOCK * (4 * K_BLOCK + LINE)
    sums = w_panel + 4 * K_BLOCK * width + LINE
    return Scratch(base, a_panel, w_panel, sums, sums + 4 * ROW_BLOCK * MAX_PANELS * width)


@kernel
def workspace_bytes(context, num_workers):
    """Bytes that a call needs."""
    return num_workers * lay_out(context, numba.int64(0)).end


@kernel
def _place_rows(context, p, head, first_row, num_rows, first_k, num_k, scratch):
    """Addresses of rows of a, from element ``first_k`` on: in place, or in the native type and filled up.

    Where products take several rows together, the last ones are joined by rows of zeros.
    """
    together = context[GRANULE]
    padded, padded_rows = padded_width(context, num_k), -(-num_rows // together) * together
    source = p.a + head * p.a_head_stride + first_row * p.a_row_stride + first_k * p.a_bytes
    call(context[LIST_ROWS], (scratch.rows, source, p.a_row_stride, num_rows))
    if p.a_element == context[NATIVE] and padded == num_k and padded_rows == num_rows:
        return padded_rows
    stride = 4 * K_BLOCK + LINE
    padding = (padded - num_k) * context[NATIVE_BYTES]
    call(
        context[NATIVE_ROWS + p.a_element],
        (scratch.a_panel, stride, scratch.rows, scratch.rows, num_rows, num_k, padding),
    )
    call(context[CLEAR], (scratch.a_panel + num_rows * stride, (padded_rows - num_rows) * stride))
    call(context[LIST_ROWS], (scratch.rows, scratch.a_panel, stride, padded_rows))
    return padded_rows


@kernel
def _is_native(context, p):
    """Whether products take the weight's panels as they are."""
    return p.w_element == context[NATIVE] and p.w_pack == context[K_PACK]


@kernel
def _part_from(context, p, first, block, place):
    """The part that begins there: of one block, as many elements as the caches have room for."""
    most = K_BLOCK if _is_native(context, p) else CONVERTED_K
    left = block * p.scale_k + p.scale_rows - place
    return Part(first, min(most, left, p.k - first), block, place)


@kernel
def _next_part(context, p, part):
    """The part after that one; the first one again, for the next panel, after the last."""
    first, block, place = part.first + part.num, part.block, part.place + part.num
    if first == p.k:
        first, block, place = 0, 0, 0
    elif place == block * p.scale_k + p.scale_rows:
        block += 1
        place = block * p.scale_k
    return _part_from(context, p, first, block, place)


@kernel
def _place_part(context, p, weights, num_k, scratch):
    """Where products find a panel's part: in place, or converted to the native type."""
    width = panel_width(context)
    if _is_native(context, p):
        return weights
    if p.w_pack == context[K_PACK]:
        padded = padded_width(context, num_k)
        call(context[TO_NATIVE + p.w_element], (scratch.w_panel, weights, padded * width, weights + BYTES_AHEAD))
    else:
        call(context[WIDEN_PAIRS + p.w_element], (scratch.w_panel, weights, -(-num_k // 2), width))
    return scratch.w_panel


@kernel
def _multiply_part(context, p, weights, soon, scales, first_k, num_k, num_rows, sums, stride, scratch):
    """Add the product of the rows with a panel's part to their sums, scaled where the part has scales.

    Meanwhile the part at ``soon`` is prefetched, unless it has to be converted, which sees to that itself.
    """
    width = panel_width(context)
    steps = padded_width(context, num_k) // context[K_PACK]
    family = MULTIPLY_CODES if scales == 0 else MULTIPLY_SCALED_CODES
    if p.w_pack == context[K_PACK] and context[family + p.w_element] != 0:
        call(context[family + p.w_element],
             (scratch.rows, num_rows, weights, steps, sums, stride, first_k, scales, scratch.w_panel))  # fmt: skip
        return
    placed = _place_part(context, p, weights, num_k, scratch)
    if scales != 0:
        call(context[MULTIPLY_SCALED],
             (scratch.rows, num_rows, placed, 4 * width, steps, sums, stride, scales, first_k))  # fmt: skip
        return
    if placed != weights:
        soon = placed
    call(context[MULTIPLY_ROWS], (scratch.rows, num_rows, placed, 4 * width, steps, sums, stride, first_k, soon))


@kernel
def _multiply_panels(context, p, part, first_panel, num_panels, afterwards, num_rows, stride, scratch):
    """Add the products of the rows with a part of neighbouring panels; ``afterwards`` is what is multiplied next."""
    width, step_bytes = panel_width(context), panel_width(context) * p.w_bytes
    panel_bytes, num_blocks = p.w_k * step_bytes, -(-p.k // p.scale_rows)
    weights, scales = p.w + first_panel * panel_bytes + part.place * step_bytes, p.scales
    for panel in range(num_panels):
        soon = weights + panel_bytes if panel + 1 < num_panels else afterwards
        if p.scales != 0:
            scales = p.scales + 4 * width * ((first_panel + panel) * num_blocks + part.block)
        _multiply_part(context, p, weights, soon, scales, part.first, part.num, num_rows,
                       scratch.sums + 4 * panel * width, stride, scratch)  # fmt: skip
        weights += panel_bytes


@kernel
def panels_an_item(p):
    """Panels of one work item: more where k is short, so that an item is worth its while."""
    return max(1, min(MAX_PANELS, STEPS_AN_ITEM // p.k))


@kernel
def _panels_a_head(context, p):
    """Panels of one head's weight."""
    return -(-p.num_columns // panel_width(context))


@kernel
def _first_panel(context, p, item):
    """An item's head, and the first of its panels, counted from the first head's on."""
    together = panels_an_item(p)
    panels_a_head = _panels_a_head(context, p)
    items_a_head = -(-panels_a_head // together)
    head = item // items_a_head
    return head, head * panels_a_head + (item - head * items_a_head) * together


@kernel
def _run_item(context, p, item, following, scale, scratch):
    """All rows of one head for a few panels of columns; ``following`` is the item that this worker takes next."""
    width = panel_width(context)
    together = panels_an_item(p)
    head, first_panel = _first_panel(context, p, item)
    _, following_panel = _first_panel(context, p, following)
    num_panels = min(together, (head + 1) * _panels_a_head(context, p) - first_panel)
    first_column = (first_panel - head * _panels_a_head(context, p)) * width
    columns = min(num_panels * width, p.num_columns - first_column)
    stride, step_bytes, zero = 4 * together * width, width * p.w_bytes, numba.int64(0)
    for first_row in range(0, p.num_rows, ROW_BLOCK):
        num_rows = min(ROW_BLOCK, p.num_rows - first_row)
        part, is_last = _part_from(context, p, zero, zero, zero), p.k == 0
        while not is_last:
            padded_rows = _place_rows(context, p, head, first_row, num_rows, part.first, part.num, scratch)
            next_part = _next_part(context, p, part)
            is_last = next_part.first == 0
            next_panel = following_panel if is_last and first_row + num_rows == p.num_rows else first_panel
            afterwards = p.w + (next_panel * p.w_k + next_part.place) * step_bytes
            _multiply_panels(context, p, part, first_panel, num_panels, afterwards, padded_rows, stride, scratch)
            part = next_part
        target = p.out + head * p.out_head_stride + first_row * p.out_row_stride + first_column * p.out_bytes
        call(context[NARROW_ROWS + p.out_element], (target, p.out_row_stride, scratch.sums, stride, num_rows, columns,
                                                scale))  # fmt: skip


@kernel
def _count_items(context, packed):
    """Work items of a call."""
    p = unpack(packed)
    return p.num_heads * -(-_panels_a_head(context, p) // panels_an_item(p))


@kernel
def spread(turn, num_items, num_workers):
    """The item that is taken in that turn: workers walk through parts of the weight that lie far apart.

    Streams from memory that are neighbours slow one another down, by a few percent.
    """
    part, place = turn % num_workers, turn // num_workers
    return part * (num_items // num_workers) + min(part, num_items % num_workers) + place


@kernel
def _work(worker, context, packed, scale, num_items, num_workers, next_turn, workspace):
    """One worker: take items until there are none."""
    p = unpack(packed)
    scratch = lay_out(context, workspace + worker * lay_out(context, numba.int64(0)).end)
    if context[CONFIGURE_TILES] != 0:
        call(context[CONFIGURE_TILES], ())
    # An item is taken while the one before it runs, so that its weights are on their way when it begins.
    turn = fetch_add(next_turn.ctypes.data, 1)
    while turn < num_items:
        following = fetch_add(next_turn.ctypes.data, 1)
        item = spread(turn, num_items, num_workers)
        soon = spread(min(following, num_items - 1), num_items, num_workers)
        _run_item(context, p, item, soon, scale, scratch)
        turn = following
    if context[RELEASE_TILES] != 0:
        call(context[RELEASE_TILES], ())


@kernel
def _admit(packed, forms, apart, arrays):
    """Why a call must not run, or DONE; and the product with its addresses."""
    placed = packed.copy()
    for i in range(len(ADDRESSES)):
        if not has_form(arrays[i], forms[i]):
            return OTHER_FORM, placed
        if arrays[i] != 0:
            placed[ADDRESSES[i]] = first_element(arrays[i])
    return (MAY_MEET if may_meet(placed, apart) else DONE), placed


@kernel(entry=True)
def product_serial(context, packed, forms, apart, scale, a, w, scales, out, workspace, workspace_size,
                   num_workers):  # fmt: skip
    """Check, and run all items in the calling thread; as ``product_parallel``."""
    status, placed = _admit(packed, forms, apart, (a, w, scales, out))
    if status != DONE:
        return status
    one = numba.int64(1)
    needed = workspace_bytes(context, one)
    if needed > workspace_size:
        return needed
    num_items, next_turn = _count_items(context, placed), np.zeros(1, np.int64)
    _work(numba.int64(0), context, placed, scale, num_items, one, next_turn, workspace)
    return DONE


@kernel(entry=True, parallel=True)
def product_parallel(context, packed, forms, apart, scale, a, w, scales, out, workspace, workspace_size,
                     num_workers):  # fmt: skip
    """Check, and run all items, by as many workers as asked for.

    As ``attention_parallel``, with its results: DONE, OTHER_FORM, MAY_MEET, or bytes of workspace.
    """
    status, placed = _admit(packed, forms, apart, (a, w, scales, out))
    if status != DONE:
        return status
    num_items = _count_items(context, placed)
    workers = min(num_workers, num_items)
    needed = workspace_bytes(context, workers)
    if needed > workspace_size:
        return needed
    next_turn = np.zeros(1, np.int64)
    for worker in numba.prange(workers):
        # prange counts in unsigned integers, for which all that is called would be compiled again.
        _work(numba.int64(worker), context, placed, scale, num_items, workers, next_turn, workspace)
    return DONE
