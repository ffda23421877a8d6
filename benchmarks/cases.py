"""Which shapes of each operation are measured, in which formats, and how some of them are chosen."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from attention_cases import (
    FP8,
    FP8_DS_MLA,
    decode_case,
    decode_label,
    extend_case,
    extend_label,
    prefill_case,
    prefill_label,
)
from bmm_cases import FP8_BLOCKS, bmm_case, bmm_label
from case import FLOATS, Case


class Operation(NamedTuple):
    """How a case is named and built from (*shape, stored), and the shapes for each group of formats."""

    label: Callable[..., str]
    build: Callable[..., Case]
    shapes: dict[tuple[str, ...], list[tuple]]


def _ragged_lengths() -> tuple[int, ...]:
    """Sixteen lengths of 1 to 1024, both among them; always the same."""
    return (1, *np.random.default_rng(16).integers(1, 1025, 14).tolist(), 1024)


DECODE_SHAPES = [
    (4, 16, 4096),
    (1, 128, 4096),
    (8, 128, 2048),
    (32, 128, 1024),
    (32, 128, 128),
    (1, 16, 32768),
    (16, 16, 4096),
    (64, 16, 1024),
]
FP8_DECODE_SHAPES = [(1, 128, 4096), (1, 16, 32768)]
EXTEND_SHAPES = [(16, 1024, 0), (128, 64, 4096), (128, 512, 0)]
PREFILL_SHAPES = [(16, (4096,)), (16, (1024,)), (128, (512,)), (16, _ragged_lengths())]
# Absorption and its reverse; DeepSeek V3's q_a_proj with kv_a_proj, and its o_proj.
WEIGHTS = [(128, 512, 128), (128, 128, 512), (1, 2112, 7168), (1, 7168, 16384)]
BMM_SHAPES = [(heads, m, n, k) for heads, n, k in WEIGHTS for m in (1, 16, 256)]

OPERATIONS = {
    "decode": Operation(decode_label, decode_case, {FLOATS: DECODE_SHAPES, (*FP8, FP8_DS_MLA): FP8_DECODE_SHAPES}),
    "extend": Operation(extend_label, extend_case, {FLOATS: EXTEND_SHAPES}),
    "prefill": Operation(prefill_label, prefill_case, {FLOATS: PREFILL_SHAPES}),
    "bmm": Operation(bmm_label, bmm_case, {FLOATS: BMM_SHAPES, (FP8[0], FP8_BLOCKS): BMM_SHAPES}),
}
FORMATS = (*FLOATS, *FP8, FP8_DS_MLA, FP8_BLOCKS)
DEFAULT_FORMATS = ("float32", "bfloat16")


def add_selection(parser: ArgumentParser, default_formats: tuple[str, ...] = DEFAULT_FORMATS) -> None:
    """Options that choose cases and how they are measured."""
    parser.add_argument("--isa", help="an instruction set by name (the best by default)")
    parser.add_argument(
        "--dtype", action="append", choices=FORMATS,
        help=f"how the cache, keys or weights are stored; repeatable ({' and '.join(default_formats)} by default)",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--threads", type=int, help="threads to use")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(default_formats=default_formats)


def select(op: str, options: Namespace) -> Iterator[Case]:
    """The cases of an operation that the options choose, each built when it is asked for."""
    label, build, shapes = OPERATIONS[op]
    chosen = options.dtype or options.default_formats
    for formats, shapes_of_formats in shapes.items():
        for shape in shapes_of_formats:
            for stored in formats:
                if stored in chosen and options.only in label(*shape, stored):
                    yield build(*shape, stored, options.isa)
