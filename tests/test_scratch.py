"""What a call allocates: its outputs, and scratch memory that is kept and bounded by the threads."""

import threading
import tracemalloc

import numpy as np

import numba_mla
from numba_mla.runtime import workspace
from numba_mla.testing.inputs import decode_problem


def in_a_thread(function):
    """A function's result in a thread of its own, whose scratch memory begins empty."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_call_allocates_its_outputs_alone():
    """Once scratch memory is there: what is left are metadata, far less than one row of scores."""
    problem = decode_problem(np.random.default_rng(0), 128, [1024, 700], 16)
    out, lse = numba_mla.decode(**problem)

    def peak():
        tracemalloc.start()
        numba_mla.decode(**problem, out=out, lse=lse)
        return tracemalloc.get_traced_memory()[1], tracemalloc.stop()

    peak()
    assert peak()[0] < 16384


def test_scratch_memory_is_bounded_by_the_threads_and_not_by_the_lengths():
    def scratch(seq_len):
        problem = decode_problem(np.random.default_rng(0), 16, [seq_len], 64, 16, 8)
        with numba_mla.threads(2):
            numba_mla.decode(**problem)
        return workspace.kept.size

    short, long, longest = (in_a_thread(lambda n=n: scratch(n)) for n in (2**12, 2**16, 2**18))
    assert long <= 1.5 * short
    assert longest <= 1.5 * short
