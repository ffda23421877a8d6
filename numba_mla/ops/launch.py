"""From a checked attention call to running kernels: its outputs, its arrays' addresses, its threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..checks import address, check_apart, check_output
from ..kernels.attention import attention_parallel, attention_serial
from ..kernels.context import KV_SPLIT, VECTOR_WIDTH
from ..kernels.problem import Problem
from ..kernels.validity import MAY_MEET
from ..parallel import launch, num_threads
from ..runtime import workspace
from .elements import CODES
from .forms import extents

FLOAT32 = np.dtype(np.float32)


class Arrays(NamedTuple):
    """What an attention call reads and writes, in the order of ``_FIELDS``.

    ``q_pe`` is None where one array holds both parts of the queries, ``values`` where one holds keys and values.
    """

    q: np.ndarray
    q_pe: np.ndarray | None
    keys: np.ndarray
    values: np.ndarray | None
    out: np.ndarray
    lse: np.ndarray


_FIELDS = tuple(Problem._fields.index(name) for name in Arrays._fields)


class AttentionCall(NamedTuple):
    """A checked call: all that does not depend on where arrays lie and what metadata hold.

    ``packed`` is the problem, with offsets in the place of addresses; ``apart`` says which arrays must not meet;
    ``shape`` is the result's. A block table of at most ``few_pages`` columns leaves work for one thread alone.
    """

    packed: np.ndarray
    apart: np.ndarray
    shape: tuple[int, ...]
    few_pages: int
    score_scale: float
    value_scale: float
    context: np.ndarray


class Outputs(NamedTuple):
    """Where a result goes: the caller's arrays, and the one with dense rows that kernels write to."""

    out: np.ndarray
    lse: np.ndarray
    target: np.ndarray

    def fields(self) -> dict[str, int]:
        """The problem's fields for them."""
        return {
            "out": 0,
            "out_token_stride": self.target.strides[0],
            "out_head_stride": self.target.strides[1],
            "out_element": CODES[self.target.dtype],
            "out_bytes": self.target.itemsize,
            "lse": 0,
            "lse_token_stride": self.lse.strides[0],
            "lse_head_stride": self.lse.strides[1],
        }

    def deliver(self) -> tuple[np.ndarray, np.ndarray]:
        """The caller's arrays, filled."""
        if self.target is not self.out:
            self.out[...] = self.target
        return self.out, self.lse


class Prepared(NamedTuple):
    """A call, its arrays, and where its result goes: checked, all but the metadata."""

    call: AttentionCall
    arrays: Arrays
    outputs: Outputs


def prepare_outputs(out, lse, shape: tuple[int, int, int], dtype: np.dtype) -> Outputs:
    """Check the caller's output arrays, or make them; whether they meet other arrays is checked with addresses."""
    if out is None:
        out = np.empty(shape, dtype)
    else:
        check_output("out", out, shape, (dtype, FLOAT32), {})
    if lse is None:
        lse = np.empty(shape[:2], np.float32)
    else:
        check_output("lse", lse, shape[:2], (FLOAT32,), {})
    dense = out.strides[2] == out.itemsize or shape[2] <= 1
    return Outputs(out, lse, out if dense else np.empty(shape, out.dtype))


def attention_call(problem: Problem, score_scale: float, value_scale: float, context: np.ndarray,
                   arrays: Arrays) -> AttentionCall:  # fmt: skip
    """A checked call on arrays of these forms."""
    apart = extents(_FIELDS, arrays, outputs=2)
    shape = arrays.out.shape
    # A vector of lanes over one split of keys: no item to share.
    few_pages = context[KV_SPLIT] // problem.block_size if shape[0] * shape[1] <= context[VECTOR_WIDTH] else -1
    return AttentionCall(problem.packed(), apart, shape, few_pages, score_scale, value_scale, context)


def known_call(call: AttentionCall, q, q_pe, keys, values, out, lse) -> Prepared:
    """A call whose form is known, on these arrays."""
    if out is None:
        out = np.empty(call.shape, q.dtype)
    if lse is None:
        lse = np.empty(call.shape[:2], np.float32)
    return Prepared(call, Arrays(q, q_pe, keys, values, out, lse), Outputs(out, lse, out))


def run_attention(call: AttentionCall, arrays: Arrays, seq_lens: np.ndarray, query_start_loc: np.ndarray,
                  table: np.ndarray, checks: int, inputs: Mapping[str, np.ndarray | None]) -> int:  # fmt: skip
    """Run a call on the threads in force: DONE, or BAD_METADATA where these do not hold and nothing was done.

    ``inputs`` are the arrays that outputs must not meet, by their names in messages.
    """
    packed, apart = call.packed.copy(), call.apart
    q = address(arrays.q)
    places = (q, q if arrays.q_pe is None else address(arrays.q_pe), address(arrays.keys),
              0 if arrays.values is None else address(arrays.values), address(arrays.out),
              address(arrays.lse))  # fmt: skip
    for field, place in zip(_FIELDS, places, strict=True):
        packed[field] += place
    workers = 1 if table.shape[1] <= call.few_pages else num_threads()
    memory = workspace.reserve(0)
    while True:
        arguments = (call.context, packed, apart, call.score_scale, call.value_scale, seq_lens, query_start_loc, table,
                     checks, memory.address, memory.size, workers)  # fmt: skip
        status = attention_serial(*arguments) if workers == 1 else launch(attention_parallel, *arguments)
        if status > 0:
            memory = workspace.reserve(status)
        elif status == MAY_MEET:
            check_apart("out", arrays.out, inputs)
            check_apart("lse", arrays.lse, {**inputs, "out": arrays.out})
            # Interleaved, but apart.
            apart = apart[:0]
        else:
            return status
