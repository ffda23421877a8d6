"""fp8 checkpoints kept in fp8, and fp8 caches, against transformers on dequantised weights."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from hf_oracle import TINY, Oracle, SavedModels, largest_error, run_split

from numba_mla import reference
from numba_mla.cache import PagedLatentCache
from numba_mla.checkpoint import Checkpoint, CheckpointError, attention_shapes, read_attention, save_checkpoint
from numba_mla.config import MLAConfig
from numba_mla.layer import MLALayer
from numba_mla.quant import BlockScaled

V3 = "DeepseekV3ForCausalLM"
# Blocks of 128 rows: of W_UK and W_UV of one head; of two heads; that end anywhere.
CASES = {
    "straddling": (V3, {"hidden_size": 160, "qk_nope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 192}),
    "odd": (V3, {"hidden_size": 200, "qk_nope_head_dim": 40, "v_head_dim": 24, "kv_lora_rank": 130}),
    "no-q-lora": (V3, {"hidden_size": 130, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128}),
    "wide": (
        V3,
        {"hidden_size": 128, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 64},
    ),
}
PROMPTS, SPLITS = (11, 1, 6), [[(11, 1, 6)], [(5, 1, 0), (6, 0, 6)]]
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def quantise(weight, block_size=(128, 128), dtype=E4M3):
    """Return a float32 weight as fp8 with a scale per block that takes its largest value to the format's."""
    shape = tuple(-(-n // size) for n, size in zip(weight.shape, block_size, strict=True))
    scale = np.zeros(shape, np.float32)
    for i, j in np.ndindex(*shape):
        rows, columns = (slice(k * size, (k + 1) * size) for k, size in zip((i, j), block_size, strict=True))
        scale[i, j] = abs(weight[rows, columns]).max() / np.float32(ml_dtypes.finfo(dtype).max)
    return BlockScaled((weight / spread(scale, weight.shape, block_size)).astype(dtype), scale, block_size)


def spread(scale, shape, block_size):
    """Return each element's scale, element by element rather than as the package does it."""
    rows, columns = np.indices(shape)
    return scale[rows // block_size[0], columns // block_size[1]]


def dequantise(scaled):
    return scaled.weight.astype(np.float32) * spread(scaled.scale, scaled.weight.shape, scaled.block_size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that gives a case's fp8 checkpoint and its dequantised twin.

    `kept` names modules that are not quantised; the blocks of rows differ in size, so that no scale
    could pass for its neighbour's.
    """
    saved, made = SavedModels(CASES, tmp_path_factory.mktemp), {}

    def get(case, kept=(), suffix="_scale_inv"):
        if (case, kept, suffix) not in made:
            made[case, kept, suffix] = make(saved(case), kept, suffix)
        return made[case, kept, suffix]

    def make(source, kept, suffix):
        checkpoint = Checkpoint(source)
        fp8, twin = {}, {}
        generator = np.random.default_rng(0)
        for name in checkpoint.names:
            tensor = np.array(checkpoint.tensor(name))
            if ".self_attn." not in name or tensor.ndim == 1 or any(module in name for module in kept):
                fp8[name] = twin[name] = tensor
                continue
            tensor *= np.repeat(generator.uniform(0.3, 3.0, -(-len(tensor) // 128)), 128)[: len(tensor), None]
            scaled = quantise(tensor.astype(np.float32))
            fp8[name], fp8[name + suffix] = scaled.weight, scaled.scale
            twin[name] = dequantise(scaled)
        paths = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("dequantised")
        quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        save_checkpoint(paths[0], checkpoint.config | {"quantization_config": quantization}, fp8)
        save_checkpoint(paths[1], checkpoint.config, twin)
        return paths

    return get


def hidden_states_of(case, dtype=np.float32):
    generator = np.random.default_rng(1)
    width = (TINY | CASES[case][1])["hidden_size"]
    return [generator.standard_normal((n, width)).astype(dtype).astype(np.float32) for n in PROMPTS]


def outputs_of(folder, dtype, prompts):
    oracle = Oracle(folder, dtype)
    return [oracle(x) for x in prompts]


@pytest.mark.parametrize("case", CASES)
def test_fp8_weights_give_what_their_dequantised_model_gives(case, folders):
    fp8, twin = folders(case)
    prompts = hidden_states_of(case, BF16)
    exact = outputs_of(twin, torch.float32, prompts)
    allowed = 2 * largest_error(outputs_of(twin, torch.bfloat16, prompts), exact)
    layer = MLALayer.from_pretrained(fp8, layer=1)
    assert layer.dtype == BF16
    for split in SPLITS:
        assert largest_error(run_split(layer, prompts, split), exact) <= allowed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kept", ["o_proj", "kv_a_proj_with_mqa"])
def test_beside_a_float32_projection_fp8_weights_are_exact(case, kept, folders):
    fp8, twin = folders(case, (kept,))
    prompts = hidden_states_of(case)
    exact = outputs_of(twin, torch.float32, prompts)
    layer = MLALayer.from_pretrained(fp8, layer=1)
    assert layer.dtype == np.float32
    for split in SPLITS:
        assert largest_error(run_split(layer, prompts, split), exact) <= 2e-5 * max(abs(y).max() for y in exact)


def test_weights_stay_fp8(folders):
    layer = MLALayer.from_pretrained(folders("straddling")[0], layer=1)
    attention = layer._attention
    packed = [*layer._packed.values(), attention.w_uk, attention.w_uv, attention.materialised._w_k]
    assert len(packed) == 7
    assert all(weight.dtype == E4M3 for weight in packed)


def test_the_other_name_of_scales(folders):
    prompts = hidden_states_of("odd")
    a, b = (
        run_split(MLALayer.from_pretrained(folders("odd", suffix=suffix)[0], layer=1), prompts, SPLITS[0])
        for suffix in ("_scale_inv", "_scale")
    )
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", ["straddling", "odd"])
def test_requantised_kv_b_proj_has_one_scale(case, folders):
    fp8, _ = folders(case, ("o_proj",))
    checkpoint = Checkpoint(fp8)
    config = MLAConfig.from_dict(checkpoint.config)
    weights = read_attention(checkpoint, config, 1)
    one_scale, scale = reference.block_quant_to_tensor_quant(*weights["kv_b_proj.weight"])
    expected = weights | {"kv_b_proj.weight": one_scale.astype(np.float32) * np.float32(scale)}
    prompts = hidden_states_of(case)
    exact, kept, requantised = (
        run_split(layer, prompts, SPLITS[0])
        for layer in (
            MLALayer(config, expected),
            MLALayer(config, weights),
            MLALayer.from_pretrained(fp8, layer=1, requantize_kv_b_proj=True),
        )
    )
    largest = max(abs(y).max() for y in exact)
    assert largest_error(requantised, exact) <= 2e-5 * largest
    assert largest_error(kept, exact) > 1e-3 * largest


def test_a_scale_for_the_whole_weight_needs_no_blocks(folders, tmp_path):
    """What checkpoints without weight_block_size have: one scale per projection, of shape () or (1,)."""
    twin = Checkpoint(folders("straddling", ("o_proj",))[1])
    prefix = "model.layers.1.self_attn."
    fp8, dequantised = {}, {name: np.array(twin.tensor(name)) for name in twin.names}
    for index, name in enumerate(name for name in twin.names if name.startswith(prefix)):
        tensor = dequantised[name]
        if tensor.ndim == 1 or "o_proj" in name:
            fp8[name] = tensor
            continue
        scaled = quantise(tensor, tensor.shape)
        fp8[name], fp8[name + "_scale"] = scaled.weight, scaled.scale.reshape(() if index % 2 else (1,))
        dequantised[name] = dequantise(scaled)
    quantization = {"quant_method": "fp8", "weight_block_size": None}
    save_checkpoint(tmp_path / "fp8", twin.config | {"quantization_config": quantization}, fp8)
    save_checkpoint(tmp_path / "twin", twin.config, dequantised)
    prompts = hidden_states_of("straddling")
    exact = outputs_of(tmp_path / "twin", torch.float32, prompts)
    ours = run_split(MLALayer.from_pretrained(tmp_path / "fp8", layer=1), prompts, SPLITS[0])
    assert largest_error(ours, exact) <= 2e-5 * max(abs(y).max() for y in exact)


# fp8 caches


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"dtype": E4M3}, 2**-4),
        ({"dtype": E4M3, "cache_scale": 0.02}, 2**-4),
        ({"dtype": ml_dtypes.float8_e5m2, "cache_scale": 0.5}, 2**-3),
        ({"layout": "fp8_ds_mla", "dtype": BF16}, 2**-4),
    ],
    ids=["e4m3fn", "e4m3fn-scaled", "e5m2-scaled", "fp8_ds_mla"],
)
def test_an_fp8_cache_costs_its_rounding_and_no_more(options, unit, folders):
    """Largest errors in units of the format: rounding moves a result by at most about one of its own units."""
    fp8, _ = folders("wide", ("o_proj",))
    layer = MLALayer.from_pretrained(fp8, layer=1)
    prompts = hidden_states_of("wide")
    exact = run_split(layer, prompts, SPLITS[0])
    rough = [run_split(layer, prompts, split, **options) for split in SPLITS]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*rough, strict=True))
    largest = max(abs(y).max() for y in exact)
    assert unit / 64 * largest < largest_error(rough[0], exact) < 2 * unit * largest


@pytest.mark.parametrize(
    "options",
    [{"dtype": E4M3, "cache_scale": 0.02}, {"dtype": ml_dtypes.float8_e5m2}, {"layout": "fp8_ds_mla"}],
    ids=["e4m3fn-scaled", "e5m2", "fp8_ds_mla"],
)
def test_rows_are_quantised_once_from_float32(options, folders):
    """A bfloat16 layer's rows in an fp8 cache have the bits of its float32 rows, encoded."""
    layer = MLALayer.from_pretrained(folders("wide")[0], layer=1)
    assert layer.dtype == BF16
    x = hidden_states_of("wide", BF16)[0].astype(BF16)
    caches = [PagedLatentCache(layer.config, 3, 4, **own) for own in ({"dtype": np.float32}, options)]
    for cache in caches:
        cache.add("a")
        batch = cache.append({"a": len(x)})
        layer(x, cache, batch)
    exact, fp8 = caches
    rows = exact.data[0].reshape(12, -1)[: len(x)]
    expected = np.zeros_like(fp8.data[0])
    reference.write_cache(
        rows[:, :512], rows[:, 512:], expected, batch.slot_mapping, cache_scale=options.get("cache_scale")
    )
    assert fp8.data[0].tobytes() == expected.tobytes()


# Errors


def fp8_checkpoint(folders, tmp_path, change):
    source = Checkpoint(folders("straddling")[0])
    tensors = {name: np.array(source.tensor(name)) for name in source.names}
    config = json.loads(json.dumps(source.config))
    change(config, tensors)
    save_checkpoint(tmp_path, config, tensors)
    return tmp_path


WEIGHT = "model.layers.1.self_attn.kv_b_proj.weight"
SCALE = WEIGHT + "_scale_inv"


def replaced(name, value):
    return lambda config, tensors: tensors.update({name: value(tensors[name])})


def with_scale(number):
    def change(config, tensors):
        tensors[SCALE][1, 0] = number

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, tensors: tensors.pop(SCALE), r"tensor .*kv_b_proj\.weight_scale_inv is missing"),
        (replaced(SCALE, lambda s: s[:-1]), r"weight_scale_inv: expected shape \(3, 2\), got \(2, 2\)"),
        (replaced(SCALE, lambda s: s.T), r"weight_scale_inv: expected shape \(3, 2\), got \(2, 3\)"),
        (replaced(SCALE, lambda s: s.astype(np.int32)), "weight_scale_inv: expected float32.*got int32"),
        (replaced(WEIGHT, lambda w: w.astype(np.float32)), r"weight_scale_inv is not one of this attention's"),
        (replaced(WEIGHT, lambda w: w[:, 1:]), r"kv_b_proj\.weight: expected shape \(384, 192\), got \(384, 191\)"),
        (lambda config, tensors: config.pop("quantization_config"), "quantization_config.weight_block_size in config"),
        (
            lambda config, tensors: config.update(quantization_config={"weight_block_size": [64, 64]}),
            r"weight_scale_inv: expected shape \(\d+, \d+\), got",
        ),
        (
            lambda config, tensors: config.update(quantization_config={"weight_block_size": [128]}),
            r"weight_block_size: expected two integers > 0, got \[128\]",
        ),
        (
            lambda config, tensors: config.update(quantization_config={"weight_block_size": [0, 128]}),
            r"weight_block_size: .*\[0, 128\]",
        ),
        (lambda config, tensors: config.update(quantization_config="fp8"), "quantization_config: .*'fp8'"),
    ],
)
def test_wrong_scales_are_named(change, message, folders, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        MLALayer.from_pretrained(fp8_checkpoint(folders, tmp_path, change), layer=1)


@pytest.mark.parametrize("number", [0, -1, np.nan, np.inf])
def test_scales_that_are_no_scales_are_named(number, folders, tmp_path):
    with pytest.raises(ValueError, match=r"weights\['kv_b_proj.weight'\]\.scale: expected finite and positive"):
        MLALayer.from_pretrained(fp8_checkpoint(folders, tmp_path, with_scale(number)), layer=1)


def ones_weights(**changes):
    config = MLAConfig.from_dict({**TINY, "model_type": "deepseek_v3"})
    weights = {name: np.ones(shape, np.float32) for name, shape in attention_shapes(config).items()}
    return config, weights | {name.replace("__", "."): value for name, value in changes.items()}


ONES, ONE = np.ones((96, 32), E4M3), np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (ONES, TypeError, "expected fp8 with its scales, as BlockScaled, got float8_e4m3fn"),
        (BlockScaled(ONES.astype(np.float32), ONE, (128, 128)), TypeError, r"\.weight: .*float32"),
        (BlockScaled(ONES[1:], ONE, (128, 128)), ValueError, r"\.weight: .*\(96, 32\)"),
        (BlockScaled(ONES, np.ones((2, 1), np.float32), (128, 128)), ValueError, r"\.scale: .*\(1, 1\).*\(2, 1\)"),
        (BlockScaled(ONES, np.ones((1, 1)), (128, 128)), TypeError, r"\.scale: .*float64"),
        (BlockScaled(ONES, ONE, 128), TypeError, "block_size: .*128"),
    ],
)
def test_wrong_fp8_weights_are_named(value, error, message):
    config, weights = ones_weights(kv_b_proj__weight=value)
    with pytest.raises(error, match=message):
        MLALayer(config, weights)


def test_only_fp8_weights_are_requantised():
    config, weights = ones_weights()
    with pytest.raises(ValueError, match="requantize_kv_b_proj: expected False where kv_b_proj is float32, got True"):
        MLALayer(config, weights, requantize_kv_b_proj=True)
    with pytest.raises(TypeError, match=r"requantize_kv_b_proj: .*'tensor'"):
        MLALayer(config, weights, requantize_kv_b_proj="tensor")


def test_norms_and_biases_are_not_fp8():
    config, weights = ones_weights(kv_a_layernorm__weight=np.ones(32, E4M3))
    with pytest.raises(TypeError, match=r"kv_a_layernorm\.weight.*float8_e4m3fn"):
        MLALayer(config, weights)
