"""The check of a layer: right outputs pass, and each kind of wrong one is found at its stage."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from numba_mla.cache import PagedLatentCache
from numba_mla.check import STAGES, StageError, check_layer, worst_of_calls
from numba_mla.checkpoint import attention_shapes, bias_shapes
from numba_mla.config import MLAConfig
from numba_mla.layer import MLALayer

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 8,
}
PLAIN = MLAConfig(
    hidden_size=48,
    num_heads=3,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
CONFIGS = {
    "plain": PLAIN,
    "q_lora": replace(PLAIN, q_lora_rank=24, rope_interleave=False),
    "yarn": replace(PLAIN, rope_scaling=YARN),
    "scaled": replace(
        PLAIN,
        q_lora_rank=24,
        q_latent_scale=1.5,
        kv_latent_scale=0.75,
        query_scale_beta=0.1,
        rope_scaling=YARN,
    ),
}
SEQ_LENS = (13, 4)


def random_weights(config, dtype, *, biased=False):
    rng = np.random.default_rng(1)
    shapes = attention_shapes(config) | (bias_shapes(config) if biased else {})
    return {
        name: (rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]) + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes.items()
    }


def run_layer(config, weights, dtype, prefixes=(0, 0), seq_lens=SEQ_LENS):
    """Return what `check_layer` takes after a call for all tokens of two requests after their prefixes."""
    layer = MLALayer(config, weights)
    cache = PagedLatentCache(config, num_blocks=sum(seq_lens), block_size=4, dtype=dtype)
    for request in range(len(seq_lens)):
        cache.add(request)
    rng = np.random.default_rng(2)

    def hidden_states_of(counts):
        return rng.standard_normal((sum(counts), config.hidden_size), np.float32).astype(dtype)

    layer(hidden_states_of(prefixes), cache, cache.append(dict(enumerate(prefixes))))
    new = np.subtract(seq_lens, prefixes).tolist()
    batch = cache.append(dict(enumerate(new)))
    hidden_states = hidden_states_of(new)
    return {
        "layer": layer,
        "weights": weights,
        "hidden_states": hidden_states,
        "outputs": layer(hidden_states, cache, batch),
        "cache": cache,
        "batch": batch,
    }


def out_of_tolerance(case):
    return [error.stage for error in check_layer(**case) if not error.within_tolerance]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("name", CONFIGS)
def test_right_outputs_pass(name, biased, dtype):
    config = CONFIGS[name]
    case = run_layer(config, random_weights(config, dtype, biased=biased), dtype)
    assert out_of_tolerance(case) == []


@pytest.fixture
def case():
    return run_layer(PLAIN, random_weights(PLAIN, ml_dtypes.bfloat16), ml_dtypes.bfloat16)


@pytest.mark.parametrize("wrong", [1.05, np.nan, np.inf], ids=["5 percent", "nan", "inf"])
def test_one_wrong_output_is_found(case, wrong):
    row, column = np.unravel_index(abs(case["outputs"].astype(np.float32)).argmax(), case["outputs"].shape)
    case["outputs"][row, column] *= wrong
    assert out_of_tolerance(case) == ["outputs"]


def test_outputs_of_another_token_are_found(case):
    case["outputs"][[0, 1]] = case["outputs"][[1, 0]]
    assert out_of_tolerance(case) == ["outputs"]


def test_a_wrong_row_in_the_cache_is_found(case):
    page, offset = divmod(int(case["batch"].slot_mapping[2]), case["cache"].block_size)
    case["cache"].data[0, page, offset, 5] += 1
    assert "cached latents" in out_of_tolerance(case)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("q_proj", "queries"), ("kv_a_proj_with_mqa", "cached latents"), ("o_proj", "outputs")],
)
def test_a_layer_with_other_weights_is_found(case, name, stage):
    weights = dict(case["weights"])
    weights[f"{name}.weight"] = np.roll(weights[f"{name}.weight"], 1, axis=0)
    assert stage in out_of_tolerance(case | {"weights": weights})


def test_a_layer_with_another_kv_b_proj_is_found(case):
    weights = dict(case["weights"])
    weights["kv_b_proj.weight"] = np.roll(weights["kv_b_proj.weight"], 1, axis=0)
    assert out_of_tolerance(case | {"weights": weights}) == ["outputs"]


WIDE = replace(PLAIN, num_heads=8, kv_lora_rank=128)
BOTH_PATHS = {"prefixes": (20, 9), "seq_lens": (620, 13)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_right_outputs_of_both_paths_in_one_call_pass(dtype):
    case = run_layer(WIDE, random_weights(WIDE, dtype), dtype, **BOTH_PATHS)
    assert {error.stage for error in check_layer(**case)} == set(STAGES)
    assert out_of_tolerance(case) == []


def test_another_kv_b_proj_is_found_on_both_paths():
    weights = random_weights(WIDE, np.float32)
    case = run_layer(WIDE, weights, np.float32, **BOTH_PATHS)
    weights = weights | {"kv_b_proj.weight": np.roll(weights["kv_b_proj.weight"], 1, axis=0)}
    assert out_of_tolerance(case | {"weights": weights}) == ["attention to keys of heads", "outputs"]


def test_of_several_calls_the_worst_error_of_each_stage_is_shown():
    nan = float("nan")
    calls = [
        (StageError("queries", 1.0, 0.5), StageError("outputs", 2.0, nan)),
        (StageError("queries", 0.5, 0.7), StageError("values", 3.0, 0.1), StageError("outputs", 1.0, 0.2)),
    ]
    assert repr(worst_of_calls(calls)) == repr(
        (StageError("queries", 1.0, 0.7), StageError("values", 3.0, 0.1), StageError("outputs", 2.0, nan))
    )


def test_the_other_pair_order_is_found(case):
    case["layer"].config = replace(PLAIN, rope_interleave=False)
    assert out_of_tolerance(case)[0] == "cached latents"
