"""MLAConfig: the families' config.json in every spelling, and what is refused."""

import dataclasses
import json
import pickle

import pytest
import transformers

from numba_mla.config import MLAConfig
from numba_mla.families import FAMILIES, SPARSE_FAMILIES, attention_prefix

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-5,
}
REQUIRED = [
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
]


def without(values, key):
    return {k: v for k, v in values.items() if k != key}


def test_dimensions_are_read_and_the_norms_keep_the_class_default_eps():
    config = MLAConfig.from_dict(V3)
    assert (config.hidden_size, config.num_heads, config.q_lora_rank) == (7168, 128, 1536)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim) == (512, 128, 64)
    assert (config.v_head_dim, config.cache_row_width) == (128, 576)
    assert config.norm_eps == 1e-6
    assert config.rope_scaling is None
    assert config.softmax_scale == 192**-0.5


@pytest.mark.parametrize(("mscale_all_dim", "factor"), [(1.0, 1.8739), (0.707, 1.5896), (0.0, 1.0)])
def test_yarn_multiplies_the_softmax_scale(mscale_all_dim, factor):
    rope = YARN | {"mscale_all_dim": mscale_all_dim}
    config = MLAConfig.from_dict(V3 | {"rope_scaling": rope})
    assert config.softmax_scale * 192**0.5 == pytest.approx(factor, abs=5e-5)


def test_both_spellings_of_rope_values_mean_the_same():
    old = MLAConfig.from_dict(V3 | {"rope_theta": 5e4, "rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}})
    new = MLAConfig.from_dict(without(V3, "rope_theta") | {"rope_parameters": YARN | {"rope_theta": 5e4}})
    assert old == new
    assert hash(old) == hash(new)
    assert new.rope_theta == 5e4
    assert new.rope_scaling["factor"] == 40.0


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        (without(V3, "rope_theta"), 10000.0),
        (without(V3, "rope_theta") | {"model_type": "longcat_flash"}, 1e7),
        (V3 | {"rope_parameters": {"rope_type": "default"}}, 10000),
        (V3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, 77.0),
    ],
)
def test_theta_comes_from_the_nearest_place(values, theta):
    assert MLAConfig.from_dict(values).rope_theta == theta


def test_yarn_takes_missing_values_from_max_position_embeddings():
    rope = MLAConfig.from_dict(V3 | {"rope_scaling": without(YARN, "factor")}).rope_scaling
    assert rope["factor"] == 40.0
    original_key = "original_max_position_embeddings"
    rope = MLAConfig.from_dict(V3 | {"rope_scaling": without(YARN, original_key)}).rope_scaling
    assert rope[original_key] == 163840
    rope = MLAConfig.from_dict(V3 | {"rope_scaling": YARN, original_key: 8192}).rope_scaling
    assert rope[original_key] == 8192


@pytest.mark.parametrize(
    ("model_type", "given", "interleaved"),
    [
        ("deepseek_v2", {}, True),
        ("deepseek_v2", {"rope_interleave": False}, True),
        ("deepseek_v3", {}, True),
        ("deepseek_v3", {"rope_interleave": False}, False),
        ("deepseek_v3", {"rope_interleave": None}, False),
        ("kimi_k2", {}, True),
        ("minicpm3", {}, False),
        ("minicpm3", {"rope_interleave": True}, False),
        ("longcat_flash", {"rope_interleave": False}, True),
    ],
)
def test_pair_order_of_each_family(model_type, given, interleaved):
    assert MLAConfig.from_dict(V3 | {"model_type": model_type} | given).rope_interleave is interleaved


def test_longcat_scales_both_latents():
    config = MLAConfig.from_dict(V3 | {"model_type": "longcat_flash"})
    assert config.q_latent_scale == pytest.approx((7168 / 1536) ** 0.5)
    assert config.kv_latent_scale == pytest.approx((7168 / 512) ** 0.5)
    with pytest.raises(ValueError, match="q_lora_rank"):
        MLAConfig.from_dict(V3 | {"model_type": "longcat_flash", "q_lora_rank": None})


def test_mistral4_scales_queries_by_position():
    rope = YARN | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 64 / 192}
    values = V3 | {"model_type": "mistral4", "rope_parameters": rope}
    assert MLAConfig.from_dict(values).query_scale_beta == 0.1
    for key, rope_without in [
        ("llama_4_scaling_beta", without(rope, "llama_4_scaling_beta")),
        ("partial_rotary_factor", rope | {"partial_rotary_factor": 0.5}),
    ]:
        with pytest.raises(ValueError, match=key):
            MLAConfig.from_dict(values | {"rope_parameters": rope_without})


def test_minicpm3_derives_a_missing_value_width():
    values = without(V3, "v_head_dim") | {"model_type": "minicpm3"}
    assert MLAConfig.from_dict(values).v_head_dim == 7168 // 128


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("deepseek_v2", "DeepseekV2Config"),
        ("deepseek_v3", "DeepseekV3Config"),
        ("youtu", "YoutuConfig"),
        ("glm4_moe_lite", "Glm4MoeLiteConfig"),
        ("axk1", "AXK1Config"),
        ("minicpm3", "MiniCPM3Config"),
        ("longcat_flash", "LongcatFlashConfig"),
        ("mistral4", "Mistral4Config"),
    ],
)
def test_default_configs_of_transformers_are_read(model_type, class_name, tmp_path):
    hf_config = getattr(transformers, class_name)()
    hf_config.save_pretrained(tmp_path)
    config = MLAConfig.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    assert config.num_heads == hf_config.num_attention_heads
    assert config.kv_lora_rank == hf_config.kv_lora_rank
    assert config.rope_theta == hf_config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=f"^{key}: missing"):
        MLAConfig.from_dict(without(V3, key))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [-1, 1.5, "64", True, [64]])
def test_a_wrong_dimension_is_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        MLAConfig.from_dict(V3 | {key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: .*63"),
        ({"hidden_size": None}, "hidden_size: .*None"),
        ({"rope_interleave": "yes"}, "rope_interleave: .*'yes'"),
        ({"rope_theta": -1}, "rope_theta: .*-1"),
        ({"rope_theta": "10000"}, "rope_theta: .*'10000'"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta: .*1"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling: .*yarn"),
        ({"rope_scaling": YARN | {"rope_type": "longrope"}}, "rope_type: 'longrope'.*default, linear, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: missing"),
        ({"rope_scaling": YARN | {"factor": 0}}, "factor: .*0"),
        ({"rope_scaling": YARN | {"factor": float("nan")}}, "factor: .*nan"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, "mscale: .*'1'"),
        ({"rope_scaling": YARN | {"beta_fast": -32}}, "beta_fast: .*-32"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings: .*0",
        ),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        (
            {"max_position_embeddings": None, "rope_scaling": without(YARN, "factor")},
            "factor: .*max_position_embeddings",
        ),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_dict(V3 | changes)


@pytest.mark.parametrize("model_type", ["llama", "kimi_k3", "", None, 3, ["deepseek_v3"]])
def test_an_unknown_family_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=r"model_type: .*supported: axk1, .*deepseek_v3") as caught:
        MLAConfig.from_dict(V3 | {"model_type": model_type})
    assert repr(model_type) in str(caught.value)


@pytest.mark.parametrize("model_type", SPARSE_FAMILIES)
def test_sparse_families_are_refused_as_such(model_type):
    with pytest.raises(ValueError, match=f"model_type: '{model_type}': its sparse attention"):
        MLAConfig.from_dict(V3 | {"model_type": model_type})
    assert model_type not in FAMILIES


def test_a_missing_model_type_is_named():
    with pytest.raises(ValueError, match="model_type: missing"):
        MLAConfig.from_dict(without(V3, "model_type"))


def test_folders_without_a_usable_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        MLAConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        MLAConfig.from_pretrained(tmp_path)
    for text in ["{", "[1]", "\x00", "[" * 100_000]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            MLAConfig.from_pretrained(tmp_path)


def test_configs_are_frozen_comparable_and_picklable():
    config = MLAConfig.from_dict(V3 | {"rope_scaling": YARN})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 1
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, num_heads=64) != config


def test_the_prefix_counts_attentions():
    assert attention_prefix({"model_type": "deepseek_v2"}, 3) == "model.layers.3.self_attn."
    assert attention_prefix({"model_type": "longcat_flash"}, 3) == "model.layers.1.self_attn.1."
    assert attention_prefix({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, 3) == (
        "language_model.model.layers.3.self_attn."
    )


@pytest.mark.parametrize("text_type", [None, "deepseek_v3", "kimi_k2"])
def test_a_nested_config_is_that_of_its_text_model(text_type):
    nested = without(V3, "model_type") | ({"model_type": text_type} if text_type else {})
    values = {"model_type": "kimi_k25", "hidden_size": 1, "text_config": nested}
    assert MLAConfig.from_dict(values) == MLAConfig.from_dict(V3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "kimi_k25", "text_config": None}, "text_config: expected an object, got None"),
        ({"model_type": "mistral3", "text_config": V3 | {"model_type": "mistral"}}, "model_type: 'mistral': not"),
        ({"model_type": "mistral3", "text_config": without(V3, "model_type")}, "model_type: missing"),
        ({"model_type": "kimi_k25", "text_config": without(V3, "kv_lora_rank")}, "kv_lora_rank: missing"),
        ({"model_type": "glm5_next", "text_config": V3}, "'glm5_next': its sparse attention"),
        ({"model_type": "kimi_k25", "text_config": V3 | {"model_type": "deepseek_v32"}}, "'deepseek_v32': its sparse"),
    ],
)
def test_a_wrong_nested_config_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_dict(values)


def test_kimi_linear_does_not_rotate_whatever_its_config_says():
    config = MLAConfig.from_dict(V3 | {"model_type": "kimi_linear", "rope_scaling": YARN})
    assert config.rope_theta is None
    assert config.softmax_scale == 192**-0.5
    with pytest.raises(ValueError, match="rope_scaling: expected None"):
        dataclasses.replace(config, rope_scaling=YARN)


@pytest.mark.parametrize(
    ("layers", "mla"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, [0, 2]),
        ({"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}}, [3, 7]),
        ({"num_hidden_layers": 10}, [4, 8]),
        ({}, []),
    ],
)
def test_the_mla_layers_of_kimi_linear(layers, mla):
    values = V3 | {"model_type": "kimi_linear"} | layers
    for layer in range(10):
        if layer in mla:
            assert attention_prefix(values, layer) == f"model.layers.{layer}.self_attn."
        else:
            with pytest.raises(ValueError, match=f"layer: {layer} .*MLA layers: {', '.join(map(str, mla)) or 'none'}"):
                attention_prefix(values, layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": "full_attention"}, "layer_types: .*'full_attention'"),
        ({"linear_attn_config": {"full_attn_layers": ["4"]}}, r"full_attn_layers: .*\['4'\]"),
        ({"num_hidden_layers": None}, "num_hidden_layers: .*None"),
    ],
)
def test_a_wrong_list_of_layers_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_prefix(V3 | {"model_type": "kimi_linear"} | changes, 3)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("kimi_linear", "mla_use_nope"), ("longcat_flash", "mla_scale_q_lora"), ("longcat_flash", "mla_scale_kv_lora")],
)
def test_what_a_family_takes_for_granted_is_not_denied(model_type, key):
    values = V3 | {"model_type": model_type}
    assert MLAConfig.from_dict(values | {key: True}) == MLAConfig.from_dict(values)
    with pytest.raises(ValueError, match=f"{key}: .*got False"):
        MLAConfig.from_dict(values | {key: False})
