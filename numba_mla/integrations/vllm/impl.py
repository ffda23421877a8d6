"""The backend's work in one layer: weights, the cache's rows, attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.v1.attention.backend import AttentionType

from numba_mla import MLAConfig, bmm, write_cache
from numba_mla.attention import LatentAttention, split_by_path
from numba_mla.batch import Requests
from numba_mla.ops import PackedWeight
from numba_mla.quant import BlockScaled

from ..torch import as_array, as_dtype
from .caches import PACKED_ROWS, cache_array, cache_scale, check_cache, row_dtype

_vllm_bmm = _custom_ops.bmm_cpu


def _bmm(out: torch.Tensor, mat1: torch.Tensor, mat2: Any, is_vnni: bool, scale: Any) -> None:
    """vLLM's product with its packed weights, or this package's with its own, which carry their scales."""
    if isinstance(mat2, PackedWeight):
        bmm(as_array(mat1), mat2, out=as_array(out))
    else:
        _vllm_bmm(out, mat1, mat2, is_vnni, scale)


# The layer absorbs and de-absorbs decodes' queries through this name, with the weights that the impl has packed.
_custom_ops.bmm_cpu = _bmm


class NumbaMLAImpl(MLACommonImpl):
    """Attention of one layer; its arguments are those of vLLM's MLACommonImpl."""

    # The layer takes ``_w_uk_packed`` and ``_w_uv_packed``, and lets go of kv_b_proj's own weight.
    uses_amx_bmm = True
    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM would quantise queries where the cache is.
        self.supports_quant_query_input = False
        self._w_scale = None
        self._w_uk_packed: PackedWeight | None = None
        self._w_uv_packed: PackedWeight | None = None
        _refuse_variants(*args, **kwargs)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Pack kv_b_proj, fp8 with its block scales as they are, anything else in the model's type."""
        check_cache(self.kv_cache_dtype, act_dtype, self.kv_lora_rank, self.qk_rope_head_dim)
        self._model_dtype = act_dtype
        self._attention = LatentAttention(
            layer_config(self), _weight(self.kv_b_proj, act_dtype), as_dtype(act_dtype), softmax_scale=self.scale
        )
        self._w_uk_packed, self._w_uv_packed = self._attention.w_uk, self._attention.w_uv

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write new tokens' rows; a negative slot's is skipped."""
        if kv_cache.numel() == 0:
            return
        rows = cache_array(kv_cache, kv_cache_dtype)
        dtype = row_dtype(rows, kv_c_normed.dtype)
        latent, rotary = (as_array(part).astype(dtype, copy=False) for part in (kv_c_normed, k_pe))
        slots = as_array(slot_mapping).reshape(-1)
        write_cache(latent, rotary, rows, slots, cache_scale=cache_scale(kv_cache_dtype, k_scale))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from decodes' absorbed queries, (T, H, Dc + Dr) or its two parts.

        Returns
        -------
        out : Tensor (T, H, Dc)
            Attended latents, in the queries' type.
        lse : Tensor (T, H)
            Natural log-sum-exp, float32.
        """
        if isinstance(q, torch.Tensor):
            q = q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]
        q_latent, q_pe = map(as_array, q)
        out, lse = self._attention.attend_to_latents(
            q_latent,
            q_pe,
            cache_array(kv_c_and_k_pe_cache, self.kv_cache_dtype),
            attn_metadata.decode,
            cache_scale(self.kv_cache_dtype, layer._k_scale),
        )
        return _as_tensor(out, q[0].dtype), torch.from_numpy(lse)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend from queries (T, H, Dn + Dr) of requests with many new tokens; fill output (T, H * Dv)."""
        if output_scale is not None:
            raise NotImplementedError("output_scale: numba_mla has no quantised output")
        self._attention(
            as_array(q),
            cache_array(kv_c_and_k_pe_cache, self.kv_cache_dtype),
            attn_metadata.prefill,
            cache_scale(self.kv_cache_dtype, k_scale),
            as_array(output).reshape(len(q), self.num_heads, self.v_head_dim),
        )

    def warm_up(self, block_size: int) -> None:
        """Compile, or load, what requests would else wait for: all operations once, on a few tokens."""
        num_tokens = 2
        width = self.kv_lora_rank + self.qk_rope_head_dim
        if self.kv_cache_dtype == PACKED_ROWS:
            width = 656
        dtype = torch.uint8 if self.kv_cache_dtype.startswith("fp8") else self._cache_dtype()
        kv_cache = torch.zeros(1, block_size + 1, width, dtype=dtype)
        new = Requests(np.zeros((1, 1), np.int32), np.full(1, num_tokens), np.array([0, num_tokens]))
        one = torch.ones(())
        kv_c, k_pe = (
            torch.zeros(num_tokens, n, dtype=self._model_dtype) for n in (self.kv_lora_rank, self.qk_rope_head_dim)
        )
        self.do_kv_cache_update(kv_c, k_pe, kv_cache, torch.arange(num_tokens), self.kv_cache_dtype, one)
        q = torch.zeros(num_tokens, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, dtype=kv_c.dtype)
        out = torch.empty(num_tokens, self.num_heads, self.v_head_dim, dtype=kv_c.dtype)
        for path in ("absorbed", "materialised"):
            parts = split_by_path(new, layer_config(self), as_dtype(kv_c.dtype), path)
            self._attention(
                as_array(q), cache_array(kv_cache, self.kv_cache_dtype), parts, cache_scale(self.kv_cache_dtype, one),
                as_array(out),
            )  # fmt: skip

    def _cache_dtype(self) -> torch.dtype:
        return self._model_dtype if self.kv_cache_dtype == "auto" else getattr(torch, self.kv_cache_dtype)


def layer_config(impl: NumbaMLAImpl) -> MLAConfig:
    """The numbers of a layer's attention; its projections are vLLM's affair."""
    return MLAConfig(
        hidden_size=impl.num_heads * impl.v_head_dim,
        num_heads=impl.num_heads,
        q_lora_rank=None,
        kv_lora_rank=impl.kv_lora_rank,
        qk_nope_head_dim=impl.qk_nope_head_dim,
        qk_rope_head_dim=impl.qk_rope_head_dim,
        v_head_dim=impl.v_head_dim,
    )


def _weight(kv_b_proj: Any, act_dtype: torch.dtype) -> np.ndarray | BlockScaled:
    """Return kv_b_proj's weight (H * (Dn + Dv), Dc)."""
    weight, block_size = kv_b_proj.weight, getattr(kv_b_proj, "weight_block_size", None)
    if weight.dtype != torch.float8_e4m3fn or block_size is None:
        return as_array(get_and_maybe_dequant_weights(kv_b_proj, out_dtype=act_dtype))
    scales = getattr(kv_b_proj, "weight_scale_inv", None)
    if scales is None:
        scales = kv_b_proj.weight_scale
    return BlockScaled(as_array(weight), as_array(scales.float()), tuple(block_size))


def _as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over an array's memory, of the type that goes with the array's."""
    if array.dtype.itemsize == 4:
        return torch.from_numpy(array).to(dtype)
    return torch.from_numpy(array.view(np.int16)).view(dtype)


def _refuse_variants(
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    **mla_args: Any,
) -> None:
    """Refuse what the kernels do not compute."""
    given = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        "indexer": mla_args.get("indexer"),
    }
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"{name}: numba_mla expects None, got {value!r}")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"attn_type: numba_mla expects {AttentionType.DECODER!r}, got {attn_type!r}")
