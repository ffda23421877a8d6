"""Every model family against the attention module of transformers: same checkpoint, same hidden states."""

import json

import numpy as np
import pytest
import torch
from hf_oracle import (
    LINEAR,
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

from numba_mla.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from numba_mla.config import MLAConfig
from numba_mla.families import FAMILIES, LAYER_ROOTS
from numba_mla.layer import MLALayer

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
KIMI_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": None}

CASES = {
    "v2": (V2, {"q_lora_rank": None}),
    "v2-lora": (V2, {}),
    "v2-H4": (V2, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "v2-yarn": (V2, {"q_lora_rank": None, "rope_parameters": YARN}),
    "v2-yarn-mscale": (V2, {"rope_parameters": YARN | {"mscale": 0.5}}),
    "v2-bias": (V2, {"attention_bias": True}),
    "v3": (V3, {}),
    "v3-no-lora-bias": (V3, {"q_lora_rank": None, "attention_bias": True}),
    "v3-half-split": (V3, {"rope_interleave": False}),
    "v3-half-split-yarn": (V3, {"rope_interleave": False, "rope_parameters": YARN | {"mscale_all_dim": 0.0}}),
    "v3-yarn": (V3, {"rope_parameters": YARN | {"mscale_all_dim": 0.707}}),
    "v3-linear": (V3, {"rope_parameters": LINEAR}),
    "v3-H1": (V3, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "youtu": ("YoutuForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "dense"]}),
    "axk1": ("AXK1ForCausalLM", {}),
    "minicpm3": ("MiniCPM3ForCausalLM", {}),
    "minicpm3-yarn": ("MiniCPM3ForCausalLM", {"rope_parameters": YARN}),
    "minicpm3-linear": ("MiniCPM3ForCausalLM", {"rope_parameters": LINEAR}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {"num_layers": 1, "ffn_hidden_size": 16, "expert_ffn_hidden_size": 8, "head_dim": 8},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    ),
    "kimi_linear": ("KimiLinearForCausalLM", {"q_lora_rank": None} | KIMI_LINEAR),
    "kimi_linear-lora": ("KimiLinearForCausalLM", KIMI_LINEAR),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", {"rope_parameters": YARN}),
    "mistral4-nested": (
        "Mistral3ForConditionalGeneration",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    ),
}


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """Return a function that saves a small random model of a case once per dtype and shard size."""
    return SavedModels(CASES, tmp_path_factory.mktemp)


@pytest.mark.parametrize("case", CASES)
def test_float32_is_that_of_transformers(case, checkpoint_folder):
    folder = checkpoint_folder(case)
    prompts = hidden_states_of(PROMPTS)
    oracle = Oracle(folder, torch.float32)
    expected = [oracle(x) for x in prompts]
    layer = MLALayer.from_pretrained(folder, layer=1)
    largest = max(abs(y).max() for y in expected)
    for split in SPLITS.values():
        assert largest_error(run_split(layer, prompts, split), expected) <= 2e-5 * largest


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES] + [("v2-yarn", torch.float16), ("v3", torch.float16)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_half_precision_errs_at_most_twice_as_much_as_transformers(case, dtype, checkpoint_folder):
    folder = checkpoint_folder(case, dtype)
    prompts = hidden_states_of(PROMPTS, NUMPY_DTYPES[dtype])
    in_float32, in_half = Oracle(folder, torch.float32), Oracle(folder, dtype)
    expected = [in_float32(x) for x in prompts]
    allowed = 2 * largest_error([in_half(x) for x in prompts], expected)
    layer = MLALayer.from_pretrained(folder, layer=1)
    assert layer.dtype == NUMPY_DTYPES[dtype]
    for split in SPLITS.values():
        ours = run_split(layer, prompts, split)
        assert ours[0].dtype == layer.dtype
        assert largest_error(ours, expected) <= allowed


@pytest.mark.parametrize("case", ["v2-lora", "v3", "glm4_moe_lite", "minicpm3"])
def test_norms_of_small_latents_show_their_eps(case, checkpoint_folder):
    """Latents of variance 1e-5: an eps of rms_norm_eps (1e-5) would halve what 1e-6 leaves nearly alone."""
    folder = checkpoint_folder(case)
    (x,) = hidden_states_of([9])
    expected = Oracle(folder, torch.float32)(x * 0.003)
    layer = MLALayer.from_pretrained(folder, layer=1)
    (ours,) = run_split(layer, [x * np.float32(0.003)], [[9]])
    assert abs(ours - expected).max() <= 2e-5 * abs(expected).max()


@pytest.mark.parametrize("layer", [0, 1])
def test_longcat_counts_attentions(layer, checkpoint_folder):
    folder = checkpoint_folder("longcat_flash")
    prompts = hidden_states_of(PROMPTS)
    oracle = Oracle(folder, torch.float32, layer)
    expected = [oracle(x) for x in prompts]
    ours = run_split(MLALayer.from_pretrained(folder, layer=layer), prompts, SPLITS["ragged"])
    assert largest_error(ours, expected) <= 2e-5 * max(abs(y).max() for y in expected)


@pytest.mark.parametrize("case", ["kimi_k25", "mistral4-nested"])
@pytest.mark.parametrize("root", LAYER_ROOTS[1:])
def test_nested_models_are_found_as_published_and_as_transformers_saves_them(case, root, checkpoint_folder, tmp_path):
    source = Checkpoint(checkpoint_folder(case))
    tensors = {}
    for name in source.names:
        for saved_root in LAYER_ROOTS[1:]:
            if name.startswith(saved_root):
                tensors[root + name.removeprefix(saved_root)] = source.tensor(name)
    assert any(".self_attn." in name for name in tensors)
    save_checkpoint(tmp_path, source.config, tensors)
    prompts = hidden_states_of(PROMPTS)
    a, b = (
        run_split(MLALayer.from_pretrained(folder, layer=1), prompts, [PROMPTS]) for folder in (source.folder, tmp_path)
    )
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layer", [0, 2])
def test_layers_of_kimi_linear_that_are_not_mla_are_refused(layer, checkpoint_folder):
    with pytest.raises(ValueError, match=rf"layer: {layer} of kimi_linear is not MLA .*KDA.*MLA layers: 1$"):
        MLALayer.from_pretrained(checkpoint_folder("kimi_linear"), layer=layer)


def test_kimi_linear_s_attention_does_not_depend_on_the_order_of_earlier_tokens(checkpoint_folder):
    layer = MLALayer.from_pretrained(checkpoint_folder("kimi_linear"), layer=1)
    (x,) = hidden_states_of([9])
    (forward,), (shuffled,) = (run_split(layer, [rows], [[9]]) for rows in (x, np.concatenate([x[7::-1], x[8:]])))
    assert abs(forward[-1] - shuffled[-1]).max() <= 1e-6 * abs(forward).max()


EXTRA = {
    "kv_b_proj.bias": np.ones(96, np.float32),
    "q_a_layernorm.bias": np.ones(20, np.float32),
    "o_proj.weight_scale_inv": np.ones((1, 1), np.float32),
    "indexer.wq_b.weight": np.ones((4, 20), np.float32),
    "sinks": np.ones(3, np.float32),
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_tensor_that_would_be_left_out_is_an_error(name, checkpoint_folder, tmp_path):
    source = Checkpoint(checkpoint_folder("v3"))
    extra = "model.layers.1.self_attn." + name
    tensors = {name: source.tensor(name) for name in source.names} | {extra: EXTRA[name]}
    save_checkpoint(tmp_path, source.config, tensors)
    with pytest.raises(CheckpointError, match=f"tensor {extra} is not one of this attention's; expected .*o_proj"):
        MLALayer.from_pretrained(tmp_path, layer=1)
    MLALayer.from_pretrained(tmp_path, layer=0)


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "o_proj.input_scale", "attn.k_scale"])
def test_a_tensor_without_effect_is_left_out(name, checkpoint_folder, tmp_path):
    source = Checkpoint(checkpoint_folder("v3"))
    tensors = {name: source.tensor(name) for name in source.names}
    save_checkpoint(
        tmp_path, source.config, tensors | {"model.layers.1.self_attn." + name: np.full(4, 7.0, np.float32)}
    )
    prompts = hidden_states_of(PROMPTS)
    a, b = (
        run_split(MLALayer.from_pretrained(folder, layer=1), prompts, [PROMPTS]) for folder in (source.folder, tmp_path)
    )
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_every_family_is_tested_here():
    """kimi_k2 is a name of DeepSeek V3's architecture, tested in test_layer.py."""
    tested = {case.split("-")[0].replace("v2", "deepseek_v2").replace("v3", "deepseek_v3") for case in CASES}
    assert FAMILIES.keys() - tested == {"kimi_k2"}


def test_minicpm3_s_published_longrope_is_refused_by_name(checkpoint_folder):
    values = json.loads((checkpoint_folder("minicpm3") / "config.json").read_text())
    del values["rope_parameters"]
    values["rope_scaling"] = {
        "type": "longrope",
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32768,
    }
    with pytest.raises(ValueError, match="rope_type: 'longrope' is not supported; supported: default, linear, yarn"):
        MLAConfig.from_dict(values)
