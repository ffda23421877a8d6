"""Rows out of the paged cache, found by position."""

from __future__ import annotations

from .compile import kernel
from .context import COPY, NARROW, SCALE, WIDEN
from .memory import call


@kernel(entry=True)
def find_bad_page(table, seq_lens, block_size, num_blocks):
    """Request and column of the first used table entry outside the cache; (-1, -1) if there is none."""
    for request in range(len(seq_lens)):
        for page in range(-(-seq_lens[request] // block_size)):
            if table[request, page] < 0 or table[request, page] >= num_blocks:
                return request, page
    return -1, -1


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
