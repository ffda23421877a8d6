"""What is measured: shapes of every operation, their inputs, and how a result is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import numba_mla
from numba_mla.memory import aligned_zeros
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import decode_problem, latent_problem
from numba_mla.testing.tolerance import bmm_bounds, decode_bounds, excess, extend_bounds
from numba_mla.threads import num_threads

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One measurement.

    Parameters
    ----------
    name : str
        The shape, readable.
    isa : str
        The instruction set that computes it, whose peak it is measured by.
    call : callable
        Runs the operation once, into memory that is reused.
    error : callable
        The largest error of a fresh result over its tolerance: 1 at most if it is right.
    flops, num_bytes : int
        Work of one call; bytes that it must read.
    peer : callable, optional
        The same work by another library.
    """

    name: str
    isa: str
    call: Callable[[], object]
    error: Callable[[], float]
    flops: int
    num_bytes: int
    peer: Callable[[], object] | None = None


DECODE_SHAPES = [
    (4, 16, 4096),
    (1, 128, 4096),
    (8, 128, 2048),
    (32, 128, 128),
    (1, 16, 32768),
    (16, 16, 4096),
    (64, 16, 1024),
]
EXTEND_SHAPES = [(16, 1024, 0), (128, 64, 4096), (128, 512, 0)]
BMM_SHAPES = [(128, 1, 512, 128), (128, 16, 512, 128), (128, 16, 128, 512), (1, 1, 2112, 7168), (1, 16, 2112, 7168),
              (1, 256, 2112, 7168), (1, 16, 7168, 16384)]  # fmt: skip


def decode_cases(isa: str | None, dtypes: list[np.dtype]) -> Iterator[Case]:
    """Decode with shuffled pages of 64; the peer is torch in float32 on rows that were gathered beforehand."""
    for batch, heads, seq_len in DECODE_SHAPES:
        for dtype in dtypes:
            problem = _aligned(
                decode_problem(np.random.default_rng(0), heads, [seq_len] * batch, BLOCK_SIZE, dtype=dtype)
            )
            out = np.empty((batch, heads, 512), dtype)
            lse = np.empty((batch, heads), np.float32)
            yield Case(
                name=f"B={batch} H={heads} S={seq_len} {np.dtype(dtype).name}",
                isa=select_isa(isa, np.dtype(dtype).name).name,
                call=lambda p=problem, out=out, lse=lse: numba_mla.decode(**p, out=out, lse=lse, isa=isa),
                error=lambda p=problem: decode_bounds(**p, p_rounding=_p_rounding(isa, p["q"].dtype)).excess(
                    *numba_mla.decode(**p, isa=isa)
                ),
                flops=2 * batch * heads * seq_len * (576 + 512),
                num_bytes=batch * seq_len * 576 * np.dtype(dtype).itemsize,
                peer=_torch_decode(problem),
            )


def extend_cases(isa: str | None, dtypes: list[np.dtype]) -> Iterator[Case]:
    """Extend one request by some tokens after a prefix, causal; masked work is not counted."""
    for heads, new, prefix in EXTEND_SHAPES:
        for dtype in dtypes:
            problem = _aligned(
                latent_problem(np.random.default_rng(0), heads, [prefix + new], [new], BLOCK_SIZE, dtype=dtype)
            )
            out = np.empty((new, heads, 512), dtype)
            lse = np.empty((new, heads), np.float32)
            seen = new * prefix + new * (new + 1) // 2
            yield Case(
                name=f"H={heads} new={new} prefix={prefix} {np.dtype(dtype).name}",
                isa=select_isa(isa, np.dtype(dtype).name).name,
                call=lambda p=problem, out=out, lse=lse: numba_mla.extend(**p, out=out, lse=lse, isa=isa),
                error=lambda p=problem: extend_bounds(**p, p_rounding=_p_rounding(isa, p["q"].dtype)).excess(
                    *numba_mla.extend(**p, isa=isa)
                ),
                flops=2 * heads * seen * (576 + 512),
                num_bytes=(prefix + new) * 576 * np.dtype(dtype).itemsize,
            )


def bmm_cases(isa: str | None, dtypes: list[np.dtype]) -> Iterator[Case]:
    """Products with packed weights: absorption (H = 128) and projections (H = 1)."""
    for heads, m, n, k in BMM_SHAPES:
        for dtype in dtypes:
            rng = np.random.default_rng(0)
            a = rng.standard_normal((heads, m, k), dtype=np.float32).astype(dtype)
            w = rng.standard_normal((heads, n, k), dtype=np.float32).astype(dtype)
            packed = numba_mla.pack_weight(w, isa=isa)
            out = np.empty((heads, m, n), dtype)
            yield Case(
                name=f"H={heads} M={m} N={n} K={k} {np.dtype(dtype).name}",
                isa=select_isa(isa, np.dtype(dtype).name).name,
                call=lambda a=a, packed=packed, out=out: numba_mla.bmm(a, packed, out=out),
                error=lambda a=a, w=w, packed=packed: excess(numba_mla.bmm(a, packed), *bmm_bounds(a, w)),
                flops=2 * heads * m * n * k,
                num_bytes=packed.nbytes,
            )


CASES = {"decode": decode_cases, "extend": extend_cases, "bmm": bmm_cases}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _aligned(problem: dict) -> dict:
    """The problem with its cache where PagedLatentCache would have it: on a cache line's boundary."""
    cache = aligned_zeros(problem["kv_cache"].shape, problem["kv_cache"].dtype)
    cache[:] = problem["kv_cache"]
    return problem | {"kv_cache": cache}


def _p_rounding(isa: str | None, dtype: np.dtype) -> float:
    return select_isa(isa, np.dtype(dtype).name).p_rounding


def _torch_decode(problem: dict) -> Callable[[], object] | None:
    """torch's float32 matmul, softmax, matmul on contiguous rows; None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None

    torch.set_num_threads(num_threads())
    kv_c, k_pe, starts = numba_mla.gather_cache(
        problem["kv_cache"], problem["block_table"], problem["seq_lens"], dtype=np.float32
    )
    batch = len(starts) - 1
    rows = torch.from_numpy(np.concatenate([kv_c, k_pe], axis=1).reshape(batch, -1, 576))
    q = torch.from_numpy(problem["q"].astype(np.float32))
    scale = problem["scale"]

    def run():
        weights = torch.softmax(q @ rows.transpose(1, 2) * scale, dim=-1)
        return weights @ rows[..., :512]

    return run
