"""Peers from torch and zentorch: ``prepare(problem)`` of each returns the call to measure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, pairwise

import ml_dtypes
import numpy as np

import numba_mla


def to_torch(x: np.ndarray):
    """A tensor with an array's memory; torch takes no bfloat16 from numpy."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _requests(problem: dict) -> list[tuple]:
    """Tensors q, k, v of each prefill request, (1, H, S, D), with V padded to K's width as SDPA kernels need it."""
    missing = problem["k"].shape[2] - problem["v"].shape[2]
    padded = problem | {"v": np.pad(problem["v"], ((0, 0), (0, 0), (0, missing)))}
    whole = [to_torch(padded[name]).transpose(0, 1)[None] for name in "qkv"]
    starts = problem["query_start_loc"].tolist()
    return [tuple(x[:, :, first:stop].contiguous() for x in whole) for first, stop in pairwise(starts)]


def torch_sdpa(problem: dict) -> Callable:
    """Prefill by torch's scaled_dot_product_attention."""
    import torch

    requests, scale = _requests(problem), problem["scale"]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(q, k, v, is_causal=True, scale=scale) for q, k, v in requests]


def torch_prefill(problem: dict) -> Callable:
    """Prefill by two products and a softmax."""
    import torch

    width, scale = problem["v"].shape[2], problem["scale"]
    requests = [(q, k.transpose(2, 3), v[..., :width].contiguous()) for q, k, v in _requests(problem)]
    longest = max(q.shape[2] for q, _, _ in requests)
    unseen = torch.ones(longest, longest, dtype=torch.bool).triu(1)

    def attend(q, k, v):
        hidden = unseen[: q.shape[2], : q.shape[2]]
        return torch.softmax((q @ k * scale).masked_fill_(hidden, -torch.inf), dim=-1) @ v

    return lambda: [attend(*request) for request in requests]


def zentorch_sdpa(problem: dict) -> Callable:
    """Prefill by zentorch's fused kernel."""
    import torch
    import zentorch  # noqa: F401 # registers the operation

    requests, scale = _requests(problem), problem["scale"]
    attend = torch.ops.zentorch.zentorch_sdpa
    return lambda: [attend(q, k, v, 0.0, True, scale=scale)[0] for q, k, v in requests]


def torch_decode(problem: dict) -> Callable:
    """Decode by two products and a softmax, with the cache's rows gathered beforehand."""
    import torch

    kv_c, k_pe, starts = numba_mla.gather_cache(problem["kv_cache"], problem["block_table"], problem["seq_lens"])
    rows = to_torch(np.concatenate([kv_c, k_pe], axis=1).reshape(len(starts) - 1, -1, problem["q"].shape[2]))
    keys, values = rows.transpose(1, 2), rows[..., : kv_c.shape[1]]
    q, scale = to_torch(problem["q"]), problem["scale"]
    return lambda: torch.softmax(q @ keys * scale, dim=-1) @ values


def torch_bmm(problem: dict) -> Callable:
    """Batched product with a transposed weight."""
    import torch

    a, w = to_torch(problem["a"]), to_torch(problem["w"]).transpose(1, 2)
    turn = cycle([w, *(w.clone() for _ in range(problem["num_copies"] - 1))])
    return lambda: torch.bmm(a, next(turn))
