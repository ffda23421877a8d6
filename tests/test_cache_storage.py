"""The cache's memory: fp8 and 656-byte rows, arrays and files to keep them in, saving, loading, stale batches."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from numba_mla import ops, reference
from numba_mla.batch import Batch
from numba_mla.cache import PagedLatentCache
from numba_mla.config import MLAConfig
from numba_mla.safetensors_file import CheckpointError, SafetensorsFile, save_whole

CONFIG = MLAConfig(
    hidden_size=32,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=6,
    qk_nope_head_dim=8,
    qk_rope_head_dim=2,
    v_head_dim=8,
    rope_scaling={"rope_type": "linear", "factor": 4.0},
)
WIDE = replace(CONFIG, kv_lora_rank=512, qk_rope_head_dim=64)
E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
FORMATS = {
    "float32": (CONFIG, {"dtype": np.float32}, 8 * 4),
    "bfloat16": (CONFIG, {}, 8 * 2),
    "e4m3fn": (CONFIG, {"dtype": E4M3}, 8),
    "e4m3fn-scaled": (CONFIG, {"dtype": E4M3, "cache_scale": 0.25}, 8),
    "e5m2": (CONFIG, {"dtype": E5M2, "cache_scale": 2.0}, 8),
    "fp8_ds_mla": (WIDE, {"layout": "fp8_ds_mla"}, 656),
}


def make_cache(name="float32", num_blocks=6, block_size=4, **options):
    config, own_options, _ = FORMATS[name]
    return PagedLatentCache(config, num_blocks, block_size, **(own_options | options))


def fill(cache, request_id, prompt):
    """Add a request, write its tokens as a layer would, and commit."""
    done = cache.add(request_id, prompt)
    batch = cache.append({request_id: len(prompt) - done})
    c = cache.config
    generator = np.random.default_rng(len(prompt))
    rows = generator.standard_normal((len(prompt), c.cache_row_width)).astype(np.float32)[done:]
    if cache.data.dtype in (np.float32, BF16):
        rows = rows.astype(cache.dtype)
    for layer in cache.data:
        ops.write_cache(
            rows[:, : c.kv_lora_rank],
            rows[:, c.kv_lora_rank :],
            layer,
            batch.slot_mapping,
            cache_scale=cache.cache_scale,
        )
    cache.commit(batch)
    return rows


def gather(cache, request_id, layer=0):
    batch = cache.append({request_id: 0})
    kv_c, k_pe, _ = reference.gather_cache(
        cache.data[layer],
        batch.block_table,
        batch.seq_lens,
        kv_lora_rank=cache.config.kv_lora_rank,
        cache_scale=cache.cache_scale,
    )
    return np.concatenate([kv_c, k_pe], axis=-1)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_one_row_per_token_for_all_heads(name):
    _, _, row_bytes = FORMATS[name]
    cache = make_cache(name, num_blocks=5, block_size=3, num_layers=2)
    assert cache.nbytes == cache.data.nbytes == 2 * 5 * 3 * row_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back_as_their_format_holds_them(name):
    cache = make_cache(name)
    rows = fill(cache, "a", list(range(10)))
    # Half a unit in the last place of the format, at the largest value of a block of 128 for fp8_ds_mla.
    unit = {"float32": 0, "bfloat16": 0, "e5m2": 2**-3}.get(name, 2**-4)
    smallest = {"e4m3fn": 2**-10, "e4m3fn-scaled": 2**-12, "e5m2": 2**-16}.get(name, 2**-10)
    error = abs(gather(cache, "a") - rows)
    assert (error <= unit * abs(rows) + (smallest if unit else 0)).all()
    assert (error.max() > 0) == (unit > 0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["array", "memmap", "path"])
def test_storage_is_where_the_rows_are(name, kind, tmp_path):
    path = tmp_path / "rows"
    like = make_cache(name, num_layers=2).data
    storage = {
        "array": lambda: np.zeros_like(like),
        "memmap": lambda: np.memmap(path, like.dtype, mode="w+", shape=like.shape),
        "path": lambda: path,
    }[kind]()
    cache = make_cache(name, num_layers=2, storage=storage)
    fill(cache, "a", list(range(9)))
    in_memory = make_cache(name, num_layers=2)
    fill(in_memory, "a", list(range(9)))
    if kind == "array":
        stored = storage.tobytes()
    else:
        cache.data.flush()
        stored = path.read_bytes()
    assert stored == cache.data.tobytes() == in_memory.data.tobytes()


def test_a_file_keeps_its_bytes_and_must_have_the_right_number(tmp_path):
    path = tmp_path / "rows"
    fill(make_cache(storage=str(path)), "a", list(range(9)))
    before = path.read_bytes()
    assert make_cache(storage=path).data.tobytes() == before
    with pytest.raises(ValueError, match=r"storage: .*rows: expected a file of 896 bytes, it has 768"):
        make_cache(num_blocks=7, storage=path)
    assert path.read_bytes() == before


def test_rows_beyond_2_to_the_31_elements(tmp_path):
    """A sparse file of 4.3 GB: what lies at its end is as what lies at its beginning."""
    num_blocks = 233_020
    near = PagedLatentCache(WIDE, 2, 16)
    far = PagedLatentCache(WIDE, num_blocks, 16, storage=tmp_path / "rows")
    assert far.data.size > 2**31
    far.add("filler")
    far.append({"filler": (num_blocks - 2) * 16})
    for cache in (near, far):
        fill(cache, "a", list(range(20)))
    assert far.append({"a": 0}).block_table.tolist() == [[num_blocks - 2, num_blocks - 1]]
    assert gather(far, "a").tobytes() == gather(near, "a").tobytes()
    assert far.data[0, -2:].tobytes() == near.data.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_a_loaded_cache_goes_on_where_the_saved_one_was(name, tmp_path):
    cache = make_cache(name, num_blocks=10, num_layers=2)
    fill(cache, "a", list(range(9)))
    fill(cache, 7, list(range(5)))
    cache.fork("a", "b")
    fill(cache, "gone", [50, 60, 70, 80, 90])
    cache.free("gone")
    cache.save(tmp_path / "saved")
    loaded = PagedLatentCache.load(tmp_path / "saved")
    assert loaded.config == cache.config
    assert (loaded.layout, loaded.cache_scale, loaded.dtype) == (cache.layout, cache.cache_scale, cache.dtype)
    assert loaded.request_ids == ("a", 7, "b")
    for request_id in ("a", 7, "b"):
        for layer in range(2):
            assert gather(loaded, request_id, layer).tobytes() == gather(cache, request_id, layer).tobytes()
    for one in (cache, loaded):
        assert one.add("new", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
        assert one.add("back", [50, 60, 70, 80, 90]) == 4
    steps = [one.append({"b": 1, "a": 2, "new": 2}) for one in (cache, loaded)]
    assert steps[0].block_table.tolist() == steps[1].block_table.tolist()
    assert steps[0].slot_mapping.tolist() == steps[1].slot_mapping.tolist()
    assert cache.num_free_blocks == loaded.num_free_blocks


def test_only_pages_up_to_the_last_in_use_are_saved(tmp_path):
    cache = make_cache(num_blocks=1000, num_layers=2)
    fill(cache, "a", list(range(9)))
    cache.save(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size < 2 * 3 * 4 * 32 + 12000
    assert PagedLatentCache.load(tmp_path / "saved").num_blocks == 1000
    empty = make_cache()
    empty.save(tmp_path / "empty")
    assert PagedLatentCache.load(tmp_path / "empty").num_free_blocks == 6


def test_a_cache_is_loaded_into_given_storage(tmp_path):
    cache = make_cache()
    fill(cache, "a", list(range(9)))
    cache.save(tmp_path / "saved")
    loaded = PagedLatentCache.load(str(tmp_path / "saved"), storage=tmp_path / "rows")
    loaded.data.flush()
    assert (tmp_path / "rows").read_bytes() == cache.data.tobytes()


def test_names_that_no_file_can_hold_are_refused(tmp_path):
    cache = make_cache()
    cache.add(("a", 1))
    with pytest.raises(TypeError, match=r"request_id: expected strings and integers to save, got \('a', 1\)"):
        cache.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import numba_mla.safetensors_file as target
from numba_mla.cache import PagedLatentCache

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(tensors, path, **options):
    original(tensors, path, **options)
    os.truncate(path, Path(path).stat().st_size // 2)
    die()

original = target.save_file
cache = PagedLatentCache.load(sys.argv[1])
cache.free("a")
cache.data[...] = 0
if sys.argv[2] == "half-written":
    target.save_file = write_half
elif sys.argv[2] == "unsynced":
    os.fsync = die
else:
    os.replace = os.rename = Path.replace = die
cache.save(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize("moment", ["half-written", "unsynced", "unrenamed"])
def test_a_killed_save_leaves_the_old_file_whole(moment, tmp_path):
    cache = make_cache()
    fill(cache, "a", list(range(9)))
    path = tmp_path / "saved"
    cache.save(path)
    before = path.read_bytes()
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(path), moment]
    assert subprocess.run(code, capture_output=True, timeout=60).returncode == -9
    assert path.read_bytes() == before
    assert gather(PagedLatentCache.load(path), "a").tobytes() == gather(cache, "a").tobytes()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"nowhere.saved cannot be written: .*No such file"):
        make_cache().save(tmp_path / "nowhere" / "saved")


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    cache = make_cache()
    fill(cache, "a", list(range(9)))
    cache.save(tmp_path / "saved")
    before = (tmp_path / "saved").read_bytes()

    def fail(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        cache.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved").read_bytes() == before


@pytest.fixture
def saved(tmp_path):
    cache = make_cache()
    fill(cache, "a", list(range(9)))
    cache.save(tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(path, changes):
    """Change what the file says of the cache, and nothing else."""
    file = SafetensorsFile(path)
    tensors = {name: np.array(file.tensor(name)) for name in file.names}
    state = json.loads(tensors["state"].tobytes()) | changes
    tensors["state"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_whole(tensors, path, file.metadata)


@pytest.mark.parametrize("kept", [0, 7, 100, -1, -500])
def test_a_truncated_file_is_refused(kept, saved):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"saved: .*(truncated|bad header)"):
        PagedLatentCache.load(saved)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "other"
    save_whole({"state": np.zeros(3, np.uint8)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="other: not a saved cache: its format is 'pt'"):
        PagedLatentCache.load(path)
    path.write_text("{}" * 100)
    with pytest.raises(CheckpointError, match="other: bad header"):
        PagedLatentCache.load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        PagedLatentCache.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": [["a", [9, [0, 1], []]]]},  # pages that do not match the length
        {"requests": [["a", [9, [0, 1, 6], []]]]},  # no such page
        {"requests": [["a", [9, [0, 1, 3], []]]]},  # a page that is free as well
        {"requests": [["a", [9, [0, 1, 2], []]], ["a", [0, [], []]]]},  # a name twice
        {"requests": [["a", [9, [0, 1, 2], ["zz"]]]]},
        {"requests": [["a", [-1, [], []]]]},
        {"requests": 3},
        {"free": [3, 4]},
        {"free": [3, 4, 5, 5]},
        {"free": [3, 4, "5"]},
        {"keys": [[7, "00"]]},
        {"keys": [[0, "00"], [1, "00"]]},
        {"num_blocks": 2},
        {"block_size": 8},
        {"layout": "656"},
        {"cache_scale": 1.0},
        {"config": {}},
        {"config": None},
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(changes, saved):
    rewrite(saved, {})
    PagedLatentCache.load(saved)
    rewrite(saved, changes)
    with pytest.raises(CheckpointError, match="saved: cannot be loaded: "):
        PagedLatentCache.load(saved)


# Stale batches


def start(cache):
    cache.add("a")
    cache.add("b")
    return cache.append({"a": 5, "b": 3})


def truncate_and_rewrite(cache):
    cache.truncate("a", 4)
    cache.append({"a": 1})


def free_and_add(cache):
    cache.free("a")
    cache.add("a")
    cache.append({"a": 5})


@pytest.mark.parametrize(
    "change",
    [lambda cache: cache.free("a"), lambda cache: cache.truncate("a", 4), free_and_add, truncate_and_rewrite],
    ids=["free", "truncate", "free-and-add", "truncate-and-rewrite"],
)
def test_a_batch_from_before_a_request_was_cut_back_is_refused(change):
    cache = make_cache()
    batch = start(cache)
    cache.check_batch(batch)
    change(cache)
    for use in (cache.check_batch, cache.commit):
        with pytest.raises(ValueError, match="batch: request 'a' has been freed, truncated or added again"):
            use(batch)


def test_a_batch_of_another_cache_is_refused():
    cache, other = make_cache(), make_cache()
    batch = start(cache)
    start(other)
    for use in (other.check_batch, other.commit):
        with pytest.raises(ValueError, match="or the batch is another cache's"):
            use(batch)
    own_fields = (batch.request_ids, batch.positions, batch.query_start_loc)
    made_by_hand = Batch(*own_fields, batch.seq_lens, batch.block_table, batch.slot_mapping)
    with pytest.raises(ValueError, match="batch: expected one from this cache's append"):
        cache.check_batch(made_by_hand)


def test_a_batch_whose_page_has_been_copied_since_is_refused_where_it_would_be_written():
    cache = make_cache()
    batch = start(cache)
    cache.fork("a", "c")
    cache.append({"a": 1})
    with pytest.raises(ValueError, match="batch: request 'a' has moved to a copy of a page"):
        cache.check_batch(batch)
    cache.commit(batch)


def test_a_committed_batch_is_refused():
    cache = make_cache()
    batch = start(cache)
    other = cache.append({"b": 1})
    cache.check_batch(batch)
    cache.check_batch(batch)  # a step's layers, one after another
    cache.commit(batch)
    for use in (cache.check_batch, cache.commit):
        with pytest.raises(ValueError, match="batch: has been committed"):
            use(batch)
    cache.check_batch(other)
    cache.commit(other)


def test_batches_stay_good_while_requests_only_grow():
    cache = make_cache()
    batch = start(cache)
    cache.append({"a": 6, "b": 1})
    cache.truncate("b", 4)  # drops nothing
    cache.fork("b", "c")
    cache.check_batch(batch)
    cache.commit(batch)
    cache.check_batch(cache.append({}))
    cache.check_batch(cache.append({"c": 0}))
