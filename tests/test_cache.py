"""The paged latent cache: pages, batches, sharing, and refusals that change nothing."""

import copy
import dataclasses

import ml_dtypes
import numpy as np
import pytest

from numba_mla.cache import Batch, CacheFullError, PagedLatentCache
from numba_mla.config import MLAConfig

CONFIG = MLAConfig(
    hidden_size=32,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=6,
    qk_nope_head_dim=8,
    qk_rope_head_dim=2,
    v_head_dim=8,
)


def make_cache(num_blocks=8, block_size=4, **options):
    options = {"config": CONFIG, "dtype": np.float32} | options
    return PagedLatentCache(num_blocks=num_blocks, block_size=block_size, **options)


def write(cache, batch, values):
    """Write each new token's value into its row, in every layer, as a layer would."""
    page, row = np.divmod(batch.slot_mapping, cache.block_size)
    cache.data[:, page, row] = np.asarray(values, dtype=np.float32)[:, None]


def read(cache, batch, index, layer=0):
    """Return the values of a request's tokens, found through its block table."""
    rows = cache.data[layer][batch.block_table[index]].reshape(-1, cache.data.shape[-1])
    return rows[: batch.seq_lens[index], 0].tolist()


def snapshot(cache):
    """Everything that a refusal must leave alone."""
    lives = [request.life for request in cache._requests.values()]
    return copy.deepcopy((cache._requests, vars(cache._pool))), lives, cache.data.tobytes()


def test_a_ragged_batch_is_described():
    cache = make_cache()
    for request_id in ("a", "b", "c"):
        assert cache.add(request_id) == 0
    cache.append({"b": 3})
    batch = cache.append({"a": 5, "b": 3, "c": 0})
    assert batch.request_ids == ("a", "b", "c")
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert batch.query_start_loc.tolist() == [0, 5, 8, 8]
    assert batch.seq_lens.tolist() == [5, 6, 0]
    assert batch.block_table.tolist() == [[1, 2], [0, 3], [-1, -1]]
    assert batch.slot_mapping.tolist() == [4, 5, 6, 7, 8, 3, 12, 13]
    assert (batch.positions.dtype, batch.slot_mapping.dtype) == (np.int64, np.int64)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == batch.block_table.dtype == np.int32
    assert cache.seq_len("b") == 6
    assert cache.request_ids == ("a", "b", "c")


def test_a_cache_shows_its_format_and_how_full_it_is():
    cache = make_cache(num_layers=2)
    cache.add("a")
    cache.append({"a": 9})
    assert repr(cache) == "<PagedLatentCache: float32, num_layers 2, block_size 4, pages: 3 used, 5 free>"
    wide = dataclasses.replace(CONFIG, kv_lora_rank=512, qk_rope_head_dim=64)
    assert repr(make_cache(config=wide, layout="fp8_ds_mla", dtype=np.uint8)).startswith(
        "<PagedLatentCache: fp8_ds_mla,"
    )


def test_a_batch_is_frozen():
    cache = make_cache()
    cache.add("a")
    batch = cache.append({"a": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.positions = None
    for field in dataclasses.fields(Batch):
        values = getattr(batch, field.name)
        if isinstance(values, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                values[...] = 0
        else:
            assert isinstance(values, tuple)


def test_an_empty_batch():
    batch = make_cache().append({})
    assert batch.query_start_loc.tolist() == [0]
    assert len(batch.positions) == len(batch.seq_lens) == len(batch.block_table) == 0


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_the_size_is_one_row_per_token_whatever_the_heads(block_size):
    cache = make_cache(5, block_size, num_layers=3, dtype=ml_dtypes.bfloat16)
    assert cache.data.shape == (3, 5, block_size, 8)
    assert cache.nbytes == 3 * 5 * block_size * 8 * 2
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (3, 5, block_size)
    assert cache.dtype == ml_dtypes.bfloat16


def test_a_full_cache_refuses_before_anything_changes():
    cache = make_cache(num_blocks=3)
    for request_id in ("a", "b"):
        cache.add(request_id)
    cache.append({"a": 5})
    before = snapshot(cache)
    with pytest.raises(CacheFullError, match=r"8 new tokens need 2 pages, 1 of 3 are free"):
        cache.append({"a": 3, "b": 5})
    assert snapshot(cache) == before
    assert cache.append({"a": 3, "b": 4}).block_table.tolist() == [[0, 1], [2, -1]]
    with pytest.raises(CacheFullError):
        cache.append({"b": 1})


def test_freed_pages_serve_again():
    cache = make_cache(num_blocks=2)
    for _ in range(5):
        cache.add("a")
        assert cache.append({"a": 8}).slot_mapping.tolist() == list(range(8))
        assert cache.num_free_blocks == 0
        cache.free("a")
        assert cache.num_free_blocks == 2


def test_truncated_tokens_give_back_pages_and_are_rewritten():
    cache = make_cache(num_blocks=3)
    cache.add("a")
    write(cache, cache.append({"a": 10}), range(10))
    cache.truncate("a", 6)
    assert (cache.seq_len("a"), cache.num_free_blocks) == (6, 1)
    batch = cache.append({"a": 3})
    write(cache, batch, [60, 70, 80])
    assert batch.positions.tolist() == [6, 7, 8]
    assert read(cache, batch, 0) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    cache.truncate("a", 0)
    assert cache.num_free_blocks == 3


def test_a_fork_shares_pages_until_either_writes():
    cache = make_cache(num_layers=2)
    cache.add("a")
    write(cache, cache.append({"a": 6}), range(6))
    cache.fork("a", "b")
    assert cache.num_free_blocks == 6
    batch = cache.append({"a": 1, "b": 3})
    write(cache, batch, [100, 200, 201, 202])
    for layer in range(2):
        assert read(cache, batch, 0, layer) == [0, 1, 2, 3, 4, 5, 100]
        assert read(cache, batch, 1, layer) == [0, 1, 2, 3, 4, 5, 200, 201, 202]
    first_pages = batch.block_table[:, 0]
    assert first_pages[0] == first_pages[1]
    cache.free("a")
    assert read(cache, cache.append({"b": 0}), 0) == [0, 1, 2, 3, 4, 5, 200, 201, 202]


def test_the_last_holder_of_a_shared_page_needs_no_copy():
    cache = make_cache(num_blocks=2)
    cache.add("a")
    write(cache, cache.append({"a": 2}), [0, 1])
    cache.fork("a", "b")
    batch = cache.append({"a": 1, "b": 1})
    write(cache, batch, [10, 20])
    assert (read(cache, batch, 0), read(cache, batch, 1)) == ([0, 1, 10], [0, 1, 20])
    cache.fork("a", "c")
    before = snapshot(cache)
    with pytest.raises(CacheFullError, match="need 1 pages, 0 of 2"):
        cache.append({"a": 1, "c": 1})
    assert snapshot(cache) == before


def test_committed_prompt_pages_are_reused_and_uncommitted_are_not():
    cache = make_cache()
    prompt = list(range(50, 60))
    cache.add("a", prompt)
    batch = cache.append({"a": 10})
    write(cache, batch, prompt)
    assert cache.add("too-early", prompt) == 0
    cache.commit(batch)
    assert cache.add("b", prompt) == 8
    rest = cache.append({"b": 2})
    write(cache, rest, prompt[8:])
    assert rest.positions.tolist() == [8, 9]
    assert read(cache, rest, 0) == prompt
    assert rest.block_table[0, :2].tolist() == batch.block_table[0, :2].tolist()
    assert rest.block_table[0, 2] != batch.block_table[0, 2]


@pytest.mark.parametrize(("prompt_len", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 8)])
def test_the_last_prompt_token_is_never_cached(prompt_len, cached):
    cache = make_cache()
    cache.add("a", range(9))
    cache.commit(cache.append({"a": 9}))
    assert cache.add("b", range(prompt_len)) == cached


def test_reuse_stops_at_the_first_difference():
    cache = make_cache()
    cache.add("a", range(12))
    cache.commit(cache.append({"a": 12}))
    assert cache.add("b", [0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12]) == 4
    assert cache.add("c", [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]) == 0


def test_equal_pages_after_different_beginnings_are_not_shared():
    """A row depends on all tokens up to it, not just on its page's."""
    cache = make_cache()
    for name, prompt in [("a", [11, 12, 13, 14, 5, 6, 7, 8]), ("b", [1, 2, 3, 4])]:
        cache.add(name, prompt)
        cache.commit(cache.append({name: len(prompt)}))
    assert cache.add("c", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_freed_committed_pages_are_reused_until_taken_and_taken_last():
    cache = make_cache(num_blocks=4)
    cache.add("a", range(9))
    cache.commit(cache.append({"a": 9}))
    cache.free("a")
    assert cache.num_free_blocks == 4
    cache.add("b")
    cache.append({"b": 8})  # takes the two pages without committed content
    assert cache.add("c", range(9)) == 8
    assert cache.num_free_blocks == 0
    cache.free("c")
    cache.append({"b": 4})  # takes the later of the two prompt pages
    assert cache.add("d", range(9)) == 4


def test_rewriting_a_committed_page_withdraws_it():
    cache = make_cache()
    cache.add("a", range(8))
    batch = cache.append({"a": 8})
    write(cache, batch, range(8))
    cache.commit(batch)
    cache.truncate("a", 6)
    batch = cache.append({"a": 2})
    write(cache, batch, [60, 70])
    cache.commit(batch)
    assert cache.add("b", range(9)) == 4
    assert read(cache, cache.append({"b": 0}), 0) == [0, 1, 2, 3]


def test_a_reused_page_survives_its_first_owner_rewriting_it():
    cache = make_cache()
    cache.add("a", range(8))
    batch = cache.append({"a": 8})
    write(cache, batch, range(8))
    cache.commit(batch)
    assert cache.add("b", range(9)) == 8
    cache.truncate("a", 2)
    write(cache, cache.append({"a": 1}), [99])
    assert read(cache, cache.append({"b": 0}), 0) == list(range(8))


def test_a_fork_of_half_a_prompt_does_not_vouch_for_the_rest():
    cache = make_cache()
    cache.add("a", range(8))
    write(cache, cache.append({"a": 5}), range(5))
    cache.fork("a", "b")
    batch = cache.append({"b": 3})
    write(cache, batch, [50, 60, 70])
    cache.commit(batch)
    assert cache.add("c", range(9)) == 4


def test_storage_may_be_a_memmap(tmp_path):
    storage = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(1, 2, 4, 8))
    cache = make_cache(2, storage=storage)
    cache.add("a")
    write(cache, cache.append({"a": 2}), [5, 6])
    storage.flush()
    assert np.fromfile(tmp_path / "rows", np.float32)[[0, 8]].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": {}}, TypeError, "config: expected an MLAConfig, got dict"),
        ({"num_blocks": 0}, ValueError, "num_blocks: .*0"),
        ({"num_blocks": 2.0}, TypeError, r"num_blocks: .*2\.0"),
        ({"block_size": -1}, ValueError, "block_size: .*-1"),
        ({"block_size": True}, TypeError, "block_size: .*True"),
        ({"num_layers": 0}, ValueError, "num_layers: .*0"),
        ({"dtype": np.float64}, TypeError, "dtype: .*float64"),
        ({"dtype": "bf17"}, TypeError, "dtype: expected float32.*float8_e5m2, got 'bf17'"),
        ({"dtype": np.uint8}, TypeError, "dtype: .*uint8"),
        ({"dtype": ml_dtypes.float8_e5m2, "cache_scale": 0.0}, ValueError, r"cache_scale: .*0\.0"),
        ({"dtype": ml_dtypes.float8_e5m2, "cache_scale": "1"}, TypeError, "cache_scale: .*'1'"),
        ({"layout": "656", "dtype": np.uint8}, ValueError, "layout: expected None .*'fp8_ds_mla', got '656'"),
        ({"layout": "fp8_ds_mla", "dtype": np.uint8}, ValueError, "layout: .*512 .*64, got 6 and 2"),
        ({"layout": "fp8_ds_mla", "dtype": np.float16}, TypeError, "dtype: .*float16"),
        ({"cache_scale": 0.5}, ValueError, r"cache_scale: .*0\.5"),
        ({"storage": [0.0]}, TypeError, "storage: .*list"),
        ({"storage": np.zeros((1, 8, 4, 8))}, TypeError, "storage: .*float64"),
        ({"storage": np.zeros((1, 8, 4, 9), np.float32)}, ValueError, r"storage: .*\(1, 8, 4, 9\)"),
        ({"storage": np.zeros((1, 8, 4, 16), np.float32)[..., ::2]}, ValueError, "storage: .*contiguous"),
        ({"storage": np.broadcast_to(np.float32(0), (1, 8, 4, 8))}, ValueError, "storage: .*writable"),
    ],
)
def test_wrong_construction_names_the_argument(options, error, message):
    with pytest.raises(error, match=message):
        make_cache(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda cache: cache.add("a"), ValueError, "request_id: 'a' is already"),
        (lambda cache: cache.add("b", [[1]]), ValueError, r"prompt_ids: .*\(1, 1\)"),
        (lambda cache: cache.add("b", [1.5]), TypeError, "prompt_ids: .*float64"),
        (lambda cache: cache.fork("b", "c"), ValueError, "request_id: 'b' is not"),
        (lambda cache: cache.fork("a", "a"), ValueError, "request_id: 'a' is already"),
        (lambda cache: cache.free("b"), ValueError, "request_id: 'b' is not"),
        (lambda cache: cache.truncate("b", 0), ValueError, "request_id: 'b' is not"),
        (lambda cache: cache.truncate("a", 6), ValueError, "n: .*holds 5 tokens, got 6"),
        (lambda cache: cache.truncate("a", -1), ValueError, "n: .*-1"),
        (lambda cache: cache.append({"a": 1, "b": 1}), ValueError, "request_id: 'b' is not"),
        (lambda cache: cache.append({"a": -1}), ValueError, r"num_new_tokens\['a'\]: .*-1"),
        (lambda cache: cache.append({"a": 1.0}), TypeError, r"num_new_tokens\['a'\]: .*1\.0"),
        (lambda cache: cache.append([("a", 1)]), TypeError, "num_new_tokens: .*list"),
        (lambda cache: cache.add(["a"]), TypeError, "request_id: expected a hashable name, got list"),
        (lambda cache: cache.free({}), TypeError, "request_id: expected a hashable name, got dict"),
        (lambda cache: cache.commit({"a": 1}), TypeError, "batch: .*dict"),
        (lambda cache: cache.seq_len("b"), ValueError, "request_id: 'b' is not"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(call, error, message):
    cache = make_cache()
    cache.add("a")
    cache.append({"a": 5})
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert snapshot(cache) == before


def test_a_step_offers_only_what_it_has_written():
    cache = make_cache()
    cache.add("a", range(8))
    first = cache.append({"a": 4})
    second = cache.append({"a": 4})
    cache.commit(first)
    assert cache.add("b", range(9)) == 4
    cache.commit(second)
    assert cache.add("c", range(9)) == 8


def test_a_step_of_a_freed_request_is_not_committed():
    cache = make_cache()
    cache.add("a", range(8))
    batch = cache.append({"a": 8})
    cache.free("a")
    with pytest.raises(ValueError, match="batch: request 'a' has been freed"):
        cache.commit(batch)
