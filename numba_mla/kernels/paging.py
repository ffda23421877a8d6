"""Rows in and out of the paged cache, found by slot or by position."""

from __future__ import annotations

import math

import numba
import numpy as np

from ..codegen.native import DS_BLOCK, DS_LATENT, DS_ROTARY, DS_ROTARY_AT, DS_SCALES_AT
from .compile import kernel
from .context import COPY, ELEMENT_CODES, NARROW, QUANTISE, SCALE, WIDEN
from .memory import call, load_f32, store_f32
from .rows import FP8_DS_MLA

_E4M3FN = ELEMENT_CODES["float8_e4m3fn"]
_BFLOAT16 = ELEMENT_CODES["bfloat16"]
_LARGEST_E4M3FN = np.float32(448.0)
# float32's smallest normal number: a block of zeros still gets a scale that can be divided by.
_SMALLEST_SCALE = np.float32(2.0**-126)


@kernel(entry=True)
def find_bad_page(table, seq_lens, block_size, num_blocks):
    """Request and column of the first used table entry outside the cache; (-1, -1) if there is none."""
    for request in range(len(seq_lens)):
        for page in range(-(-seq_lens[request] // block_size)):
            if table[request, page] < 0 or table[request, page] >= num_blocks:
                return request, page
    return -1, -1


@kernel(entry=True)
def find_bad_slot(slots, num_slots, pad_slot):
    """Index of the first slot that is neither inside the cache nor the padding's; -1 if there is none."""
    for i in range(len(slots)):
        if slots[i] != pad_slot and (slots[i] < 0 or slots[i] >= num_slots):
            return i
    return -1


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


@kernel(entry=True)
def write_rows(context, latent, latent_stride, latent_width, rotary, rotary_stride, rotary_width, element,
               element_bytes, cache, page_stride, row_stride, block_size, cache_element, cache_scale, slots,
               pad_slot, wide):  # fmt: skip
    """Write row i of the sources to slot i of the cache, in its layout; the padding's slot is left out.

    ``wide`` has room for a float32 row.
    """
    for i in range(len(slots)):
        if slots[i] == pad_slot:
            continue
        page = slots[i] // block_size
        target = cache + page * page_stride + (slots[i] - page * block_size) * row_stride
        from_latent, from_rotary = latent + i * latent_stride, rotary + i * rotary_stride
        if cache_element == element:
            call(context[COPY], (target, from_latent, latent_width * element_bytes))
            target += latent_width * element_bytes
            call(context[COPY], (target, from_rotary, rotary_width * element_bytes))
            continue
        call(context[WIDEN + element], (wide, from_latent, latent_width, from_latent))
        wide_rotary = wide + 4 * latent_width
        call(context[WIDEN + element], (wide_rotary, from_rotary, rotary_width, from_rotary))
        if cache_element == FP8_DS_MLA:
            _store_ds_latent(context, target, wide)
            call(context[NARROW + _BFLOAT16], (target + DS_ROTARY_AT, wide_rotary, DS_ROTARY))
        else:
            call(context[QUANTISE + cache_element], (target, wide, latent_width + rotary_width, cache_scale))


@kernel(entry=True)
def gather_rows(context, cache, page_stride, row_stride, block_size, table, starts, ends, width, cache_element,
                cache_bytes, cache_scale, latent, latent_stride, latent_width, rotary, rotary_stride, element,
                wide):  # fmt: skip
    """Gather positions starts <= p < ends of each request, cut in two and converted; ``wide`` is a float32 row."""
    row = 0
    for request in range(len(starts)):
        for position in range(starts[request], ends[request]):
            page = position // block_size
            source = cache + table[request, page] * page_stride + (position - page * block_size) * row_stride
            to_latent, to_rotary = latent + row * latent_stride, rotary + row * rotary_stride
            row += 1
            if cache_element == element:
                call(context[COPY], (to_latent, source, latent_width * cache_bytes))
                call(
                    context[COPY],
                    (to_rotary, source + latent_width * cache_bytes, (width - latent_width) * cache_bytes),
                )
                continue
            call(context[WIDEN + cache_element], (wide, source, width, source))
            if cache_scale != 1.0:
                call(context[SCALE], (wide, width, cache_scale))
            call(context[NARROW + element], (to_latent, wide, latent_width))
            call(context[NARROW + element], (to_rotary, wide + 4 * latent_width, width - latent_width))
