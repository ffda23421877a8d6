"""Rows into the paged cache, found by slot."""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from ..codegen.native import DS_BLOCK, DS_LATENT, DS_ROTARY, DS_ROTARY_AT, DS_SCALES_AT
from .arrays import first_element, has_form, read_integers
from .compile import kernel
from .context import COPY, ELEMENT_CODES, NARROW, QUANTISE, WIDEN
from .memory import call, load_f32, store_f32
from .rows import FP8_DS_MLA
from .validity import BAD_METADATA, DONE, MAY_MEET, OTHER_FORM, may_meet

_E4M3FN = ELEMENT_CODES["float8_e4m3fn"]
_BFLOAT16 = ELEMENT_CODES["bfloat16"]
_LARGEST_E4M3FN = np.float32(448.0)
# float32's smallest normal number: a block of zeros still gets a scale that can be divided by.
_SMALLEST_SCALE = np.float32(2.0**-126)


class Writing(NamedTuple):
    """Addresses, strides in bytes and sizes of one call; the fields are the order of the packed integers.

    ``element`` is of the sources, ``row_element`` of the cache's rows.
    """

    latent: int
    latent_stride: int
    latent_width: int
    rotary: int
    rotary_stride: int
    rotary_width: int
    element: int
    element_bytes: int
    cache: int
    page_stride: int
    row_stride: int
    block_size: int
    row_element: int
    num_slots: int

    def packed(self) -> np.ndarray:
        """The fields as an int64 array: one cheap argument instead of many."""
        return np.array(self, np.int64)


# Arrays of a call, in the order in which the kernel is told of their objects; all but the slots have an address.
LATENT, ROTARY, CACHE, SLOT_MAPPING = range(4)
ADDRESSES = tuple(Writing._fields.index(name) for name in ("latent", "rotary", "cache"))


@kernel
def _unpack(n):
    """The call from its packed integers."""
    return Writing(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13])


@kernel(entry=True)
def find_bad_slot(slots, num_slots, pad_slot):
    """Index of the first slot that is neither inside the cache nor the padding's; -1 if there is none."""
    for i in range(len(slots)):
        if slots[i] != pad_slot and (slots[i] < 0 or slots[i] >= num_slots):
            return i
    return -1


@kernel
def _has_repeats(slots, pad_slot):
    """Whether a slot other than the padding's appears twice; none of them is negative."""
    size = 2
    while size < 2 * len(slots):
        size *= 2
    seen = np.empty(size, np.int64)
    for place in range(size):
        seen[place] = -1
    for slot in slots:
        if slot == pad_slot:
            continue
        # The same row of many pages, whose slots are a power of two apart, is to find places of its own.
        place = (slot ^ (slot // size)) % size
        while seen[place] >= 0:
            if seen[place] == slot:
                return True
            place = (place + 1) % size
        seen[place] = slot
    return False


@kernel
def _store_ds_latent(context, target, wide):
    """512 float32 as e4m3fn with a scale for each 128: the largest finite magnitude over 448."""
    for block in range(DS_LATENT // DS_BLOCK):
        here = wide + 4 * block * DS_BLOCK
        largest = numba.float32(0.0)
        for i in range(DS_BLOCK):
            magnitude = abs(load_f32(here + 4 * i))
            if magnitude > largest and not math.isinf(magnitude):
                largest = magnitude
        scale = max(largest / _LARGEST_E4M3FN, _SMALLEST_SCALE)
        call(context[QUANTISE + _E4M3FN], (target + block * DS_BLOCK, here, DS_BLOCK, scale))
        store_f32(target + DS_SCALES_AT + 4 * block, scale)


@kernel
def _store_row(context, w, target, latent, rotary, cache_scale, wide):
    """Write a token's row ``[latent | rotary]`` in the cache's layout."""
    if w.row_element == w.element:
        call(context[COPY], (target, latent, w.latent_width * w.element_bytes))
        call(context[COPY], (target + w.latent_width * w.element_bytes, rotary, w.rotary_width * w.element_bytes))
        return
    wide_rotary = wide + 4 * w.latent_width
    call(context[WIDEN + w.element], (wide, latent, w.latent_width, latent))
    call(context[WIDEN + w.element], (wide_rotary, rotary, w.rotary_width, rotary))
    if w.row_element == FP8_DS_MLA:
        _store_ds_latent(context, target, wide)
        call(context[NARROW + _BFLOAT16], (target + DS_ROTARY_AT, wide_rotary, DS_ROTARY))
    else:
        call(context[QUANTISE + w.row_element], (target, wide, w.latent_width + w.rotary_width, cache_scale))


@kernel(entry=True)
def write_rows(context, packed, forms, apart, cache_scale, checks, pad_slot, latent, rotary, cache, slot_mapping,
               workspace, workspace_size):  # fmt: skip
    """Check a call, and write row i of the sources to slot i of the cache; the padding's slot is left out.

    Parameters
    ----------
    context : int64 array
        An instruction set's table.
    packed : int64 array
        The call, with offsets in the place of addresses.
    forms : int64 (4, FORM_SIZE)
        What the arrays must look like.
    apart : int64 (n, 4)
        Arrays that must not meet, as ``may_meet`` has it.
    cache_scale : float
        Of an fp8 cache.
    checks : int
        0 leaves the slots' values unchecked.
    pad_slot : int
    latent, rotary, cache, slot_mapping : address
        The arrays' objects.
    workspace : address
    workspace_size : int
        Its bytes.

    Returns
    -------
    int
        DONE; or the bytes of workspace that the call needs, if that is more than it has; or why it is refused:
        OTHER_FORM, MAY_MEET or BAD_METADATA. Nothing is written then.
    """
    arrays = (latent, rotary, cache, slot_mapping)
    for i in range(len(arrays)):
        if not has_form(arrays[i], forms[i]):
            return OTHER_FORM
    placed = packed.copy()
    for i in range(len(ADDRESSES)):
        placed[ADDRESSES[i]] = first_element(arrays[i])
    if may_meet(placed, apart):
        return MAY_MEET
    w, slots = _unpack(placed), read_integers(slot_mapping, forms[SLOT_MAPPING])
    if checks != 0 and (find_bad_slot(slots, w.num_slots, pad_slot) >= 0 or _has_repeats(slots, pad_slot)):
        return BAD_METADATA
    needed = 4 * (w.latent_width + w.rotary_width)
    if needed > workspace_size:
        return needed
    for i in range(len(slots)):
        if slots[i] == pad_slot:
            continue
        page = slots[i] // w.block_size
        target = w.cache + page * w.page_stride + (slots[i] - page * w.block_size) * w.row_stride
        _store_row(context, w, target, w.latent + i * w.latent_stride, w.rotary + i * w.rotary_stride, cache_scale,
                   workspace)  # fmt: skip
    return DONE
