"""The prefill backend: attention over keys and values that are already there."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from numba_mla import prefill

from ..torch import as_array


class NumbaMLAPrefillBackend(MLAPrefillBackend):
    """Fused attention with log-sum-exp, for backends that materialise keys and values themselves."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "NUMBA_MLA_PREFILL"

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to those of their request up to themselves.

        Returns
        -------
        out : Tensor (T, H, Dv)
        lse : Tensor (H, T)
            Natural log-sum-exp, float32, if asked for.
        """
        if output_scale is not None:
            raise NotImplementedError("output_scale: numba_mla has no quantised output")
        starts = self._prefill_metadata.query_start_loc
        out, lse = self._attend(q, k, v, starts, starts, True, out)
        return (out, lse) if return_softmax_lse else out

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from new tokens to all cached tokens of a chunk; returns as ``run_prefill_new_tokens``."""
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, False, out)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        causal: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if out is None:
            out = q.new_empty(*q.shape[:2], v.shape[2])
        _, lse = prefill(
            *map(as_array, (q, k, v, query_start_loc, kv_start_loc)),
            scale=self.scale,
            causal=causal,
            out=as_array(out),
        )
        return out, torch.from_numpy(lse).t()
