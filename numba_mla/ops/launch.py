"""From a checked attention call to running kernels: its arrays and outputs, its threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_apart, check_integers, check_output
from ..kernels.attention import attention_parallel, attention_serial
from ..kernels.context import KV_SPLIT, VECTOR_WIDTH
from ..kernels.problem import ADDRESSES, Problem
from ..kernels.validity import BAD_METADATA, MAY_MEET
from ..parallel import launch, num_threads
from ..runtime import workspace
from .elements import CODES
from .forms import Forms, extents, forms_of, objects_of

FLOAT32 = np.dtype(np.float32)
_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32))


class Arrays(NamedTuple):
    """What an attention call reads and writes, in the order of ``problem.ARRAYS``.

    ``q_pe`` is None where one array holds both parts of the queries, ``values`` where one holds keys and values; an
    output until it is made; metadata where the operation goes without them. ``table`` is the block table, or where
    the requests' rows begin.
    """

    q: Any
    q_pe: Any
    keys: Any
    values: Any
    out: Any
    lse: Any
    seq_lens: Any
    query_start_loc: Any
    table: Any


class AttentionCall(NamedTuple):
    """A checked call: all that does not depend on where arrays lie and what metadata hold.

    ``packed`` is the problem, with offsets in the place of addresses; ``forms`` what the arrays look like; ``apart``
    says which of them must not meet; ``shape`` and ``dtype`` are those of a result that is made. ``is_small`` leaves
    work for one thread alone. ``inputs`` gives the arrays that outputs must not meet, by their names in messages;
    ``explain`` raises what is wrong with metadata.
    """

    context: np.ndarray
    packed: np.ndarray
    forms: Forms
    apart: np.ndarray
    score_scale: float
    value_scale: float
    checks: int
    shape: tuple[int, ...]
    dtype: np.dtype
    is_small: bool
    inputs: Callable[[Arrays], Mapping[str, np.ndarray]]
    explain: Callable[[Arrays], None]

    def complete(self, arrays: Arrays) -> Arrays:
        """The arrays, with outputs where there are none."""
        q, q_pe, keys, values, out, lse, *metadata = arrays
        if out is not None and lse is not None:
            return arrays
        if out is None:
            out = np.empty(self.shape, self.dtype)
        if lse is None:
            lse = np.empty(self.shape[:2], FLOAT32)
        return Arrays(q, q_pe, keys, values, out, lse, *metadata)

    def run(self, arrays: Arrays) -> int:
        """Run it on the threads in force: DONE, or OTHER_FORM and nothing was done."""
        objects, apart = objects_of(arrays), self.apart
        workers = 1 if self.is_small else num_threads()
        memory = workspace.kept
        while True:
            arguments = (self.context, self.packed, self.forms.numbers, apart, self.score_scale, self.value_scale,
                         self.checks, *objects, memory.address, memory.size, workers)  # fmt: skip
            status = attention_serial(*arguments) if workers == 1 else launch(attention_parallel, *arguments)
            if status > 0:
                memory = workspace.reserve(status)
            elif status == MAY_MEET:
                inputs = self.inputs(arrays)
                check_apart("out", arrays.out, inputs)
                check_apart("lse", arrays.lse, {**inputs, "out": arrays.out})
                # Interleaved, but apart.
                apart = apart[:0]
            else:
                if status == BAD_METADATA:
                    self.explain(arrays)
                    raise AssertionError("metadata that the kernel refused hold")
                return status


def integers(name: str, x: Any, shape: tuple) -> np.ndarray:
    """Metadata that are a plain array as they are, to be checked by their form; else an array of them."""
    return x if type(x) is np.ndarray else check_integers(name, x, shape)


def metadata(name: str, x: Any, shape: tuple) -> np.ndarray:
    """Metadata as the kernel reads them: the caller's array of integers itself, or a new one."""
    checked = check_integers(name, x, shape)
    return x if type(x) is np.ndarray and x.dtype in _INTEGERS else checked


def prepare_outputs(out, lse, shape: tuple[int, int, int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Check the caller's output arrays, or make them; whether they meet other arrays is checked with addresses."""
    if out is None:
        out = np.empty(shape, dtype)
    else:
        check_output("out", out, shape, (dtype, FLOAT32), {})
    if lse is None:
        lse = np.empty(shape[:2], np.float32)
    else:
        check_output("lse", lse, shape[:2], (FLOAT32,), {})
    return out, lse


def dense_output(out: np.ndarray) -> np.ndarray:
    """The array itself, or one of dense rows for kernels to write to."""
    return out if out.strides[2] == out.itemsize or out.shape[2] <= 1 else np.empty(out.shape, out.dtype)


def output_fields(out: np.ndarray, lse: np.ndarray) -> dict[str, int]:
    """The problem's fields for outputs whose rows are dense."""
    return {
        "out": 0,
        "out_token_stride": out.strides[0],
        "out_head_stride": out.strides[1],
        "out_element": CODES[out.dtype],
        "out_bytes": out.itemsize,
        "lse": 0,
        "lse_token_stride": lse.strides[0],
        "lse_head_stride": lse.strides[1],
    }


def attention_call(problem: Problem, score_scale: float, value_scale: float, context: np.ndarray, arrays: Arrays,
                   checks: int, inputs: Callable[[Arrays], Mapping[str, np.ndarray]],
                   explain: Callable[[Arrays], None]) -> AttentionCall:  # fmt: skip
    """A checked call on arrays of these forms."""
    shape = arrays.out.shape
    pages = 1 if arrays.table is None else arrays.table.shape[-1]
    # A vector of lanes over one split of keys: no item to share.
    is_small = shape[0] * shape[1] <= context[VECTOR_WIDTH] and pages * problem.block_size <= context[KV_SPLIT]
    apart = extents(ADDRESSES, arrays[: len(ADDRESSES)], outputs=2)
    return AttentionCall(context, problem.packed(), forms_of(arrays), apart, score_scale, value_scale, checks, shape,
                         arrays.q.dtype, bool(is_small), inputs, explain)  # fmt: skip
