"""Merging: softmax states of disjoint key sets, and finished outputs with their log-sum-exp."""

from __future__ import annotations

import math

from ..codegen.softmax import NO_MAXIMUM
from .compile import kernel
from .context import BLEND, NARROW, WEIGH, WIDEN
from .memory import call, load_f32, store_f32
from .rows import convert_row


@kernel
def clear(state, padded_lanes):
    """The state of lanes that have seen no key; their outputs are written by the first key tile."""
    for lane in range(padded_lanes):
        store_f32(state.m + 4 * lane, NO_MAXIMUM)
        store_f32(state.l + 4 * lane, 0.0)


@kernel
def merge(context, a, b, num_lanes, padded_lanes, value_width, weights, exponent_scale):
    """Take state b into state a; a side without keys leaves the other's bits as they are.

    ``weights`` is scratch for two float32 a padded lane.
    """
    weights_b = weights + 4 * padded_lanes
    call(context[WEIGH], (padded_lanes, a.m, a.l, b.m, b.l, weights, weights_b, exponent_scale))
    for lane in range(num_lanes):
        here = a.out + lane * a.out_stride
        there = b.out + lane * b.out_stride
        call(
            context[BLEND],
            (here, here, there, value_width, load_f32(weights + 4 * lane), load_f32(weights_b + 4 * lane)),
        )


@kernel(entry=True)
def merge_finished(context, out_a, lse_a, out_b, lse_b, out, lse, num_rows, width, element_a, bytes_a, element_b,
                   bytes_b, scratch):  # fmt: skip
    """Merge contiguous rows of finished outputs: natural log-sum-exp, selection where a side has no keys.

    ``out`` has a's element type and may be either input; ``scratch`` holds two float32 rows. A partial of
    log-sum-exp -inf or +inf has no keys, and whatever its output holds (NaN included) is not looked at.
    """
    wide_a, wide_b = scratch, scratch + 4 * width
    for row in range(num_rows):
        a, b = float(load_f32(lse_a + 4 * row)), float(load_f32(lse_b + 4 * row))
        at_a, at_b, target = (
            out_a + row * width * bytes_a,
            out_b + row * width * bytes_b,
            out + row * width * bytes_a,
        )
        empty_a, empty_b = math.isinf(a), math.isinf(b)
        if empty_a and empty_b:
            for column in range(width):
                store_f32(wide_a + 4 * column, 0.0)
            call(context[NARROW + element_a], (target, wide_a, width))
            store_f32(lse + 4 * row, -math.inf)
        elif empty_b:
            if target != at_a:
                convert_row(context, target, element_a, at_a, element_a, width, bytes_a, wide_a)
            store_f32(lse + 4 * row, a)
        elif empty_a:
            convert_row(context, target, element_a, at_b, element_b, width, bytes_b, wide_b)
            store_f32(lse + 4 * row, b)
        else:
            highest = max(a, b)
            total = math.exp(a - highest) + math.exp(b - highest)
            call(context[WIDEN + element_a], (wide_a, at_a, width, at_a))
            call(context[WIDEN + element_b], (wide_b, at_b, width, at_b))
            call(
                context[BLEND],
                (wide_a, wide_a, wide_b, width, math.exp(a - highest) / total, math.exp(b - highest) / total),
            )
            call(context[NARROW + element_a], (target, wide_a, width))
            store_f32(lse + 4 * row, highest + math.log(total))
