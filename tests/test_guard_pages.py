"""No operation reads or writes one byte outside its arrays: all of them lie against pages that cannot be touched.

Run as a script with an operation's name, this file is the process that would die: it calls the operation with
every input, output, scratch memory and metadata array ending at such a page, then beginning right after one.
Then it forks a child for each array, in which the kernels are told an address that is one element off: each
must die.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla import runtime
from numba_mla.checks import check_integers
from numba_mla.testing.inputs import decode_problem, latent_problem, normal, prefill_problem

PAGE = mmap.PAGESIZE
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOAT8_DTYPES = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
ALL_DTYPES = [*DTYPES, *FLOAT8_DTYPES]
# Latent and rotary width: odd, no rotary part, one below, at and above a vector, a panel's edge.
WIDTHS = [(1, 0), (1, 3), (3, 4), (7, 10), (16, 0), (17, 16), (33, 30), (63, 1), (64, 8)]
HEADS = [1, 3, 16, 17, 33]
BLOCK_SIZES = [1, 3, 16]


def guarded_bytes(num_bytes, side):
    """Memory whose last byte (side "end") or first byte (side "start") touches a page without access."""
    middle = -(-max(num_bytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, middle + 2 * PAGE)
    whole = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for page in (0, middle + PAGE):
        assert protect(whole.ctypes.data + page, PAGE, 0) == 0, os.strerror(ctypes.get_errno())
    first = PAGE if side == "start" else PAGE + middle - num_bytes
    return whole[first : first + num_bytes]


def guarded(x, side):
    """A copy of an array, against a page without access."""
    target = guarded_bytes(x.nbytes, side).view(x.dtype).reshape(x.shape)
    target[...] = x
    return target


def rows_of_a_wider_array(x, side):
    """The same values as rows of a wider array: only the first or the last row touches the page."""
    if x.ndim > 3:
        return guarded(x, side)  # packed panels, which are dense by definition
    wider = np.zeros((*x.shape[:-1], x.shape[-1] + 5), x.dtype)
    part = slice(0, x.shape[-1]) if side == "start" else slice(5, None)
    wider[..., part] = x
    return guarded(wider, side)[..., part]


@contextlib.contextmanager
def guarded_internals(side):
    """Scratch memory, and the integers that kernels get, against pages without access too."""
    line = 64

    def reserve(self, num_bytes):
        memory = guarded_bytes(-(-num_bytes // line) * line, side)
        return runtime.Memory(memory, memory.ctypes.data, memory.size)

    def check_and_guard(*arguments):
        return guarded(check_integers(*arguments), side)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runtime.workspace), "reserve", reserve)
        for name, module in list(sys.modules.items()):
            if name.startswith("numba_mla.ops.") and hasattr(module, "check_integers"):
                patch.setattr(module, "check_integers", check_and_guard)
        yield


def widths_and(*others, dtypes=DTYPES):
    """All widths and dtypes, each with one of every other dimension's values in turn."""
    turns = [itertools.cycle(values) for values in others]
    return [(*widths, dtype, *(next(turn) for turn in turns)) for widths in WIDTHS for dtype in dtypes]


def touching_both_ends(problem):
    """The problem with a cache whose first and last rows are in use: pages in order, without those to spare.

    The last request's length is a multiple of every block size.
    """
    return problem | {"kv_cache": problem["kv_cache"][: problem["block_table"].max() + 1]}


def in_656_bytes(problem):
    """The problem with rows of 656 bytes that hold small finite numbers."""
    return problem | {"kv_cache": np.full((*problem["kv_cache"].shape[:2], 656), 0x38, np.uint8)}


# Each yields (function, arguments by position, arguments by name); the arrays are not guarded yet.


def decode_calls(rng):
    turns = widths_and(DTYPES, HEADS, BLOCK_SIZES, [None, np.float32], dtypes=ALL_DTYPES)
    for rank, rope, dtype, q_dtype, heads, block_size, out_dtype in [*turns, (512, 64, None, *turns[0][3:])]:
        query_dtype = dtype if dtype in DTYPES else q_dtype
        problem = touching_both_ends(
            decode_problem(
                rng,
                heads,
                [5, 0, 257, 1056],
                block_size,
                rank,
                rope,
                dtype or q_dtype,
                q_dtype=query_dtype,
                shuffle=False,
            )
        )
        outputs = {"out": np.empty((4, heads, rank), out_dtype or query_dtype), "lse": np.empty((4, heads), np.float32)}
        yield numba_mla.decode, (), (problem if dtype else in_656_bytes(problem)) | outputs


def extend_calls(rng):
    for rank, rope, dtype, heads, block_size, causal in widths_and(HEADS, BLOCK_SIZES, [True, False]):
        problem = latent_problem(rng, heads, [9, 0, 288], [3, 0, 5], block_size, rank, rope, dtype, shuffle=False)
        problem["q"] = (problem["q"][..., :rank].copy(), problem["q"][..., rank:].copy())
        # Values that are not finite are looked for, and replaced in rows that a lane does not see.
        problem["kv_cache"][problem["block_table"].max(), -1, 0] = np.inf
        outputs = {"out": np.empty((8, heads, rank), dtype), "lse": np.empty((8, heads), np.float32)}
        yield numba_mla.extend, (), touching_both_ends(problem) | outputs | {"causal": causal}


def prefill_calls(rng):
    for width, v_width, dtype, heads, causal in widths_and(HEADS, [True, False]):
        problem = prefill_problem(rng, heads, [3, 0, 5], [2, 4, 259], width, v_width + 1, dtype)
        problem["v"][-1, -1, 0] = np.inf
        outputs = {"out": np.empty((8, heads, v_width + 1), dtype), "lse": np.empty((8, heads), np.float32)}
        yield numba_mla.prefill, (), problem | outputs | {"causal": causal}


def merge_states_calls(rng):
    for width, _, dtype, heads, other in widths_and(HEADS, DTYPES):
        a, b = normal(rng, (4, heads, width), dtype), normal(rng, (4, heads, width), other)
        lse_a, lse_b = (rng.standard_normal((4, heads)).astype(np.float32) for _ in range(2))
        lse_a[1], lse_b[2] = -np.inf, np.inf
        yield numba_mla.merge_states, (a, lse_a, b, lse_b), {"out": np.empty_like(a), "lse": np.empty_like(lse_a)}


def write_cache_calls(rng):
    turns = widths_and(DTYPES, BLOCK_SIZES, dtypes=ALL_DTYPES)
    for rank, rope, dtype, other, block_size in [*turns, (512, 64, None, np.float32, 3)]:
        row_dtype = dtype if dtype in DTYPES else other
        kv_c, k_pe = normal(rng, (7, rank), row_dtype), normal(rng, (7, rope), row_dtype)
        shape = (48 // block_size, block_size)
        cache = np.zeros((*shape, rank + rope), dtype) if dtype else np.zeros((*shape, 656), np.uint8)
        yield numba_mla.write_cache, (kv_c, k_pe, cache, [47, 0, -1, 5, 7, 1, 9]), {}


def gather_cache_calls(rng):
    turns = widths_and(BLOCK_SIZES, DTYPES, dtypes=ALL_DTYPES)
    for rank, rope, dtype, block_size, other in [*turns, (512, 64, None, 3, DTYPES[2])]:
        problem = touching_both_ends(
            decode_problem(rng, 1, [7, 0, 48], block_size, rank, rope, dtype or other, shuffle=False)
        )
        problem = problem if dtype else in_656_bytes(problem)
        del problem["q"], problem["scale"]
        out = tuple(np.empty((50, width), other) for width in (rank, rope))
        yield numba_mla.gather_cache, (), problem | {"starts": [0, 0, 5], "dtype": other, "out": out}


def factors(rng):
    for k, n, dtype, m, other in widths_and([1, 15, 16, 17, 33, 130], ALL_DTYPES):
        yield normal(rng, (2, m, k), dtype), normal(rng, (2, n + 1, k), other)
    yield normal(rng, (1, 131, 3), np.float32), normal(rng, (1, 200, 3), np.float32)
    yield normal(rng, (1, 3, 1030), np.float16), normal(rng, (1, 200, 1030), np.float32)


def scales_of(w):
    """Block scales for an fp8 weight."""
    if w.dtype not in FLOAT8_DTYPES:
        return {}
    shape = (len(w), -(-w.shape[1] // 3), -(-w.shape[2] // 2))
    return {"scale": np.full(shape, 0.5, np.float32), "block_size": (3, 2)}


def pack_weight_calls(rng):
    for _, w in factors(rng):
        yield numba_mla.pack_weight, (w,), scales_of(w)


def bmm_calls(rng):
    for a, w in factors(rng):
        out = np.empty((len(a), a.shape[1], w.shape[1]), a.dtype)
        yield numba_mla.bmm, (a, numba_mla.pack_weight(w, **scales_of(w))), {"out": out}


CALLS = {
    "decode": decode_calls,
    "extend": extend_calls,
    "prefill": prefill_calls,
    "merge_states": merge_states_calls,
    "write_cache": write_cache_calls,
    "gather_cache": gather_cache_calls,
    "pack_weight": pack_weight_calls,
    "bmm": bmm_calls,
}


def planted_call(operation):
    """A call in which every array has elements, and a weight has block scales."""
    for call in CALLS[operation](np.random.default_rng(0)):
        arrays = run_placed(call, np.copy)
        if all(x.size for x in arrays) and (operation != "bmm" or len(arrays) == 4):
            return call
    raise AssertionError(operation)


def placed(argument, put, arrays):
    """An argument with its arrays (those of pairs and packed weights, too) put elsewhere and noted."""
    if isinstance(argument, tuple):
        return tuple(placed(part, put, arrays) for part in argument)
    if isinstance(argument, numba_mla.PackedWeight):
        panels, block_scales = (placed(part, put, arrays) for part in (argument.panels, argument.block_scales))
        return replace(argument, panels=panels, block_scales=block_scales)
    if not isinstance(argument, np.ndarray) or argument.dtype.kind == "i":
        return argument
    arrays.append(put(argument))
    return arrays[-1]


def run_placed(call, put):
    """Run a call on arrays that are put elsewhere; the arrays."""
    function, positional, named = call
    arrays = []
    positional = [placed(argument, put, arrays) for argument in positional]
    function(*positional, **{name: placed(argument, put, arrays) for name, argument in named.items()})
    return arrays


def run_guarded(operation, side):
    """All calls of an operation in guarded memory give the bits that they give in ordinary memory."""
    for number, call in enumerate(CALLS[operation](np.random.default_rng(0))):
        expected = [array.tobytes() for array in run_placed(call, np.copy)]
        for layout in (guarded, rows_of_a_wider_array):
            with guarded_internals(side), numba_mla.threads(1 + number % 2):
                arrays = run_placed(call, lambda x, put=layout: put(x, side))
            assert [array.tobytes() for array in arrays] == expected


def count_arrays(call):
    return len(run_placed(call, np.copy))


def dies_of_a_planted_error(call, side, planted):
    """Whether a child dies in which one array says that its elements are one further, or one before."""
    child = os.fork()
    if child == 0:
        arrays = []

        def put(x):
            arrays.append(guarded(x, side))
            if len(arrays) == planted + 1:
                # The first field of numpy's own, after the head that every object has, says where the elements are.
                place = ctypes.c_ssize_t.from_address(id(arrays[-1]) + object.__basicsize__)
                place.value += x.itemsize if side == "end" else -x.itemsize
            return arrays[-1]

        with numba_mla.threads(1):
            run_placed(call, put)
        os._exit(0)
    return os.WIFSIGNALED(status := os.waitpid(child, 0)[1]) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)


def main(operation):
    """Run the guarded calls on every instruction set, then the planted errors."""
    import resource  # not there on Windows

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for isa, side in itertools.product(numba_mla.available_isas(), ("start", "end")):
        with numba_mla.use_isa(isa):
            run_guarded(operation, side)
    if operation == "pack_weight":
        return  # numpy's own indexing: there is no address to get wrong
    call = planted_call(operation)
    for side, planted in itertools.product(("start", "end"), range(count_arrays(call))):
        assert dies_of_a_planted_error(call, side, planted), f"array {planted} of {operation}, {side}"


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="memory protection by mprotect")
@pytest.mark.parametrize("operation", CALLS)
def test_nothing_outside_the_arrays_is_touched(operation):
    done = subprocess.run([sys.executable, __file__, operation], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    main(sys.argv[1])
