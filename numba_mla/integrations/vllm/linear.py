"""Linear layers of fp8 checkpoints, whose block scales vLLM's own kernels take on AMX alone."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum

from numba_mla import bmm, pack_weight
from numba_mla.quant import BlockScaled

from ..torch import as_array


class NumbaFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """Products of activations as they are with fp8 weights and their block scales (W8A16)."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        if config.weight_quant_key.dtype != torch.float8_e4m3fn:
            return False, f"numba_mla expects float8_e4m3fn weights, got {config.weight_quant_key.dtype}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, and let go of it; kv_b_proj's is left to the attention backend."""
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            return
        params = self._get_layer_params(layer)
        scales = as_array(params.block_scale.float())
        weight = BlockScaled(as_array(params.weight)[None], scales[None], tuple(self.weight_group_shape))
        layer.packed_weight = pack_weight(weight)
        empty = torch.empty(0, dtype=params.weight.dtype)
        replace_parameter(layer, params.WEIGHT, torch.nn.Parameter(empty, requires_grad=False))

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return ``x w^T + bias``, in the type of x (..., K)."""
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), layer.packed_weight.shape[1])
        bmm(as_array(rows)[None], layer.packed_weight, out=as_array(out)[None])
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], -1)

    def apply_block_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("numba_mla takes activations as they are")


def offer_linear_kernel() -> None:
    """Have vLLM choose the kernel where none of its own can take a layer; more than once changes nothing."""
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if NumbaFp8BlockLinearKernel not in kernels:
        kernels.append(NumbaFp8BlockLinearKernel)
