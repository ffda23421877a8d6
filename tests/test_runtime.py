"""Start-up, the disk cache, threads and processes."""

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import numba_mla
from numba_mla.testing.inputs import latent_problem

DECODE = """
import numpy as np, numba_mla
cache = np.random.default_rng(0).standard_normal((40, 16, 80), dtype=np.float32)
q = np.random.default_rng(1).standard_normal((2, 3, 80), dtype=np.float32)
out, lse = numba_mla.decode(q, cache, np.arange(40).reshape(2, 20), [300, 17], scale=0.2, kv_lora_rank=64)
print(out.tobytes().hex()[:64], lse.tobytes().hex())
"""


def run(script, **environment):
    """Run a script in a new process; its output."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=os.environ | environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def cached_files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache folder that one process has filled, and what that process answered."""
    folder = tmp_path_factory.mktemp("warm")
    answer = run(DECODE, NUMBA_MLA_CACHE_DIR=str(folder))
    assert any(name.endswith(".kernel") for name in cached_files(folder))
    assert any(name.endswith(".o") for name in cached_files(folder))
    return folder, answer


@pytest.mark.slow
def test_second_process_compiles_nothing(warm):
    folder, answer = warm
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    refuse = """
import numba.core.compiler as compiler, numba_mla.codegen.link as link
def refuse(*arguments, **options): raise AssertionError("compiled again")
compiler.compile_extra = compiler.compile_ir = link.build_object = refuse
"""
    assert run(refuse + DECODE, NUMBA_MLA_CACHE_DIR=str(folder)) == answer
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.slow
def test_damaged_cache_files_are_compiled_anew(warm, tmp_path):
    """Files emptied, cut in half, with one bit flipped, of foreign content: the same answer, and whole files."""
    folder, answer = warm
    for number, path in enumerate(sorted(folder.iterdir())):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        damaged = (b"", content[: len(content) // 2], content, b"something else")[number % 4]
        (tmp_path / path.name).write_bytes(damaged)
    assert run(DECODE, NUMBA_MLA_CACHE_DIR=str(tmp_path)) == answer
    for path in folder.iterdir():
        assert len((tmp_path / path.name).read_bytes()) > 100


@pytest.mark.slow
def test_cold_processes_on_one_empty_folder(tmp_path, warm):
    environment = os.environ | {"NUMBA_MLA_CACHE_DIR": str(tmp_path / "shared")}
    processes = [
        subprocess.Popen([sys.executable, "-c", DECODE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {process.communicate()[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert answers == {warm[1]}
    assert not [name for name in cached_files(tmp_path / "shared") if name.startswith(".")]


@pytest.mark.slow
def test_instruction_sets_of_other_sizes_share_a_folder(warm, tmp_path):
    """Processes with other tile settings, in turn on one folder and each on its own: the same answers."""
    own, shared = (run(DECODE, NUMBA_MLA_CACHE_DIR=str(f), NUMBA_MLA_ISA="generic") for f in (tmp_path, warm[0]))
    assert own == shared
    assert run(DECODE, NUMBA_MLA_CACHE_DIR=str(warm[0])) == warm[1]


def test_folder_that_cannot_be_written(tmp_path):
    """A home that is a file: compiled code goes to a temporary folder of the user's."""
    blocked = tmp_path / "home"
    blocked.write_text("not a folder")
    script = "import numba_mla; print(numba_mla.show_config()['cache_folder'])"
    folder = run(script, NUMBA_MLA_CACHE_DIR="", HOME=str(blocked), XDG_CACHE_HOME=str(blocked), TMPDIR=str(tmp_path))
    assert folder.strip().startswith(str(tmp_path))


def test_an_edited_kernel_module_changes_every_kernels_name(tmp_path, monkeypatch):
    from numba_mla.kernels import compile as kernel_compiler

    before = kernel_compiler.source_hash()
    copy = tmp_path / "kernels"
    copy.mkdir()
    for path in (numba_mla_folder() / "kernels").glob("*.py"):
        (copy / path.name).write_text(path.read_text())
    monkeypatch.setattr(kernel_compiler, "__file__", str(copy / "compile.py"))
    kernel_compiler.source_hash.cache_clear()
    try:
        assert kernel_compiler.source_hash() == before
        (copy / "schedule.py").write_text((copy / "schedule.py").read_text() + "\n# edited\n")
        kernel_compiler.source_hash.cache_clear()
        assert kernel_compiler.source_hash() != before
    finally:
        kernel_compiler.source_hash.cache_clear()


def numba_mla_folder():
    from pathlib import Path

    return Path(numba_mla.__file__).parent


def problems():
    rng = np.random.default_rng(0)
    return [latent_problem(rng, heads, [1500, 40], [1, 6], 16, 64, 16) for heads in (1, 3, 16, 17)]


def answers(problem):
    return tuple(x.tobytes() for x in numba_mla.extend(**problem))


THREADS = """
import threading
import numpy as np, numba_mla
from numba_mla.testing.inputs import latent_problem
rng = np.random.default_rng(0)
problems = [latent_problem(rng, heads, [1500, 40], [1, 6], 16, 64, 16) for heads in (3, 16)]
expected = [numba_mla.extend(**p)[0].tobytes() for p in problems]
wrong = []
def caller(i):
    for _ in range(30):
        if numba_mla.extend(**problems[i])[0].tobytes() != expected[i]:
            wrong.append(i)
callers = [threading.Thread(target=caller, args=(i % 2,)) for i in range(4)]
[c.start() for c in callers]; [c.join() for c in callers]
assert not wrong
print(numba_mla.show_config()["threading_layer"])
"""


@pytest.mark.parametrize("layer", ["tbb", "omp", "workqueue"])
def test_concurrent_callers_on_every_layer(layer):
    assert run(THREADS, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2").split() == [layer]


def test_tbb_is_found_without_a_loader_path():
    script = DECODE + "\nimport numba_mla; print(numba_mla.show_config()['threading_layer'])"
    assert run(script, NUMBA_NUM_THREADS="2", LD_LIBRARY_PATH="").split()[-1] == "tbb"


def test_threads_holds_in_pool_threads_and_only_in_its_context():
    inside = numba_mla.show_config()["threads"]

    def ask(n):
        with numba_mla.threads(n):
            return numba_mla.show_config()["threads"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, [1, 1, 1, 1])) == [1] * 4
    assert numba_mla.show_config()["threads"] == inside
    with numba_mla.threads(1), numba_mla.threads(10_000):
        assert numba_mla.show_config()["threads"] == inside


def test_torch_s_thread_count_is_left_alone():
    """Numba's OpenMP layer and torch may run on the same library, which holds one number for both."""
    script = """
import torch
torch.set_num_threads(3)
import numpy as np, numba_mla
problem = [np.ones((2, 3, 80), np.float32), np.ones((40, 16, 80), np.float32), np.arange(40).reshape(2, 20), [300, 17]]
for n in (1, 2):
    with numba_mla.threads(n):
        numba_mla.decode(*problem, scale=0.2, kv_lora_rank=64)
        assert torch.get_num_threads() == 3
print(torch.get_num_threads())
"""
    assert run(script, NUMBA_THREADING_LAYER="omp", NUMBA_NUM_THREADS="2").split() == ["3"]


def test_two_callers_hold_their_own_thread_counts():
    ready, done, seen = threading.Event(), threading.Event(), []

    def other():
        with numba_mla.threads(1):
            ready.set()
            done.wait()
            seen.append(numba_mla.show_config()["threads"])

    caller = threading.Thread(target=other)
    caller.start()
    ready.wait()
    before = numba_mla.show_config()["threads"]
    done.set()
    caller.join()
    assert seen == [1]
    assert numba_mla.show_config()["threads"] == before


FORK = """
import os, sys, warnings
import numpy as np, numba_mla
from numba_mla.testing.inputs import latent_problem
problem = latent_problem(np.random.default_rng(0), 16, [1500, 40], [1, 6], 16, 64, 16)
w = numba_mla.pack_weight(np.random.default_rng(1).standard_normal((2, 300, 40), dtype=np.float32))
a = np.ones((2, 5, 40), np.float32)
expected = numba_mla.extend(**problem)[0].tobytes(), numba_mla.bmm(a, w).tobytes()
layer = numba_mla.show_config()["threading_layer"]
child = os.fork()
if child == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            got = numba_mla.extend(**problem)[0].tobytes(), numba_mla.bmm(a, w).tobytes()
    ours = [str(c.message) for c in caught if "numba_mla" in str(c.message)]
    os._exit(0 if got == expected and len(ours) == (layer == "omp") else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert numba_mla.extend(**problem)[0].tobytes() == expected[0]
print(layer)
"""


@pytest.mark.parametrize("layer", ["tbb", "omp", "workqueue"])
def test_fork_after_use_on_every_layer(layer):
    """The child gets the same bits; on omp from one thread, with one warning."""
    assert run(FORK, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2").split() == [layer]


@pytest.mark.parametrize(
    "failure",
    [
        "import ctypes; ctypes.CDLL = lambda *a, **k: (_ for _ in ()).throw(OSError('no'))",
        "import importlib.metadata as m; m.files = lambda name: (_ for _ in ()).throw(m.PackageNotFoundError(name))",
        "import importlib.metadata as m; m.files = lambda name: None",
        "import os; del os.getuid",
        "import os; os.replace = lambda *a: (_ for _ in ()).throw(OSError('no'))",
    ],
    ids=["library does not load", "tbb is not installed", "tbb has no files", "no user ids", "no renaming"],
)
def test_platform_calls_that_fail(failure, tmp_path, warm):
    """Each is done without: another threading layer, another folder, no cache."""
    numba_paths = "import numba, llvmlite.binding\n"  # which need ctypes themselves
    folder = str(warm[0]) if "replace" not in failure else str(tmp_path)
    assert run(numba_paths + failure + "\n" + DECODE, NUMBA_MLA_CACHE_DIR=folder) == warm[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_pools_after_use(method):
    expected = [answers(problem) for problem in problems()]
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(answers, problems()) == expected


@pytest.mark.slow
def test_one_signature_per_kernel_whatever_the_arrays(tmp_path):
    """dtypes, layouts and read-only flags of the caller's arrays never reach Numba.

    On an empty cache folder, so that inner kernels are compiled, and counted, too.
    """
    script = """
import ml_dtypes, numpy as np, numba_mla
from numba_mla.kernels import attention, combine, paging, product, schedule, scratch
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    cache = rng.standard_normal((8, 16, 80)).astype(dtype)
    frozen = cache.copy(); frozen.flags.writeable = False
    for kv in (cache, frozen, np.concatenate([cache, cache], axis=2)[..., :80]):
        for lens in ([100], np.array([100], np.int32)):
            q = rng.standard_normal((3, 2, 160)).astype(dtype)[..., 40:120]
            out, lse = numba_mla.extend(q, kv, [[0, 1, 2, 3, 4, 5, 6]], lens, [0, 3], scale=1, kv_lora_rank=64)
            numba_mla.merge_states(out, lse, out[::-1], lse[::-1])
            numba_mla.bmm(q, numba_mla.pack_weight(q))
            numba_mla.gather_cache(kv, None, [3], kv_lora_rank=64, dtype=np.float32)
    numba_mla.write_cache(cache[0, :, :64].copy(), cache[0, :, 64:].copy(), cache, [127])
modules = (attention, combine, paging, product, schedule, scratch)
kernels = {id(v): v for m in modules for v in vars(m).values() if hasattr(v, "signatures")}
counts = {k.py_func.__name__: len(k.signatures) for k in kernels.values()}
assert counts["attention_serial"] + counts["attention_parallel"] >= 1, counts
assert max(counts.values()) == 1, [k.signatures for k in kernels.values() if len(k.signatures) > 1]
"""
    run(script, NUMBA_MLA_CACHE_DIR=str(tmp_path))
