"""Cases of decode, extend and prefill."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from case import FLOATS, Case

import numba_mla
from numba_mla.memory import aligned_zeros
from numba_mla.quant import DS_BYTES
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import decode_problem, latent_problem, prefill_problem
from numba_mla.testing.tolerance import decode_bounds, extend_bounds, prefill_bounds

FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_DS_MLA = "fp8_ds_mla"
BLOCK_SIZE = 64
LATENT, WIDTH = 512, 576
QK_DIM, V_DIM = 192, 128
# Of fp8 caches: a power of two would hide a scale that is applied at the wrong place.
CACHE_SCALE = 0.037


def decode_label(batch: int, heads: int, seq_len: int, stored: str) -> str:
    """Name of a decode case."""
    return f"B={batch} H={heads} S={seq_len} {stored}"


def decode_case(batch: int, heads: int, seq_len: int, stored: str, isa: str | None = None) -> Case:
    """Decode with shuffled pages of 64; a quantised cache takes bfloat16 queries, and has bfloat16 beside it."""
    quantised = stored not in FLOATS
    made = "bfloat16" if quantised else stored
    problem = decode_problem(np.random.default_rng(0), heads, [seq_len] * batch, BLOCK_SIZE, dtype=made)
    problem = _quantised(problem, stored) if quantised else _aligned(problem)
    return _attention_case(
        decode_label(batch, heads, seq_len, stored), numba_mla.decode, decode_bounds, problem, isa,
        flops=2 * batch * heads * seq_len * (WIDTH + LATENT),
        num_bytes=batch * seq_len * problem["kv_cache"][0, 0].nbytes,
        beside=decode_case(batch, heads, seq_len, "bfloat16", isa) if quantised else None,
    )  # fmt: skip


def extend_label(heads: int, new: int, prefix: int, stored: str) -> str:
    """Name of an extend case."""
    return f"H={heads} new={new} prefix={prefix} {stored}"


def extend_case(heads: int, new: int, prefix: int, stored: str, isa: str | None = None) -> Case:
    """Extend one request by some tokens after a prefix, causal; masked work is not counted."""
    problem = _aligned(latent_problem(np.random.default_rng(0), heads, [prefix + new], [new], BLOCK_SIZE, dtype=stored))
    seen = new * prefix + new * (new + 1) // 2
    return _attention_case(
        extend_label(heads, new, prefix, stored), numba_mla.extend, extend_bounds, problem, isa,
        flops=2 * heads * seen * (WIDTH + LATENT),
        num_bytes=(prefix + new) * problem["kv_cache"][0, 0].nbytes,
    )  # fmt: skip


def prefill_label(heads: int, lengths: Sequence[int], stored: str) -> str:
    """Name of a prefill case."""
    shape = f"S={lengths[0]}" if len(lengths) == 1 else f"{len(lengths)} requests of {min(lengths)} to {max(lengths)}"
    return f"H={heads} {shape} {stored}"


def prefill_case(heads: int, lengths: Sequence[int], stored: str, isa: str | None = None) -> Case:
    """Prefill of whole requests with widths 192 and 128, causal; masked work is not counted."""
    problem = prefill_problem(np.random.default_rng(0), heads, lengths, None, QK_DIM, V_DIM, stored)
    seen = sum(length * (length + 1) // 2 for length in lengths)
    return _attention_case(
        prefill_label(heads, lengths, stored), numba_mla.prefill, prefill_bounds, problem, isa,
        flops=2 * heads * seen * (QK_DIM + V_DIM),
        num_bytes=sum(problem[name].nbytes for name in "qkv"),
    )  # fmt: skip


def _attention_case(name, op, bounds, problem, isa, flops, num_bytes, beside=None) -> Case:
    """A case of any attention operation, into memory that is reused."""
    q = problem["q"]
    out = np.empty((*q.shape[:2], problem["v"].shape[2] if "v" in problem else LATENT), q.dtype)
    lse = np.empty(q.shape[:2], np.float32)
    record = select_isa(isa, q.dtype.name)
    return Case(
        name=name,
        isa=record.name,
        problem=problem,
        outputs=(out, lse),
        call=lambda: op(**problem, out=out, lse=lse, isa=isa),
        error=lambda: bounds(**problem, p_rounding=record.p_rounding).excess(out, lse),
        flops=flops,
        num_bytes=num_bytes,
        beside=beside,
    )


def _aligned(problem: dict) -> dict:
    """The problem with its cache where PagedLatentCache would have it: on a cache line's boundary."""
    cache = aligned_zeros(problem["kv_cache"].shape, problem["kv_cache"].dtype)
    cache[:] = problem["kv_cache"]
    return problem | {"kv_cache": cache}


def _quantised(problem: dict, stored: str) -> dict:
    """The problem with its rows written to an fp8 cache, or to rows of 656 bytes."""
    pages = problem["kv_cache"].shape[:2]
    rows = problem["kv_cache"].reshape(-1, WIDTH)
    if stored == FP8_DS_MLA:
        cache, scale = aligned_zeros((*pages, DS_BYTES), np.uint8), {}
    else:
        cache, scale = aligned_zeros((*pages, WIDTH), getattr(ml_dtypes, stored)), {"cache_scale": CACHE_SCALE}
    numba_mla.write_cache(rows[:, :LATENT], rows[:, LATENT:], cache, np.arange(len(rows)), **scale)
    return problem | {"kv_cache": cache} | scale
