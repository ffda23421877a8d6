"""The same bits for any number of threads, batch, page layout, lane grouping and chunking."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla import Tiling
from numba_mla.testing.inputs import latent_problem

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
HEADS = [1, 3, 16, 17, 128]


def same_bits(a, b):
    """Whether two (out, lse) pairs are equal to the last bit, signs of zero included."""
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def with_pages(problem, block_size, rng):
    """The same rows in pages of another size, in another order."""
    old_size = problem["kv_cache"].shape[1]
    rows = [
        np.stack([problem["kv_cache"][table[p // old_size], p % old_size] for p in range(length)])
        for table, length in zip(problem["block_table"], problem["seq_lens"], strict=True)
    ]
    needed = [-(-len(r) // block_size) for r in rows]
    order = iter(rng.permutation(sum(needed)))
    cache = np.full((sum(needed), block_size, problem["kv_cache"].shape[2]), np.nan, problem["kv_cache"].dtype)
    table = np.full((len(rows), max(needed)), -7, np.int64)
    for request, r in enumerate(rows):
        for page in range(needed[request]):
            table[request, page] = next(order)
            part = r[page * block_size : (page + 1) * block_size]
            cache[table[request, page], : len(part)] = part
    return problem | {"kv_cache": cache, "block_table": table}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", HEADS)
def test_threads_pages_and_batch(isa, rng, num_heads, dtype):
    """Longer than a split, so that work items, and their merging, differ with the threads."""
    problem = latent_problem(rng, num_heads, [2600, 70, 1500], [1, 5, 1], 16, 64, 16, dtype)
    with numba_mla.threads(1):
        expected = numba_mla.extend(**problem)
    for _ in range(3):
        assert same_bits(numba_mla.extend(**problem), expected)
    for block_size in (1, 2, 4, 8, 61, 128):
        assert same_bits(numba_mla.extend(**with_pages(problem, block_size, rng)), expected)
    starts = problem["query_start_loc"]
    for request in range(3):
        tokens = slice(starts[request], starts[request + 1])
        alone = problem | {
            "q": problem["q"][tokens],
            "block_table": problem["block_table"][request : request + 1],
            "seq_lens": problem["seq_lens"][request : request + 1],
            "query_start_loc": [0, tokens.stop - tokens.start],
        }
        assert same_bits(numba_mla.extend(**alone), [x[tokens] for x in expected])


@pytest.mark.parametrize("num_new", [1, 8])
def test_items_of_one_split_and_of_several_merge_alike(vector_isa, rng, num_new):
    """Five splits: in one thread a single item merges them all, in more each item one or two."""
    problem = latent_problem(rng, 128, [4500], [num_new], 16, 64, 16)
    with numba_mla.threads(1):
        expected = numba_mla.extend(**problem)
    assert same_bits(numba_mla.extend(**problem), expected)


@pytest.mark.parametrize("num_splits", [*range(2, 20), 31, 33, 48, 63, 64, 65])
def test_pieces_of_falling_size_merge_as_in_one_thread(rng, num_splits):
    """Any number of splits, which two workers cut into subtrees of many sizes; the last split is not full."""
    tiling = Tiling(key_tile=16, kv_split=16)
    problem = latent_problem(rng, 16, [16 * num_splits - 7, 16 * num_splits], [1, 2], 16, 16, 16)
    with numba_mla.threads(1):
        expected = numba_mla.extend(**problem, tiling=tiling)
    with numba_mla.threads(2):
        assert same_bits(numba_mla.extend(**problem, tiling=tiling), expected)


def test_the_width_of_the_block_table_changes_no_bit(isa, rng):
    """Table widths 1, 2, 3 and 5, in both index types, as slices of a wider table too."""
    problem = latent_problem(rng, 3, [15, 9], [2, 1], 16, 64, 16)
    expected = numba_mla.extend(**problem)
    table = problem["block_table"][:, :1]
    for width in (1, 2, 3, 5):
        for dtype in (np.int32, np.int64):
            wide = np.full((2, 9), 2147480000, dtype)
            wide[:, :1] = table
            for view in (wide[:, :width], wide[:, :width].copy()):
                assert same_bits(numba_mla.extend(**(problem | {"block_table": view})), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("prefix", [0, 1, 5, 1020])
def test_one_extend_is_n_decodes_and_any_chunks(isa, rng, num_heads, prefix, dtype):
    num_new = 9
    problem = latent_problem(rng, num_heads, [prefix + num_new], [num_new], 16, 64, 16, dtype)
    expected = numba_mla.extend(**problem)
    q, shared = (
        problem["q"],
        {key: problem[key] for key in ("kv_cache", "block_table", "scale", "kv_lora_rank")},
    )
    for i in range(num_new):
        one = numba_mla.decode(q[i : i + 1], seq_lens=[prefix + i + 1], **shared)
        assert same_bits(one, [x[i : i + 1] for x in expected])
    for first, last in ((0, 4), (4, 9)):
        chunk = numba_mla.extend(q[first:last], seq_lens=[prefix + last], query_start_loc=[0, last - first], **shared)
        assert same_bits(chunk, [x[first:last] for x in expected])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bmm_rows_do_not_depend_on_each_other(isa, rng, dtype):
    a = rng.standard_normal((2, 150, 700)).astype(dtype)
    w = numba_mla.pack_weight(rng.standard_normal((2, 130, 700)).astype(dtype))
    with numba_mla.threads(1):
        expected = numba_mla.bmm(a, w)
    assert numba_mla.bmm(a, w).tobytes() == expected.tobytes()
    for rows in (slice(0, 1), slice(3, 10), slice(127, 150)):
        assert numba_mla.bmm(a[:, rows], w).tobytes() == np.ascontiguousarray(expected[:, rows]).tobytes()


SCRIPT = """
import hashlib, sys
import numpy as np, numba_mla
from numba_mla.testing.inputs import latent_problem
digest = hashlib.sha256()
for heads in (3, 16):
    problem = latent_problem(np.random.default_rng(1), heads, [3000, 80], [1, 8], 16, 64, 16)
    for n in (1, 2, 4):
        with numba_mla.threads(n):
            results = {b"".join(x.tobytes() for x in numba_mla.extend(**problem)) for _ in range(20)}
        assert len(results) == 1, f"{n} threads differ between runs"
        digest.update(results.pop())
        first = digest.copy() if n == 1 else first
    print(numba_mla.show_config()["threading_layer"], digest.hexdigest())
"""


@pytest.mark.parametrize("layer", ["tbb", "omp", "workqueue"])
def test_every_threading_layer_with_more_threads_than_cores(layer):
    """1, 2 and 4 threads, 20 runs each, on each of Numba's layers: the same bits."""

    def run(layer, num_threads):
        environment = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": str(num_threads)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    four, one = run(layer, 4), run(layer, 1)
    assert [name for name, _ in four] == [layer, layer]
    assert [digest for _, digest in four] == [digest for _, digest in one]
