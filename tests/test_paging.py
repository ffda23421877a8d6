"""write_cache, gather_cache and expand_block_table."""

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla import reference

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (7, 3), (16, 0)])
def test_write_then_gather(rng, dtype, rank, rope):
    cache = rng.standard_normal((5, 4, rank + rope)).astype(dtype)
    kv_c, k_pe = rng.standard_normal((9, rank)).astype(dtype), rng.standard_normal((9, rope)).astype(dtype)
    slots = [8, 9, 10, 11, 0, 1, 2, 3, 17]
    expected = cache.copy()
    reference.write_cache(kv_c, k_pe, expected, slots)
    assert numba_mla.write_cache(kv_c, k_pe, cache, slots) is None
    np.testing.assert_array_equal(cache, expected)
    got_c, got_pe, starts = numba_mla.gather_cache(cache, [[2, 0], [4, 3]], [8, 2], kv_lora_rank=rank, starts=[0, 1])
    assert got_c.tobytes() == kv_c.tobytes()
    assert got_pe.tobytes() == k_pe.tobytes()
    assert starts.tolist() == [0, 8, 9]


def test_padding_slots_write_nothing():
    """Slots [-1, 5, -1] and more keys than slots: only slot 5 changes, no slot before or after the cache.

    Floor division of -1 would land on the last real slot, or on the one before the first.
    """
    memory = np.zeros((8, 4, 3), np.float32)
    cache = memory[3:5]
    numba_mla.write_cache(np.ones((5, 2), np.float32), np.ones((5, 1), np.float32), cache, [-1, 5, -1])
    assert np.flatnonzero(memory.any(axis=-1)).tolist() == [12 + 5]
    numba_mla.write_cache(np.ones((1, 2), np.float32), np.ones((1, 1), np.float32), cache, [-9], pad_slot_id=-9)
    assert np.flatnonzero(memory.any(axis=-1)).tolist() == [12 + 5]


def test_views_as_sources_and_bits_as_they_are(rng):
    raw = rng.integers(0, 2**16, (6, 10), dtype=np.uint16).view(ml_dtypes.bfloat16)  # NaN payloads among them
    cache = np.zeros((2, 4, 7), ml_dtypes.bfloat16)
    numba_mla.write_cache(raw[:, 2:7], raw[::-1, None, 7:9], cache, np.arange(6, dtype=np.int32))
    flat = cache.reshape(8, 7).view(np.uint16)
    np.testing.assert_array_equal(flat[:6, :5], raw[:, 2:7].view(np.uint16))
    np.testing.assert_array_equal(flat[:6, 5:], raw[::-1, 7:9].view(np.uint16))
    gathered = numba_mla.gather_cache(cache, [[0, 1]], [6], kv_lora_rank=5)
    np.testing.assert_array_equal(gathered[0].view(np.uint16), flat[:6, :5])


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_gather_converts(rng, source, target):
    cache = (rng.standard_normal((3, 4, 9)) * 10.0 ** rng.integers(-9, 5, (3, 4, 9))).astype(source)
    out = np.full((12, 6), 7, target), np.full((12, 6), 7, target)[:, ::2]
    kv_c, k_pe, _ = numba_mla.gather_cache(cache, [[1], [2]], [4, 3], kv_lora_rank=6, dtype=target, out=out)
    rows = np.concatenate([cache[1], cache[2, :3]])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kv_c, rows[:, :6].astype(np.float32).astype(target))
        np.testing.assert_array_equal(k_pe, rows[:, 6:].astype(np.float32).astype(target))
    assert (out[0][7:] == 7).all()


def test_unused_entries_of_the_table_are_not_looked_at():
    cache = np.zeros((2, 4, 3), np.float32)
    kv_c, _, starts = numba_mla.gather_cache(cache, [[1, 2147480000], [-5, 9]], [4, 0], kv_lora_rank=2)
    assert kv_c.shape == (4, 2)
    assert starts.tolist() == [0, 4, 4]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_expand_block_table(dtype):
    table = np.array([[2, 0, -1], [1, -1, -1]], dtype)
    slots = numba_mla.expand_block_table(table, 3)
    assert slots.dtype == dtype
    assert slots.tolist() == [[6, 7, 8, 0, 1, 2, -1, -1, -1], [3, 4, 5, -1, -1, -1, -1, -1, -1]]
    np.testing.assert_array_equal(slots, reference.expand_block_table(table, 3))
    assert numba_mla.expand_block_table(table[:0], 3).shape == (0, 9)


def test_expand_refuses_overflow():
    with pytest.raises(ValueError, match="block_table: expected slots within int32"):
        numba_mla.expand_block_table(np.array([[2**31 // 64]], np.int32), 64)
    assert numba_mla.expand_block_table(np.array([[2**31 // 64 - 1]], np.int32), 64)[0, -1] == 2**31 - 1
    assert numba_mla.expand_block_table([[2**31 // 64]], 64)[0, 0] == 2**31
