"""Materialised attention: keys and values of each head, made of the cache's latents some tokens at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import ops
from .batch import Requests
from .chunks import WORKSPACE_TOKENS, ContextChunk, plan_context_chunks
from .config import MLAConfig
from .memory import aligned_zeros


class _Rows(NamedTuple):
    """Memory for n cached rows, and for the keys and values of all heads made of them."""

    kv_c: np.ndarray  # (n, Dc)
    k_pe: np.ndarray  # (n, Dr)
    keys: np.ndarray  # (n, H, Dn + Dr)
    values: np.ndarray  # (n, H, Dv)


class MaterialisedAttention:
    """Attention over keys ``[W_K kv_c | k_pe]`` and values ``W_UV kv_c`` of each head.

    Both are made of the latents as the cache gives them back, new tokens' too, so that a token's keys do not
    depend on which call wrote them.

    Parameters
    ----------
    config : MLAConfig
        The layer's numbers.
    w_k, w_uv : PackedWeight, (H, Dn, Dc) and (H, Dv, Dc)
        The two parts of kv_b_proj.
    dtype : dtype
        Of queries, keys and values.
    softmax_scale : float
        Factor on scores.
    """

    def __init__(
        self,
        config: MLAConfig,
        w_k: ops.PackedWeight,
        w_uv: ops.PackedWeight,
        dtype: np.dtype,
        softmax_scale: float,
    ) -> None:
        self._config, self._w_k, self._w_uv, self._dtype = config, w_k, w_uv, dtype
        self._softmax_scale = softmax_scale

    def __call__(
        self, q: np.ndarray, kv_cache: np.ndarray, requests: Requests, cache_scale: float | None, out: np.ndarray
    ) -> None:
        """Attend from new tokens' q (T, H, Dn+Dr) to their requests up to themselves; fill out (T, H, Dv)."""
        starts = requests.query_start_loc
        num_new = np.diff(starts)
        prefixes = requests.seq_lens - num_new
        new = ContextChunk(range(len(num_new)), tuple(prefixes), tuple(requests.seq_lens), tuple(starts))
        # Cut at the workspace's multiples alone, a request's bits do not depend on the others of its batch.
        context = plan_context_chunks(np.where(num_new > 0, prefixes, 0), WORKSPACE_TOKENS, WORKSPACE_TOKENS)
        if not context:
            self._attend_to_new(q, kv_cache, requests, cache_scale, new, out)
            return
        merged = np.empty(out.shape, np.float32)
        lse = self._attend_to_new(q, kv_cache, requests, cache_scale, new, merged)
        memory = self._new_rows(max(chunk.num_tokens for chunk in context))
        for chunk in context:
            rows = self._materialise(kv_cache, requests, cache_scale, chunk, memory)
            tokens = slice(starts[chunk.requests.start], starts[chunk.requests.stop])
            total, total_lse = merged[tokens], lse[tokens]
            part = np.empty(total.shape, np.float32)
            part_lse = self._attend(q[tokens], rows, requests, chunk, False, part)
            ops.merge_states(total, total_lse, part, part_lse, out=total, lse=total_lse)
        out[...] = merged

    def _attend_to_new(
        self,
        q: np.ndarray,
        kv_cache: np.ndarray,
        requests: Requests,
        cache_scale: float | None,
        new: ContextChunk,
        out: np.ndarray,
    ) -> np.ndarray:
        """Attend from new tokens to those of their request up to themselves, in memory that is given back."""
        rows = self._materialise(kv_cache, requests, cache_scale, new, self._new_rows(new.num_tokens))
        return self._attend(q, rows, requests, new, True, out)

    def _new_rows(self, num_rows: int) -> _Rows:
        c = self._config

        def by_head(width: int) -> np.ndarray:
            # Rows of one head side by side, as attention reads them.
            return aligned_zeros((c.num_heads, num_rows, width), self._dtype).swapaxes(0, 1)

        return _Rows(
            np.empty((num_rows, c.kv_lora_rank), self._dtype),
            np.empty((num_rows, c.qk_rope_head_dim), self._dtype),
            by_head(c.qk_nope_head_dim + c.qk_rope_head_dim),
            by_head(c.v_head_dim),
        )

    def _materialise(
        self, kv_cache: np.ndarray, requests: Requests, cache_scale: float | None, chunk: ContextChunk, memory: _Rows
    ) -> _Rows:
        """Gather a chunk's rows and make its keys and values; return what of the memory they take."""
        c = self._config
        rows = _Rows(*(part[: chunk.num_tokens] for part in memory))
        ops.gather_cache(
            kv_cache,
            requests.block_table[chunk.requests.start : chunk.requests.stop],
            chunk.ends,
            starts=chunk.starts,
            kv_lora_rank=c.kv_lora_rank,
            cache_scale=cache_scale,
            dtype=self._dtype,
            out=(rows.kv_c, rows.k_pe),
        )
        latents = np.broadcast_to(rows.kv_c, (c.num_heads, *rows.kv_c.shape))
        ops.bmm(latents, self._w_k, out=rows.keys[..., : c.qk_nope_head_dim].swapaxes(0, 1))
        ops.bmm(latents, self._w_uv, out=rows.values.swapaxes(0, 1))
        rows.keys[..., c.qk_nope_head_dim :] = rows.k_pe[:, None]
        return rows

    def _attend(
        self, q: np.ndarray, rows: _Rows, requests: Requests, chunk: ContextChunk, causal: bool, out: np.ndarray
    ) -> np.ndarray:
        """Attend from the new tokens of a chunk's requests to its keys; fill out, return log-sum-exp (T, H)."""
        starts = requests.query_start_loc[chunk.requests.start : chunk.requests.stop + 1]
        _, lse = ops.prefill(
            q,
            rows.keys,
            rows.values,
            starts - starts[0],
            chunk.kv_start_loc,
            scale=self._softmax_scale,
            causal=causal,
            out=out,
        )
        return lse
