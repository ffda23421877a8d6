"""The attention backend: its name, and the metadata that a step's layers share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from numba_mla import show_config
from numba_mla.attention import Part, split_by_path
from numba_mla.batch import Requests

from ..torch import as_array, as_dtype
from .impl import NumbaMLAImpl, layer_config

logger = init_logger("vllm.numba_mla")


class NumbaMLABackend(MLACommonBackend):
    """MLA on any CPU: any block size, chunked prefill, prefix caching, fp8 caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
    ]  # fmt: skip

    @staticmethod
    def get_name() -> str:
        return "NUMBA_MLA"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[NumbaMLAImpl]:
        return NumbaMLAImpl

    @staticmethod
    def get_builder_cls() -> type[NumbaMLAMetadataBuilder]:
        return NumbaMLAMetadataBuilder


@dataclass
class NumbaMLAMetadata(MLACommonMetadata):
    """A step's requests as the kernels take them: ``decode`` and ``prefill`` are this package's own.

    Decodes, which come first, have a few new tokens each: one, and those that speculation adds. Their queries come
    absorbed. The others' do not, and go by the path that costs less.
    """

    decode: Requests | None = None  # type: ignore[assignment]
    prefill: list[Part] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Not the base's check: a latent may have any width."""


class NumbaMLAMetadataBuilder(MLACommonMetadataBuilder[NumbaMLAMetadata]):
    """Makes the metadata of a step, once for all layers."""

    # Decodes of different lengths are one `extend`.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device, **options: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, metadata_cls=NumbaMLAMetadata, **options)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._config = layer_config(layer.impl)
        self._dtype = as_dtype(vllm_config.model_config.dtype)
        layer.impl.warm_up(kv_cache_spec.block_size)
        _announce(self._dtype.name, vllm_config.cache_config.cache_dtype, kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> NumbaMLAMetadata:
        """Describe the requests of a step.

        Raises
        ------
        ValueError
            If the new tokens of a request are to see each other both ways.
        """
        m = common_attn_metadata
        if m.causal is False:
            raise ValueError("causal: numba_mla expects new tokens that see no later ones, got causal=False")
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            m, decode_threshold=self.reorder_batch_threshold, require_uniform=False
        )
        requests = Requests(
            as_array(m.block_table_tensor)[: m.num_reqs],
            as_array(m.seq_lens)[: m.num_reqs],
            as_array(m.query_start_loc_cpu)[: m.num_reqs + 1],
        )
        prefill = None
        if num_prefills > 0:
            prefill = split_by_path(_slice(requests, num_decodes, m.num_reqs), self._config, self._dtype)
        return NumbaMLAMetadata(
            num_reqs=m.num_reqs,
            max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len,
            num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            decode=_slice(requests, 0, num_decodes) if num_decodes > 0 else None,
            prefill=prefill,
        )


def _slice(requests: Requests, first: int, stop: int) -> Requests:
    starts = requests.query_start_loc[first : stop + 1]
    return Requests(requests.block_table[first:stop], requests.seq_lens[first:stop], starts - starts[:1])


@cache
def _announce(dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    """Say once in a worker that this backend serves it."""
    found = show_config()
    logger.info(
        "numba_mla: backend %s, ISA %s, %d threads (%s), model %s, cache %s, block size %d",
        NumbaMLABackend.get_name(),
        found["isa"],
        found["threads"],
        found["threading_layer"],
        dtype,
        kv_cache_dtype,
        block_size,
    )
