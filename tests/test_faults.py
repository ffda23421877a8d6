"""Right calls under hostile conditions: signals, forks and exits in mid-call, arrays of every layout."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla.runtime import workspace
from numba_mla.testing.inputs import latent_problem, normal

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
LAYERS = ["tbb", "omp", "workqueue"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and forks are POSIX")

SETUP = """
import os, signal, sys, threading, time
import numpy as np, numba_mla
from numba_mla.testing.inputs import latent_problem
rng = np.random.default_rng(0)
small = latent_problem(rng, 16, [1024], [1], 16, 64, 16)
large = latent_problem(rng, 64, [1024], [1], 16, 512, 64)
def answer(problem):
    return b"".join(x.tobytes() for x in numba_mla.extend(**problem))
"""


def run(script, layer="default"):
    """Run a script in a new process, which must end well and in time; what it printed."""
    environment = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SETUP + script], env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.split()


def test_scratch_memory_outlives_its_growth():
    """A call in a signal handler or a finaliser may need more memory than the call that it interrupts."""
    first = workspace.reserve(4096)
    first.array[:] = 7
    second = workspace.reserve(first.size + 4096)
    second.array[:] = 9
    assert (first.array == 7).all()
    for memory in (first, second):
        assert memory.address % 64 == 0
        start = memory.array.ctypes.data
        assert start <= memory.address <= memory.address + memory.size <= start + memory.array.size


@posix
@pytest.mark.parametrize("layer", LAYERS)
def test_calls_in_a_signal_handler(layer):
    script = """
expected = answer(small), answer(large)
calls = wrong = 0
def handle(*_):
    global calls, wrong
    calls += 1
    numba_mla.runtime.workspace.__init__()  # let every such call allocate anew
    wrong += answer(large) != expected[1]
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.011)
deadline = time.monotonic() + 30
while calls < 30 and time.monotonic() < deadline:
    wrong += answer(small) != expected[0]
signal.setitimer(signal.ITIMER_REAL, 0)
print(calls >= 30, wrong)
"""
    assert run(script, layer) == ["True", "0"]


@posix
@pytest.mark.parametrize("layer", LAYERS)
def test_interrupts_leave_nothing_locked_or_wrong(layer):
    script = """
expected = answer(small)
interrupts = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
while interrupts < 30:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0001 * (interrupts % 7))
        while True:
            answer(small)
    except (KeyboardInterrupt, SystemError):  # the latter where Numba is boxing a result
        interrupts += 1
    other = threading.Thread(target=answer, args=(small,))
    other.start(); other.join()
    assert answer(small) == expected
print(interrupts)
"""
    assert run(script, layer) == ["30"]


@pytest.mark.parametrize("layer", LAYERS)
def test_exit_while_threads_compute(layer):
    """The interpreter drops thread-local memory before it ends; the kernels of daemon threads still use theirs."""
    script = """
answer(large)
def compute():
    while True:
        answer(large)
for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.2)
print("end")
"""
    assert run(script, layer) == ["end"]


@posix
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_fork_while_another_thread_starts_up(layer):
    """A child would wait for ever for a lock that another thread held at the fork."""
    script = """
other = threading.Thread(target=answer, args=(small,))
other.start()
statuses = []
for _ in range(4):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        with numba_mla.threads(1):
            answer(small)
        os._exit(0)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    statuses.append(ended == (child, 0))
other.join()
print(all(statuses))
"""
    assert run(script, layer) == ["True"]


def reversed_copy(x):
    """The same values in memory that runs backwards along every axis but the last."""
    flip = (*(slice(None, None, -1) for _ in x.shape[:-1]), slice(None))
    return np.ascontiguousarray(x[flip])[flip]


def unaligned(x):
    """The same values at an odd address."""
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    view = np.ndarray(x.shape, x.dtype, raw)
    view[...] = x
    assert view.ctypes.data % 2 == 1
    return view


def far_apart(x):
    """The same values with rows tens of kilobytes apart."""
    wide = np.zeros((*x.shape[:-1], 20_011), x.dtype)
    wide[..., 7 : 7 + x.shape[-1]] = x
    return wide[..., 7 : 7 + x.shape[-1]]


def axes_exchanged(x):
    """The same values with the first two axes exchanged in memory."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


LAYOUTS = [reversed_copy, unaligned, far_apart, axes_exchanged]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_outputs_change_no_bit(isa, rng, layout, dtype):
    problem = latent_problem(rng, 3, [40, 7], [5, 2], 4, 17, 6, dtype)
    expected = numba_mla.extend(**problem, out=np.empty((7, 3, 17), np.float32))
    laid_out = {name: layout(x) if x.dtype == dtype else x for name, x in problem.items() if isinstance(x, np.ndarray)}
    out, lse = layout(np.zeros((7, 3, 17), np.float32)), layout(np.zeros((7, 3), np.float32))
    numba_mla.extend(**problem | laid_out, out=out, lse=lse)
    assert (out.tobytes(), lse.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())

    merged = numba_mla.merge_states(*expected, *expected)
    numba_mla.merge_states(out, lse, layout(expected[0]), layout(expected[1]), out=out, lse=lse)
    assert (out.tobytes(), lse.tobytes()) == (merged[0].tobytes(), merged[1].tobytes())

    a, w = normal(rng, (2, 5, 33), dtype), normal(rng, (2, 19, 33), dtype)
    product = layout(np.zeros((2, 5, 19), dtype))
    numba_mla.bmm(layout(a), numba_mla.pack_weight(layout(w)), out=product)
    assert product.tobytes() == numba_mla.bmm(a, numba_mla.pack_weight(w)).tobytes()

    rows = numba_mla.gather_cache(laid_out["kv_cache"], problem["block_table"], [40, 7], kv_lora_rank=17)
    plain = numba_mla.gather_cache(problem["kv_cache"], problem["block_table"], [40, 7], kv_lora_rank=17)
    assert [x.tobytes() for x in rows] == [x.tobytes() for x in plain]
    cache = laid_out["kv_cache"]
    numba_mla.write_cache(layout(rows[0]), layout(rows[1]), cache, np.arange(46, -1, -1))
    numba_mla.write_cache(rows[0], rows[1], problem["kv_cache"], np.arange(46, -1, -1))
    assert cache.tobytes() == problem["kv_cache"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_repeat_their_memory(isa, rng, dtype):
    """Broadcast views: one query for all tokens, one page for all, one number for a whole row."""
    q = np.broadcast_to(normal(rng, (1, 1, 24), dtype), (4, 3, 24))
    cache = np.broadcast_to(normal(rng, (1, 1, 24), dtype), (6, 5, 24))
    flat = np.broadcast_to(normal(rng, (4, 3, 1), dtype), (4, 3, 24))
    rest = {"block_table": [[5, 2, 0], [1, 1, 1]], "seq_lens": [13, 9], "query_start_loc": [0, 3, 4],
            "scale": 0.3, "kv_lora_rank": 16}  # fmt: skip
    for queries in (q, flat):
        got = numba_mla.extend(queries, cache, **rest)
        expected = numba_mla.extend(queries.copy(), cache.copy(), **rest)
        assert [x.tobytes() for x in got] == [x.tobytes() for x in expected]
