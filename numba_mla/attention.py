"""LatentAttention: from rotated queries to the heads' values, each request on the path that costs less."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import ops
from .batch import Requests
from .checks import FLOAT_DTYPES
from .config import MLAConfig
from .materialise import MaterialisedAttention
from .paths import LEAST_MATERIALISED, plan_path
from .quant import BlockScaled
from .runtime import select_isa

FLOAT32 = np.dtype(np.float32)


class Part(NamedTuple):
    """Requests that take one path, and which of all new tokens are theirs: all of them, or a mask (T,)."""

    path: str
    requests: Requests
    tokens: slice | np.ndarray


def split_by_path(requests: Requests, config: MLAConfig, dtype: np.dtype, path: str = "auto") -> list[Part]:
    """Return the requests of each path, as `plan_path` chooses it for queries of `dtype`, or as it is given."""
    materialised = _choose_paths(requests, config, dtype, path)
    of_token = np.repeat(materialised, np.diff(requests.query_start_loc))
    if of_token.all() or not of_token.any():
        return [Part("materialised" if of_token.any() else "absorbed", requests, slice(None))]
    return [
        Part("absorbed", _select(requests, ~materialised), ~of_token),
        Part("materialised", _select(requests, materialised), of_token),
    ]


def _choose_paths(requests: Requests, config: MLAConfig, dtype: np.dtype, path: str) -> np.ndarray:
    """Return which requests are materialised, (B,)."""
    num_new = np.diff(requests.query_start_loc)
    if path != "auto":
        return np.full(num_new.shape, path == "materialised")
    # The answer of plan_path for decodes, which are not to wait for it.
    if num_new.max(initial=0) < LEAST_MATERIALISED:
        return np.zeros(num_new.shape, bool)
    isa = select_isa(None, dtype.name).name
    prefixes = requests.seq_lens - num_new
    paths = [plan_path(n, prefix, config, isa) for n, prefix in zip(num_new, prefixes, strict=True)]
    return np.array([chosen == "materialised" for chosen in paths])


def _select(requests: Requests, chosen: np.ndarray) -> Requests:
    num_new = np.diff(requests.query_start_loc)[chosen]
    starts = np.concatenate([[0], np.cumsum(num_new)])
    return Requests(requests.block_table[chosen], requests.seq_lens[chosen], starts)


class LatentAttention:
    """Attention of new tokens to their requests up to themselves, over cached latents.

    Parameters
    ----------
    config : MLAConfig
        The layer's numbers.
    kv_b_proj : ndarray or BlockScaled, (H * (Dn + Dv), Dc)
        Makes keys and values of latents; not needed any more afterwards.
    dtype : dtype
        Of queries, keys and values where products take them.
    softmax_scale : float, optional
        None: the config's.
    """

    def __init__(
        self,
        config: MLAConfig,
        kv_b_proj: np.ndarray | BlockScaled,
        dtype: np.dtype,
        *,
        softmax_scale: float | None = None,
    ) -> None:
        self._config, self._dtype = config, dtype
        self._softmax_scale = config.softmax_scale if softmax_scale is None else softmax_scale
        w_uk, w_uv = ops.absorb_weights(kv_b_proj, config.num_heads, config.qk_nope_head_dim, config.v_head_dim)
        self.w_uk, self.w_uv = ops.pack_weight(w_uk), ops.pack_weight(w_uv)
        w_k = ops.pack_weight(_transposed(w_uk))
        self.materialised = MaterialisedAttention(config, w_k, self.w_uv, dtype, self._softmax_scale)

    def __call__(
        self, q: np.ndarray, kv_cache: np.ndarray, parts: list[Part], cache_scale: float | None, out: np.ndarray
    ) -> None:
        """Attend from all new tokens' rotated q (T, H, Dn+Dr); fill out (T, H, Dv)."""
        ways = {"absorbed": self._attend_absorbed, "materialised": self._attend_materialised}
        for path, requests, tokens in parts:
            # A view of all tokens, or a copy of some.
            own = out[tokens]
            ways[path](q[tokens], kv_cache, requests, cache_scale, own)
            if not isinstance(tokens, slice):
                out[tokens] = own

    def _attend_absorbed(
        self, q: np.ndarray, kv_cache: np.ndarray, requests: Requests, cache_scale: float | None, out: np.ndarray
    ) -> None:
        c = self._config
        q_nope, q_pe = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        # Token-major arrays, written and read by the head-major products through transposed views.
        q_latent = np.empty((len(q), c.num_heads, c.kv_lora_rank), self._latent_dtype(kv_cache))
        ops.bmm(_cast(q_nope, self._dtype).swapaxes(0, 1), self.w_uk, out=q_latent.swapaxes(0, 1))
        attended, _ = self.attend_to_latents(q_latent, q_pe, kv_cache, requests, cache_scale)
        ops.bmm(_cast(attended, self._dtype).swapaxes(0, 1), self.w_uv, out=out.swapaxes(0, 1))

    def attend_to_latents(
        self,
        q_latent: np.ndarray,
        q_pe: np.ndarray,
        kv_cache: np.ndarray,
        requests: Requests,
        cache_scale: float | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attend from absorbed queries (T, H, Dc) and (T, H, Dr); return (T, H, Dc) and log-sum-exp (T, H)."""
        query_dtype = self._query_dtype(kv_cache)
        return ops.extend(
            (_cast(q_latent, query_dtype), _cast(q_pe, query_dtype)),
            kv_cache,
            *requests,
            scale=self._softmax_scale,
            kv_lora_rank=self._config.kv_lora_rank,
            cache_scale=cache_scale,
            out=np.empty(q_latent.shape, self._latent_dtype(kv_cache)),
        )

    def _attend_materialised(
        self, q: np.ndarray, kv_cache: np.ndarray, requests: Requests, cache_scale: float | None, out: np.ndarray
    ) -> None:
        self.materialised(_cast(q, self._dtype), kv_cache, requests, cache_scale, out)

    def _query_dtype(self, kv_cache: np.ndarray) -> np.dtype:
        return kv_cache.dtype if kv_cache.dtype in FLOAT_DTYPES else self._dtype

    def _latent_dtype(self, kv_cache: np.ndarray) -> np.dtype:
        """Latents are rounded as they are written where what reads them is of the same type."""
        return self._dtype if self._query_dtype(kv_cache) == self._dtype else FLOAT32


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.astype(dtype, copy=False)


def _transposed(weight: np.ndarray | BlockScaled) -> np.ndarray | BlockScaled:
    """Return a weight of `bmm` with the last two axes exchanged."""
    if isinstance(weight, BlockScaled):
        return BlockScaled(weight.weight.swapaxes(1, 2), weight.scale.swapaxes(1, 2), weight.block_size[::-1])
    return weight.swapaxes(1, 2)
