"""MLALayer: dtypes, batches and caches it works on, results it keeps apart, calls it refuses."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from hf_oracle import NUMPY_DTYPES, PROMPTS, SPLITS, YARN, SavedModels, hidden_states_of, largest_error, run_split

from numba_mla.cache import PagedLatentCache
from numba_mla.checkpoint import CheckpointError, attention_shapes, save_checkpoint
from numba_mla.config import MLAConfig
from numba_mla.layer import MLALayer

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
CASES = {
    "v2-bias": (V2, {"attention_bias": True}),
    "v3": (V3, {}),
    "v3-yarn": (V3, {"rope_parameters": YARN | {"mscale_all_dim": 0.707}}),
}


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """Return a function that saves a small random model of a case once per dtype and shard size."""
    return SavedModels(CASES, tmp_path_factory.mktemp)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_how_tokens_are_split_and_batched_changes_no_bit(dtype, checkpoint_folder):
    layer = MLALayer.from_pretrained(checkpoint_folder("v3-yarn", dtype), layer=1)
    prompts = hidden_states_of(PROMPTS)
    together = run_split(layer, prompts, SPLITS["one-go"])
    alone = [run_split(layer, [x], [[len(x)]])[0] for x in prompts]
    for split in SPLITS.values():
        for other in (alone, run_split(layer, prompts, split)):
            for a, b in zip(together, other, strict=True):
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 61])
def test_pages_and_the_order_of_a_batch_change_no_bit(block_size, checkpoint_folder):
    layer = MLALayer.from_pretrained(checkpoint_folder("v3-yarn"), layer=1)
    prompts = hidden_states_of(PROMPTS)
    expected = run_split(layer, prompts, [PROMPTS])
    cache = PagedLatentCache(layer.config, 80, block_size, dtype=np.float32)
    # Single pages of requests that come and go leave the free ones in no order.
    for request in range(40):
        cache.add(-request - 1)
        cache.append({-request - 1: block_size})
    for request in np.random.default_rng(0).permutation(40).tolist():
        cache.free(-request - 1)
    for request in range(3):
        cache.add(request)
    done = [0, 0, 0]
    for counts in ({2: 5, 0: 9}, {1: 1, 0: 1, 2: 3}, {0: 9}):  # extends, decodes and both at once
        rows = [prompts[request][done[request] :][:count] for request, count in counts.items()]
        batch = cache.append(counts)
        outputs = np.split(layer(np.concatenate(rows), cache, batch), batch.query_start_loc[1:-1])
        for (request, count), output in zip(counts.items(), outputs, strict=True):
            assert output.tobytes() == expected[request][done[request] :][:count].tobytes()
            done[request] += count
    assert done == list(PROMPTS)


def test_shards_and_one_file_are_the_same_layer(checkpoint_folder):
    whole, sharded = checkpoint_folder("v3"), checkpoint_folder("v3", max_shard_size="4KB")
    assert not (whole / "model.safetensors.index.json").exists()
    assert len(list(sharded.glob("*.safetensors"))) > 5
    prompts = hidden_states_of(PROMPTS)
    a, b = (run_split(MLALayer.from_pretrained(folder, layer=1), prompts, [PROMPTS]) for folder in (whole, sharded))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_layers_of_a_model_differ_and_share_a_cache(checkpoint_folder):
    folder = checkpoint_folder("v3")
    layers = [MLALayer.from_pretrained(folder, layer=i) for i in range(2)]
    (x,) = hidden_states_of([6])
    cache = PagedLatentCache(layers[0].config, 4, 4, num_layers=2, dtype=np.float32)
    cache.add("a")
    outputs = []
    for tokens in (x[:4], x[4:]):
        batch = cache.append({"a": len(tokens)})
        outputs.append([layer(tokens, cache, batch, cache_layer=i) for i, layer in enumerate(layers)])
    for i, layer in enumerate(layers):
        (alone,) = run_split(layer, [x], [[6]])
        assert np.concatenate([step[i] for step in outputs]).tobytes() == alone.tobytes()
    assert abs(outputs[0][0] - outputs[0][1]).max() > 0.1


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_names_that_share_an_architecture_and_the_old_rope_spelling(model_type, checkpoint_folder, tmp_path):
    folder = checkpoint_folder("v3-yarn")
    values = json.loads((folder / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {"model_type": model_type, "rope_theta": rope.pop("rope_theta")}
    values["rope_scaling"] = {"type": rope.pop("rope_type")} | rope
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    prompts = hidden_states_of(PROMPTS)
    a, b = (run_split(MLALayer.from_pretrained(path, layer=1), prompts, [PROMPTS]) for path in (folder, tmp_path))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_the_wrong_pair_order_visibly_differs(checkpoint_folder, tmp_path):
    folder = checkpoint_folder("v3")
    values = json.loads((folder / "config.json").read_text()) | {"rope_interleave": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    prompts = hidden_states_of(PROMPTS)
    right, wrong = (
        run_split(MLALayer.from_pretrained(path, layer=1), prompts, [PROMPTS]) for path in (folder, tmp_path)
    )
    assert largest_error(wrong, right) > 0.05


# Errors


CONFIG = MLAConfig(
    hidden_size=16,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
)


def ones_weights(**changes):
    weights = {name: np.ones(shape, np.float32) for name, shape in attention_shapes(CONFIG).items()}
    return weights | {name.replace("__", "."): value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            "missing tensor",
            CheckpointError,
            r"model\.safetensors: tensor .*1\.self_attn\.o_proj\.weight is missing",
        ),
        ("wrong shape", CheckpointError, r"o_proj\.weight: expected shape \(48, 60\), got \(48, 61\)"),
        ("truncated file", CheckpointError, r"model\.safetensors: tensor .* truncated"),
        ("unknown model_type", ValueError, "model_type: 'gpt_oss': not supported; supported: .*deepseek_v3"),
        ("integer weights", CheckpointError, r"o_proj\.weight: expected float32.*float8_e4m3fn.*got int8"),
        ("no scales", CheckpointError, r"tensor .*o_proj\.weight_scale_inv is missing"),
        ("mixed dtypes", TypeError, r"projections of one dtype.*o_proj\.weight float16"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(damage, error, message, checkpoint_folder, tmp_path):
    source = checkpoint_folder("v3")
    values = json.loads((source / "config.json").read_text())
    name = "model.layers.1.self_attn.o_proj.weight"
    shapes = attention_shapes(MLAConfig.from_dict(values))
    tensors = {f"model.layers.1.self_attn.{key}": np.ones(shape, np.float32) for key, shape in shapes.items()}
    if damage == "missing tensor":
        del tensors[name]
    elif damage == "wrong shape":
        tensors[name] = np.ones((48, 61), np.float32)
    elif damage == "unknown model_type":
        values["model_type"] = "gpt_oss"
    elif damage == "integer weights":
        tensors[name] = tensors[name].astype(np.int8)
    elif damage == "no scales":
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    elif damage == "mixed dtypes":
        tensors[name] = tensors[name].astype(np.float16)
    save_checkpoint(tmp_path, values, tensors)
    if damage == "truncated file":
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(error, match=message):
        MLALayer.from_pretrained(tmp_path, layer=1)


def test_a_missing_folder_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        MLALayer.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_a_proj__weight": np.ones((4, 16), np.float32)}, ValueError, r"q_a_proj\.weight is not a weight"),
        ({"kv_b_proj__bias": np.ones(16, np.float32)}, ValueError, r"kv_b_proj\.bias is not a weight"),
        ({"o_proj__bias": np.ones(17, np.float32)}, ValueError, r"o_proj\.bias.*\(16,\), got .*\(17,\)"),
        ({"o_proj__weight": np.ones((16, 8))}, TypeError, r"o_proj\.weight.*float64"),
        (
            {"kv_a_layernorm__weight": np.ones(9, np.float32)},
            ValueError,
            r"kv_a_layernorm.*\(8,\), got .*\(9,\)",
        ),
    ],
)
def test_wrong_weights_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        MLALayer(CONFIG, ones_weights(**changes))


def test_a_missing_weight_is_named():
    weights = ones_weights()
    del weights["kv_b_proj.weight"]
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight is missing"):
        MLALayer(CONFIG, weights)


@pytest.fixture(scope="module")
def ones_layer():
    return MLALayer(CONFIG, ones_weights())


def make_call(layer):
    cache = PagedLatentCache(CONFIG, 2, 4, dtype=np.float32)
    cache.add("a")
    return {
        "hidden_states": np.ones((3, 16), np.float32),
        "cache": cache,
        "batch": cache.append({"a": 3}),
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_states": np.ones((3, 16))}, TypeError, "hidden_states: expected float32, got float64"),
        ({"hidden_states": [[1.0] * 16] * 3}, TypeError, "hidden_states: .*list"),
        (
            {"hidden_states": np.ones((4, 16), np.float32)},
            ValueError,
            r"hidden_states: .*\(3, 16\), got .*\(4, 16\)",
        ),
        ({"hidden_states": np.ones((3, 15), np.float32)}, ValueError, r"hidden_states: .*\(3, 15\)"),
        ({"cache": np.zeros((1, 2, 4, 10))}, TypeError, "cache: .*ndarray"),
        ({"batch": {"a": 3}}, TypeError, "batch: .*dict"),
        ({"cache_layer": 1}, ValueError, "cache_layer: expected at most 0, got 1"),
        ({"cache_layer": -1}, ValueError, "cache_layer: .*-1"),
        ({"path": "fast"}, ValueError, "path: expected one of auto, absorbed, materialised, got 'fast'"),
        ({"out": np.ones((3, 16))}, TypeError, "out: .*float64"),
        ({"out": np.ones((2, 16), np.float32)}, ValueError, r"out: .*\(3, 16\), got .*\(2, 16\)"),
        ({"out": np.broadcast_to(np.float32(0), (3, 16))}, ValueError, "out: .*writable"),
    ],
)
def test_a_wrong_call_names_the_argument(changes, error, message, ones_layer):
    call = make_call(ones_layer) | changes
    with pytest.raises(error, match=message):
        ones_layer(call.pop("hidden_states"), call.pop("cache"), call.pop("batch"), **call)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_hidden_states_of_another_precision_are_told_the_layer_s(dtype):
    weights = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in attention_shapes(CONFIG).items()}
    layer = MLALayer(CONFIG, weights)
    with pytest.raises(TypeError, match=r"expected bfloat16, got .*; cast it: hidden_states\.astype\(layer\.dtype\)"):
        layer(**make_call(layer) | {"hidden_states": np.ones((3, 16), dtype)})


def test_a_layer_shows_its_sizes(ones_layer):
    shown = repr(ones_layer)
    assert shown.startswith("<MLALayer: float32, hidden_size 16, 2 heads, ")
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert f"{name} {getattr(CONFIG, name)}" in shown


def test_a_committed_batch_is_not_written_again_into_a_fork_s_pages(ones_layer):
    call = make_call(ones_layer)
    cache, batch = call["cache"], call["batch"]
    ones_layer(**call)
    cache.commit(batch)
    cache.fork("a", "b")
    before = cache.data.tobytes()
    with pytest.raises(ValueError, match="batch: has been committed"):
        ones_layer(**call | {"hidden_states": np.full((3, 16), 5, np.float32)})
    assert cache.data.tobytes() == before


def test_a_cache_of_another_model_is_refused(ones_layer):
    call = make_call(ones_layer)
    other = MLAConfig(
        hidden_size=16,
        num_heads=2,
        q_lora_rank=None,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )
    with pytest.raises(ValueError, match=r"cache: expected rows of a latent of 8 .* got 6 and 4"):
        ones_layer(call["hidden_states"], PagedLatentCache(other, 2, 4, dtype=np.float32), call["batch"])


@pytest.mark.parametrize("path", ["auto", "absorbed", "materialised"])
def test_out_is_filled_and_returned(path, ones_layer):
    call = make_call(ones_layer)
    expected = ones_layer(**call, path=path)
    wide = np.full((3, 20), np.nan, np.float32)
    out = wide[:, 2:18]
    assert ones_layer(**call, path=path, out=out) is out
    assert np.array_equal(out, expected)
    assert np.isnan(wide[:, :2]).all()
    assert np.isnan(wide[:, 18:]).all()


def test_out_may_be_float32_where_weights_are_bfloat16(checkpoint_folder):
    for case in ("v3", "v2-bias"):
        layer = MLALayer.from_pretrained(checkpoint_folder(case, torch.bfloat16), layer=1)
        (x,) = hidden_states_of([5], ml_dtypes.bfloat16)
        cache = PagedLatentCache(layer.config, 2, 4)
        cache.add("a")
        batch = cache.append({"a": 5})
        rounded = layer(x.astype(layer.dtype), cache, batch)
        full = layer(x.astype(layer.dtype), cache, batch, out=np.empty((5, 48), np.float32))
        assert np.array_equal(full.astype(layer.dtype), rounded)
        assert not np.array_equal(full, rounded.astype(np.float32))


def test_cache_and_weights_may_differ_in_dtype(checkpoint_folder):
    layer = MLALayer.from_pretrained(checkpoint_folder("v3"), layer=1)
    prompts = hidden_states_of(PROMPTS)
    exact = run_split(layer, prompts, [PROMPTS])
    rough = run_split(layer, prompts, [PROMPTS], dtype=ml_dtypes.bfloat16)
    assert rough[0].dtype == np.float32
    assert 1e-5 < largest_error(rough, exact) < 0.05 * max(abs(y).max() for y in exact)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_reaches_only_the_later_tokens_of_its_request(value, checkpoint_folder):
    layer = MLALayer.from_pretrained(checkpoint_folder("v3"), layer=1)
    prompts = hidden_states_of(PROMPTS)
    clean = run_split(layer, prompts, [PROMPTS])
    prompts[0][7] = value
    for split in SPLITS.values():
        marked = run_split(layer, prompts, split)
        assert np.isnan(marked[0][7:]).all()
        assert marked[0][:7].tobytes() == clean[0][:7].tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(marked[1:], clean[1:], strict=True))


@pytest.mark.parametrize("path", ["auto", "absorbed", "materialised"])
def test_a_batch_without_tokens(path, ones_layer):
    cache = PagedLatentCache(CONFIG, 2, 4, dtype=np.float32)
    assert ones_layer(np.ones((0, 16), np.float32), cache, cache.append({}), path=path).shape == (0, 16)
    cache.add("a")
    assert ones_layer(np.ones((0, 16), np.float32), cache, cache.append({"a": 0}), path=path).shape == (0, 16)


# Shared, cut back and copied pages, with several layers


def make_model(checkpoint_folder):
    layers = [MLALayer.from_pretrained(checkpoint_folder("v3"), layer=i) for i in range(2)]
    return layers, PagedLatentCache(layers[0].config, 16, 4, num_layers=2, dtype=np.float32)


def run_layers(layers, cache, batch, x):
    """Run both layers on the same hidden states and return their outputs side by side."""
    return np.stack([layer(x, cache, batch, cache_layer=i) for i, layer in enumerate(layers)])


def run_alone(checkpoint_folder, x):
    """What both layers give for a prompt that shares nothing with any other."""
    layers, cache = make_model(checkpoint_folder)
    cache.add("alone")
    return run_layers(layers, cache, cache.append({"alone": len(x)}), x)


def test_a_prefix_is_shared_only_after_it_is_written(checkpoint_folder):
    layers, cache = make_model(checkpoint_folder)
    (x,) = hidden_states_of([11])
    expected = run_alone(checkpoint_folder, x)
    prompt = list(range(11))
    assert cache.add("a", prompt) == cache.add("b", prompt) == 0  # b comes before a is written
    batch = cache.append({"a": 11, "b": 11})
    outputs = run_layers(layers, cache, batch, np.concatenate([x, x]))
    assert outputs[:, :11].tobytes() == outputs[:, 11:].tobytes() == expected.tobytes()
    assert cache.add("c", prompt) == 0
    cache.commit(batch)
    assert cache.add("d", prompt) == 8
    rest = run_layers(layers, cache, cache.append({"d": 3}), x[8:])
    assert rest.tobytes() == expected[:, 8:].tobytes()


def test_rejected_speculative_tokens_leave_no_trace(checkpoint_folder):
    layers, cache = make_model(checkpoint_folder)
    (x,) = hidden_states_of([13])
    wrong = -x
    cache.add("a")
    run_layers(layers, cache, cache.append({"a": 7}), x[:7])
    for accepted in (7, 9, 13):
        batch = cache.append({"a": 4})
        guessed = np.concatenate([x[cache.seq_len("a") - 4 : accepted], wrong[accepted : accepted + 4]])[:4]
        run_layers(layers, cache, batch, guessed)
        cache.commit(batch)
        cache.truncate("a", min(accepted, 9))
    last = run_layers(layers, cache, cache.append({"a": 4}), x[9:])
    assert last.tobytes() == run_alone(checkpoint_folder, x)[:, 9:].tobytes()


def test_forks_part_without_touching_each_other_in_any_layer(checkpoint_folder):
    layers, cache = make_model(checkpoint_folder)
    (x,) = hidden_states_of([9])
    other = np.concatenate([x[:6], -x[6:]])
    cache.add("a")
    run_layers(layers, cache, cache.append({"a": 6}), x[:6])
    cache.fork("a", "b")
    outputs = run_layers(layers, cache, cache.append({"b": 3, "a": 3}), np.concatenate([other[6:], x[6:]]))
    assert outputs[:, 3:].tobytes() == run_alone(checkpoint_folder, x)[:, 6:].tobytes()
    assert outputs[:, :3].tobytes() == run_alone(checkpoint_folder, other)[:, 6:].tobytes()


def test_a_saved_cache_goes_on_in_all_layers(checkpoint_folder, tmp_path):
    layers, cache = make_model(checkpoint_folder)
    (x,) = hidden_states_of([9])
    cache.add("a")
    run_layers(layers, cache, cache.append({"a": 6}), x[:6])
    cache.save(tmp_path / "saved")
    loaded = PagedLatentCache.load(tmp_path / "saved", storage=tmp_path / "rows")
    outputs = run_layers(layers, loaded, loaded.append({"a": 3}), x[6:])
    assert outputs.tobytes() == run_alone(checkpoint_folder, x)[:, 6:].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: cache.free("a"), "batch: request 'a' has been freed"),
        (lambda cache: cache.truncate("a", 2), "batch: request 'a' has been freed, truncated"),
        (lambda cache: (cache.fork("a", "b"), cache.append({"a": 1})), "batch: request 'a' has moved to a copy"),
    ],
    ids=["freed", "truncated", "copied"],
)
def test_a_stale_batch_is_refused_before_anything_is_written(change, message, ones_layer):
    call = make_call(ones_layer)
    change(call["cache"])
    before = call["cache"].data.tobytes()
    with pytest.raises(ValueError, match=message):
        ones_layer(**call)
    assert call["cache"].data.tobytes() == before
    other = make_call(ones_layer)
    with pytest.raises(ValueError, match="another cache's"):
        ones_layer(**(other | {"cache": make_call(ones_layer)["cache"]}))
