"""Both paths of a layer: what each gives, what decides between them, what a batch may not change."""

import itertools
import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hf_oracle import (
    NUMPY_DTYPES,
    PROMPTS,
    SPLITS,
    YARN,
    Oracle,
    SavedModels,
    hidden_states_of,
    largest_error,
    run_split,
)

from numba_mla import MLAConfig, MLALayer, PagedLatentCache, materialise, ops, plan_path, threads, use_isa
from numba_mla.checkpoint import attention_shapes
from numba_mla.quant import BlockScaled, dequantise

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
CASES = {
    "v2-bias": (V2, {"attention_bias": True}),
    "v3": (V3, {}),
    "v3-yarn": (V3, {"rope_parameters": YARN | {"mscale_all_dim": 0.707}}),
}
CONFIG = MLAConfig(hidden_size=24, num_heads=3, q_lora_rank=None, kv_lora_rank=40, qk_nope_head_dim=12,
                   qk_rope_head_dim=8, v_head_dim=20)  # fmt: skip
E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16


class OnPath:
    """A layer that always takes one path."""

    def __init__(self, layer, path):
        self.layer, self.path = layer, path
        self.config, self.dtype = layer.config, layer.dtype

    def __call__(self, *arguments):
        return self.layer(*arguments, path=self.path)


def on_both_paths(layer):
    return [OnPath(layer, path) for path in ("absorbed", "materialised")]


def random_weights(config, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = attention_shapes(config)
    return {
        name: (rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5 + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes.items()
    }


def random_layer(config, dtype=np.float32):
    return MLALayer(config, random_weights(config, dtype))


def random_rows(layer, counts):
    rng = np.random.default_rng(list(counts))
    return [rng.standard_normal((n, layer.config.hidden_size), np.float32).astype(layer.dtype) for n in counts]


def run_steps(layer, rows, steps, *, path="materialised", num_blocks=64, block_size=4, **options):
    """Feed steps of {request: new tokens} from each request's rows; return each request's outputs."""
    cache = PagedLatentCache(layer.config, num_blocks, block_size, **{"dtype": layer.dtype} | options)
    outputs = {request: [] for step in steps for request in step}
    for request in outputs:
        cache.add(request)
    for step in steps:
        done = {request: cache.seq_len(request) for request in step}
        new = [rows[request][done[request] :][:count] for request, count in step.items()]
        batch = cache.append(step)
        out = layer(np.concatenate(new), cache, batch, path=path)
        for request, part in zip(step, np.split(out, batch.query_start_loc[1:-1]), strict=True):
            outputs[request].append(part)
    return {request: np.concatenate(parts) for request, parts in outputs.items()}


def assert_near(ours, exact, limit=2e-5):
    """float32 results whose sums run in another order."""
    assert largest_error(ours, exact) <= limit * max(abs(y).max() for y in exact)


# Right results


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """Return a function that saves a small random model of a case once per dtype and shard size."""
    return SavedModels(CASES, tmp_path_factory.mktemp)


@pytest.mark.parametrize("workspace", [4, materialise.WORKSPACE_TOKENS])
@pytest.mark.parametrize("case", CASES)
def test_materialised_float32_is_that_of_transformers(case, workspace, checkpoint_folder, monkeypatch):
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", workspace)
    folder = checkpoint_folder(case)
    prompts = hidden_states_of(PROMPTS)
    oracle = Oracle(folder, torch.float32)
    expected = [oracle(x) for x in prompts]
    layer = OnPath(MLALayer.from_pretrained(folder, layer=1), "materialised")
    for split in SPLITS.values():
        assert_near(run_split(layer, prompts, split), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_materialised_half_precision_errs_at_most_twice_as_much_as_transformers(dtype, checkpoint_folder, monkeypatch):
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 8)
    folder = checkpoint_folder("v3", dtype)
    prompts = hidden_states_of(PROMPTS, NUMPY_DTYPES[dtype])
    in_float32, in_half = Oracle(folder, torch.float32), Oracle(folder, dtype)
    expected = [in_float32(x) for x in prompts]
    allowed = 2 * largest_error([in_half(x) for x in prompts], expected)
    layer = OnPath(MLALayer.from_pretrained(folder, layer=1), "materialised")
    for split in SPLITS.values():
        ours = run_split(layer, prompts, split)
        assert ours[0].dtype == layer.dtype
        assert largest_error(ours, expected) <= allowed


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["float32", "float16", "bfloat16"])
def test_both_paths_agree_on_every_instruction_set(isa, dtype, monkeypatch):
    """In half precision they differ by roundings of queries, keys and values: some units of the format."""
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 8)
    layer = random_layer(CONFIG, dtype)
    rows = random_rows(layer, [21, 5])
    steps = [{0: 17, 1: 1}, {1: 4, 0: 4}]
    limit = max(2e-5, 4 * float(ml_dtypes.finfo(dtype).eps))
    ours, exact = (run_steps(layer, rows, steps, path=path) for path in ("materialised", "absorbed"))
    assert_near([ours[r].astype(np.float32) for r in ours], [exact[r].astype(np.float32) for r in ours], limit)


@pytest.mark.parametrize("rope", [0, 6])
def test_both_paths_agree_without_a_rotary_part(rope):
    config = MLAConfig(hidden_size=24, num_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=9,
                       qk_rope_head_dim=rope, v_head_dim=5)  # fmt: skip
    layer = random_layer(config)
    rows = random_rows(layer, [11])
    absorbed, materialised = (
        run_steps(layer, rows, [{0: 7}, {0: 4}], path=path)[0] for path in ("absorbed", "materialised")
    )
    assert_near([materialised], [absorbed])


@pytest.mark.parametrize(
    "options",
    [{"dtype": E4M3}, {"dtype": E4M3, "cache_scale": 0.02}, {"dtype": E5M2, "cache_scale": 0.5},
     {"layout": "fp8_ds_mla", "dtype": BF16}, {"dtype": BF16}],
    ids=["e4m3fn", "e4m3fn-scaled", "e5m2-scaled", "fp8_ds_mla", "bfloat16"],
)  # fmt: skip
def test_new_tokens_too_are_what_the_cache_gives_back(options, monkeypatch):
    """Keys made before rounding would differ by units of fp8, a thousand times what is allowed."""
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 6)
    config = MLAConfig(hidden_size=24, num_heads=2, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=16,
                       qk_rope_head_dim=64, v_head_dim=8)  # fmt: skip
    layer = random_layer(config)
    rows = random_rows(layer, [19])
    # A bfloat16 cache rounds the absorbed path's queries to bfloat16.
    limit = 2**-7 if options == {"dtype": BF16} else 2e-5
    for steps in ([{0: 19}], [{0: 14}, {0: 5}]):
        absorbed, materialised = (
            run_steps(layer, rows, steps, path=path, **options)[0] for path in ("absorbed", "materialised")
        )
        assert_near([materialised], [absorbed], limit)


@pytest.mark.parametrize(("nope", "value", "rank", "block"), [(64, 64, 192, (128, 128)), (40, 24, 130, (128, 128)),
                                                              (12, 20, 50, (7, 16))])  # fmt: skip
def test_fp8_weights_with_block_scales_are_their_dequantised_ones(nope, value, rank, block):
    config = MLAConfig(hidden_size=24, num_heads=3, q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=nope,
                       qk_rope_head_dim=8, v_head_dim=value)  # fmt: skip
    weights = random_weights(config)
    dense = weights["kv_b_proj.weight"]
    num_blocks = tuple(-(-n // size) for n, size in zip(dense.shape, block, strict=True))
    scale = np.random.default_rng(1).uniform(0.3, 3.0, num_blocks).astype(np.float32)
    scaled = BlockScaled(dense.astype(E4M3), scale, block)
    layers = [MLALayer(config, weights | {"kv_b_proj.weight": w}) for w in (scaled, dequantise(scaled))]
    rows = random_rows(layers[0], [15])
    ours, exact = (run_steps(layer, rows, [{0: 9}, {0: 6}])[0] for layer in layers)
    assert_near([ours], [exact])
    assert_near([ours], [run_steps(layers[0], rows, [{0: 15}], path="absorbed")[0]])


def test_chunks_are_merged_in_float32(monkeypatch):
    """Of 24 merges rounded to bfloat16 each, hardly a value would come out as it does unchunked."""
    layer = random_layer(CONFIG, BF16)
    rows = random_rows(layer, [54])
    with use_isa("generic"):  # probabilities stay float32
        whole = run_steps(layer, rows, [{0: 48}, {0: 6}])[0]
        monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 2)
        chunked = run_steps(layer, rows, [{0: 48}, {0: 6}])[0]
    assert np.mean(whole[48:] != chunked[48:]) < 0.05


# What a batch, pages, threads and chunks change


def test_prefixes_in_chunks_are_as_unchunked_and_each_request_as_alone(isa, monkeypatch):
    """Prefixes [9, 0, 4] through context chunks of 4, with 3, 5 and 2 new tokens, in any order."""
    layer = random_layer(CONFIG)
    rows = random_rows(layer, [12, 5, 6])
    prefixes, new = {0: 9, 2: 4}, {0: 3, 1: 5, 2: 2}
    whole = run_steps(layer, rows, [prefixes, new])
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 4)
    chunked = run_steps(layer, rows, [prefixes, new])
    assert_near(list(chunked.values()), [whole[request] for request in chunked])
    for request in new:
        alone = [{request: step[request]} for step in (prefixes, new) if request in step]
        assert run_steps(layer, rows, alone)[request].tobytes() == chunked[request].tobytes()
    for order in itertools.permutations(new):
        steps = [prefixes, {request: new[request] for request in order}]
        other = run_steps(layer, rows, steps)
        assert all(other[request].tobytes() == chunked[request].tobytes() for request in new)


def test_requests_without_new_tokens_or_without_context(monkeypatch):
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 4)
    layer = random_layer(CONFIG)
    rows = random_rows(layer, [12, 7, 5, 9, 3])
    together = run_steps(layer, rows, [{0: 9, 1: 7, 3: 6}, {4: 3, 0: 3, 1: 0, 2: 5, 3: 3}])
    for request in range(5):
        steps = {0: [9, 3], 1: [7], 2: [5], 3: [6, 3], 4: [3]}[request]
        alone = run_steps(layer, rows, [{request: count} for count in steps])
        assert alone[request].tobytes() == together[request].tobytes()
    assert run_steps(layer, rows, [{1: 7}, {1: 0}])[1].shape == (7, 24)


def test_only_requests_with_new_tokens_are_gathered(monkeypatch):
    gathered = []

    def gather_cache(*arguments, starts, **options):
        gathered.append(sum(arguments[2]) - sum(starts))
        return ops.gather_cache(*arguments, starts=starts, **options)

    layer = random_layer(CONFIG)
    rows = random_rows(layer, [12, 7, 5])
    monkeypatch.setattr(materialise, "ops", SimpleNamespace(**vars(ops) | {"gather_cache": gather_cache}))
    run_steps(layer, rows, [{0: 9, 1: 7, 2: 4}, {0: 3, 1: 0, 2: 1}])
    assert gathered == [20, 4, 9 + 4]


@pytest.mark.parametrize("block_size", [1, 2, 16, 61])
def test_pages_and_threads_change_no_bit(block_size, monkeypatch):
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 10)
    layer = random_layer(CONFIG, BF16)
    rows = random_rows(layer, [70, 33])
    steps = [{0: 41, 1: 20}, {1: 13, 0: 29}]
    expected = run_steps(layer, rows, steps)
    with threads(1):
        other = run_steps(layer, rows, steps, num_blocks=120, block_size=block_size)
    assert all(other[request].tobytes() == expected[request].tobytes() for request in (0, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["float32", "float16", "bfloat16"])
def test_a_request_without_context_has_the_same_bits_beside_one_with_context(isa, dtype):
    """Results that are merged in float32 are rounded as those that are not; very small ones too."""
    weights = random_weights(CONFIG, dtype)
    tiny = (weights["kv_b_proj.weight"].astype(np.float32) * 2**-20).astype(dtype)
    for kv_b_proj in (weights["kv_b_proj.weight"], tiny):
        layer = MLALayer(CONFIG, weights | {"kv_b_proj.weight": kv_b_proj})
        rows = random_rows(layer, [6, 9])
        together = run_steps(layer, rows, [{1: 5}, {0: 6, 1: 4}])
        assert run_steps(layer, rows, [{0: 6}])[0].tobytes() == together[0].tobytes()


@pytest.mark.filterwarnings("error")
def test_nan_reaches_only_the_later_tokens_of_its_request(monkeypatch):
    monkeypatch.setattr(materialise, "WORKSPACE_TOKENS", 4)
    layer = random_layer(CONFIG)
    rows = random_rows(layer, [14, 6])
    steps = [{0: 9, 1: 2}, {0: 5, 1: 4}]
    clean = run_steps(layer, rows, steps)
    for at in (2, 8, 11):
        marked_rows = [rows[0].copy(), rows[1]]
        marked_rows[0][at] = np.nan
        marked = run_steps(layer, marked_rows, steps)
        assert np.isnan(marked[0][at:]).all()
        assert marked[0][:at].tobytes() == clean[0][:at].tobytes()
        assert marked[1].tobytes() == clean[1].tobytes()


# The choice


WIDE = MLAConfig(hidden_size=24, num_heads=8, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=16,
                 qk_rope_head_dim=8, v_head_dim=16)  # fmt: skip


def test_each_request_of_a_mixed_batch_takes_its_own_path():
    """A decode, a fresh prompt, speculative tokens, a long chunk and no new token, together as alone."""
    layer = random_layer(WIDE)
    rows = random_rows(layer, [9, 700, 34, 1000, 5])
    steps = [{0: 8, 2: 30, 3: 300, 4: 5}, {2: 4, 3: 700, 4: 0, 1: 700, 0: 1}]
    choices = [plan_path(*sizes, WIDE) for sizes in ((1, 8), (700, 0), (4, 30), (700, 300))]
    assert choices == ["absorbed", "materialised", "absorbed", "materialised"]
    options = {"num_blocks": 40, "block_size": 64}
    together = run_steps(layer, rows, steps, path="auto", **options)
    for request in range(5):
        alone = [{request: step[request]} for step in steps if request in step]
        assert run_steps(layer, rows, alone, path="auto", **options)[request].tobytes() == together[request].tobytes()


@pytest.mark.parametrize("num_new", [4, 31, 700])
def test_auto_gives_the_bits_of_the_path_that_is_planned(num_new):
    layer = random_layer(WIDE)
    rows = random_rows(layer, [num_new])
    by_path = {
        path: run_steps(layer, rows, [{0: num_new}], path=path, block_size=64)[0].tobytes()
        for path in ("auto", "absorbed", "materialised")
    }
    assert by_path["auto"] == by_path[plan_path(num_new, 0, WIDE)]
    assert by_path["absorbed"] != by_path["materialised"]


# Memory


def peak_bytes(layer, prefix):
    """Peak of what a call allocates for 40 new tokens after a prefix."""
    cache = PagedLatentCache(layer.config, -(-(prefix + 40) // 64), dtype=layer.dtype)
    cache.add(0)
    cache.append({0: prefix})
    batch = cache.append({0: 40})
    (x,) = random_rows(layer, [40])
    layer(x, cache, batch, path="materialised")
    tracemalloc.start()
    try:
        layer(x, cache, batch, path="materialised")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_workspace_whatever_the_prefix():
    layer = random_layer(CONFIG, BF16)
    c = layer.config
    row = c.cache_row_width + c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    workspace = materialise.WORKSPACE_TOKENS * row * layer.dtype.itemsize
    peaks = [peak_bytes(layer, prefix) for prefix in (5000, 50000)]
    assert workspace < peaks[0] <= peaks[1] <= workspace + 2**17
