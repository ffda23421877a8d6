"""Peers from vLLM on a CPU: the kernels of CPU_MLA, those of AMX_MLA, which any AVX-512 runs, and CPU_SDPA.

Each reads a case's own cache, keys, values and activations. What vLLM computes once for a step's layers, or once for a
weight, is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace

import numpy as np
from peer_torch import to_torch

import numba_mla

# The only pages that mla_decode_kvcache takes.
CPU_MLA_BLOCK = 16


def _kernels():
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C


def _latents(problem: dict):
    """The cache's rows as keys and values of one head, and the row of every position."""
    kv_cache = problem["kv_cache"]
    rows = to_torch(kv_cache).view(-1, 1, kv_cache.shape[2])
    slots = numba_mla.expand_block_table(problem["block_table"], kv_cache.shape[1])
    return rows, rows[..., : problem["kv_lora_rank"]], to_torch(slots)


def _queries_and_output(problem: dict):
    """Both in torch's memory: mla_decode_kvcache ends the process on what does not begin on a cache line."""
    q = to_torch(problem["q"]).clone()
    return q, q.new_empty(*q.shape[:2], problem["kv_lora_rank"])


def mla_decode(problem: dict) -> Callable:
    """Decode by CPU_MLA's kernel."""
    kernel = _kernels().mla_decode_kvcache
    kv_cache = problem["kv_cache"]
    blocks = to_torch(kv_cache).view(-1, CPU_MLA_BLOCK, kv_cache.shape[2])
    table = numba_mla.expand_block_table(problem["block_table"], kv_cache.shape[1] // CPU_MLA_BLOCK)
    q, out = _queries_and_output(problem)
    arguments = out, q, blocks, problem["scale"], to_torch(table), to_torch(problem["seq_lens"])

    def decode():
        kernel(*arguments)
        return out

    return decode


def decode_attention(problem: dict) -> Callable:
    """Decode by AMX_MLA's kernel, with the number of splits that vLLM gives it."""
    import torch
    from vllm.v1.attention.backends.mla.amx_mla import _compute_num_kv_splits

    kernel = _kernels().decode_attention_cpu
    keys, values, slots = _latents(problem)
    q, out = _queries_and_output(problem)
    seq_lens = to_torch(problem["seq_lens"].astype(np.int64))
    num_splits = _compute_num_kv_splits(int(seq_lens.max()), torch.get_num_threads())
    partial = torch.empty(*q.shape[:2], num_splits, out.shape[2] + 1)

    def decode():
        kernel(
            q, keys, values, out, None, None, None, partial, slots, torch.arange(len(q)), seq_lens, problem["scale"],
            0.0, False, 0, None, None,
        )  # fmt: skip
        return out

    return decode


def extend_attention(problem: dict) -> Callable:
    """Extend by AMX_MLA's kernel, which takes the new tokens' rows apart from the cache."""
    import torch

    kernel = _kernels().extend_attention_cpu
    keys, values, slots = _latents(problem)
    q, out = _queries_and_output(problem)
    seq_lens = problem["seq_lens"].astype(np.int64)
    starts = to_torch(problem["query_start_loc"])
    num_new = starts.diff()
    places = [own[stop - n : stop] for own, stop, n in zip(slots, seq_lens, num_new.tolist(), strict=True)]
    new_keys = keys[torch.cat(places)]
    new_values = new_keys[..., : out.shape[2]]

    def extend():
        kernel(
            q, new_keys, new_values, out, keys, values, slots, torch.arange(len(seq_lens)), to_torch(seq_lens),
            num_new, starts[:-1], int(num_new.max()), problem["scale"], 0.0, False, 0, None, None, None,
        )  # fmt: skip
        return out

    return extend


def cpu_sdpa(problem: dict) -> Callable:
    """Prefill by vLLM's backend for any CPU."""
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    q, k, v = (to_torch(problem[name]) for name in "qkv")
    rope = k.shape[2] - v.shape[2]
    backend = CPUSDPAMLAPrefillBackend(
        num_heads=q.shape[1], scale=problem["scale"], kv_lora_rank=512, qk_nope_head_dim=k.shape[2] - rope,
        qk_rope_head_dim=rope, v_head_dim=v.shape[2], vllm_config=None,
    )  # fmt: skip
    backend.prepare_metadata(SimpleNamespace(query_start_loc=to_torch(problem["query_start_loc"])))
    return lambda: backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False)


def bmm(problem: dict) -> Callable:
    """Batched product with a weight that is packed once."""
    kernels = _kernels()
    a, w = to_torch(problem["a"]), to_torch(problem["w"])
    out = a.new_empty(*a.shape[:2], w.shape[1])
    turn = cycle([kernels.convert_weight_packed(w) for _ in range(problem["num_copies"])])

    def product():
        kernels.bmm_cpu(out, a, next(turn), True, None)
        return out

    return product
