"""From checked arrays to running kernels: the outputs of an attention call, its plan, its threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..checks import address, check_output
from ..kernels.attention import attention_parallel, attention_serial
from ..kernels.context import LANE_GROUP, VECTOR_WIDTH
from ..kernels.problem import Problem
from ..kernels.schedule import plan_attention
from ..kernels.scratch import workspace_bytes
from ..runtime import workspace
from ..threads import launching, num_threads
from .elements import CODES

FLOAT32 = np.dtype(np.float32)


class Outputs(NamedTuple):
    """Where a result goes: the caller's arrays, and the one with dense rows that kernels write to."""

    out: np.ndarray
    lse: np.ndarray
    target: np.ndarray

    def fields(self) -> dict[str, int]:
        """The problem's fields for them."""
        return {
            "out": address(self.target),
            "out_token_stride": self.target.strides[0],
            "out_head_stride": self.target.strides[1],
            "out_element": CODES[self.target.dtype],
            "lse": address(self.lse),
            "lse_token_stride": self.lse.strides[0],
            "lse_head_stride": self.lse.strides[1],
        }

    def deliver(self) -> tuple[np.ndarray, np.ndarray]:
        """The caller's arrays, filled."""
        if self.target is not self.out:
            self.out[...] = self.target
        return self.out, self.lse


def prepare_outputs(out, lse, shape: tuple[int, int, int], dtype: np.dtype, inputs: dict[str, np.ndarray]) -> Outputs:
    """Check the caller's output arrays, or make them."""
    if out is None:
        out = np.empty(shape, dtype)
    else:
        check_output("out", out, shape, (dtype, FLOAT32), inputs)
    if lse is None:
        lse = np.empty(shape[:2], np.float32)
    else:
        check_output("lse", lse, shape[:2], (FLOAT32,), inputs | {"out": out})
    dense = out.strides[2] == out.itemsize or shape[2] <= 1
    return Outputs(out, lse, out if dense else np.empty(shape, out.dtype))


def run_attention(problem: Problem, score_scale: float, value_scale: float, seq_lens: np.ndarray,
                  query_start_loc: np.ndarray, table: np.ndarray, context: np.ndarray) -> None:  # fmt: skip
    """Plan a call, and run its items on the threads in force."""
    packed = problem.packed()
    workers = num_threads()
    items, groups, num_slots, longest_run = plan_attention(
        seq_lens, query_start_loc, problem.num_heads, problem.group_heads, int(context[LANE_GROUP]),
        int(context[VECTOR_WIDTH]), problem.causal, workers,
    )  # fmt: skip
    workers = min(workers, len(items))
    if workers == 0:
        return
    memory = workspace.reserve(workspace_bytes(context, packed, longest_run, num_slots, workers))
    arguments = (context, packed, score_scale, value_scale, seq_lens, query_start_loc, table, items, groups,
                 longest_run, np.zeros(1, np.int64), address(memory), workers)  # fmt: skip
    if workers == 1:
        attention_serial(*arguments)
        return
    with launching():
        attention_parallel(*arguments)
