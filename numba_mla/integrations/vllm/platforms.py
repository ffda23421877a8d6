"""Platforms: vLLM's own for CPUs, but for what they forbid MLA models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.zen_cpu import ZenCpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .caches import check_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

DEFAULT_BLOCK_SIZE = 64
# Where CpuPlatform would put a value of its own.
_KEPT = (
    ("cache_config", "block_size"),
    ("cache_config", "enable_prefix_caching"),
    ("scheduler_config", "enable_chunked_prefill"),
    ("scheduler_config", "max_num_batched_tokens"),
)
_MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
logger = init_logger("vllm.numba_mla")


class _KeepsChoices:
    """The user's block size, chunked prefill, prefix caching and token budget, which these kernels can bear."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Check and complete a configuration, as ``CpuPlatform`` does.

        Raises
        ------
        ValueError
            A dtype, cache dtype or width of an MLA model that no kernel takes; the message names it.
        """
        model = vllm_config.model_config
        if not _is_dense_mla(model):
            super().check_and_update_config(vllm_config)  # type: ignore[misc]
            return
        _check_model(vllm_config)
        kept = {place: getattr(getattr(vllm_config, place[0]), place[1]) for place in _KEPT}
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        for (part, name), value in kept.items():
            setattr(getattr(vllm_config, part), name, value)
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        if not cache.user_specified_block_size:
            cache.block_size = DEFAULT_BLOCK_SIZE
        logger.info_once(
            "numba_mla: whatever is said above of MLA on CPUs, block_size=%d, enable_chunked_prefill=%s, "
            "enable_prefix_caching=%s and max_num_batched_tokens=%d stay",
            cache.block_size,
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Prepare a worker, before it has a model: vLLM's replacements, then this package's linear kernel."""
        super().register_triton_kernel_overrides()  # type: ignore[misc]
        from .linear import offer_linear_kernel

        offer_linear_kernel()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return what is registered for dense MLA on CPUs, with AMX too; else the platform's own choice."""
        if attn_selector_config.use_mla and not attn_selector_config.use_sparse:
            return AttentionBackendEnum.CPU_MLA.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads=num_heads)  # type: ignore[misc]


class NumbaCpuPlatform(_KeepsChoices, CpuPlatform):
    """Any CPU."""


class NumbaZenCpuPlatform(_KeepsChoices, ZenCpuPlatform):
    """AMD's Zen with zentorch, which serves the other layers."""


def _is_dense_mla(model: ModelConfig | None) -> bool:
    if model is None or not model.use_mla or model.hf_text_config.model_type in ("deepseek_v4", "deepseek_v41"):
        return False
    if getattr(model.hf_text_config, "index_topk", None) is not None:
        logger.warning_once("numba_mla: off for this model, whose attention is sparse; vLLM is left as it is")
        return False
    return True


def _check_model(vllm_config: VllmConfig) -> None:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.dtype not in _MODEL_DTYPES:
        raise ValueError(f"dtype: numba_mla expects float32, float16 or bfloat16, got {model.dtype}")
    text = model.hf_text_config
    check_cache(cache.cache_dtype, model.dtype, text.kv_lora_rank, text.qk_rope_head_dim)
    if cache.user_specified_block_size and cache.block_size < 1:
        raise ValueError(f"block_size: numba_mla expects at least 1, got {cache.block_size}")
