"""MLALayer against the attention modules of transformers: same checkpoint, same hidden states."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from numba_mla.cache import PagedLatentCache
from numba_mla.checkpoint import CheckpointError, attention_shapes, save_checkpoint
from numba_mla.config import MLAConfig
from numba_mla.layer import MLALayer

TINY = {
    "vocab_size": 16,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "max_position_embeddings": 1280,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"

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
}
PROMPTS = (19, 1, 8)
SPLITS = {
    "one-go": [PROMPTS],
    "chunks-of-1": [[1 if step < n else 0 for n in PROMPTS] for step in range(max(PROMPTS))],
    "chunks-of-3": [[min(3, max(0, n - 3 * step)) for n in PROMPTS] for step in range(7)],
    "chunks-of-7": [[min(7, max(0, n - 7 * step)) for n in PROMPTS] for step in range(3)],
    "ragged": [[5, 0, 3], [0, 1, 4], [13, 0, 0], [1, 0, 1]],
}
NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
}


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """Return a function that saves a small random model of a case once per dtype and shard size."""
    folders = {}

    def get(case, dtype=torch.float32, max_shard_size="1GB"):
        key = (case, dtype, max_shard_size)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("checkpoint")
            model = random_model(*CASES[case]).to(dtype)
            model.save_pretrained(folders[key], max_shard_size=max_shard_size)
        return folders[key]

    return get


def random_model(class_name, changes):
    model_class = getattr(transformers, class_name)
    values = TINY | changes
    if class_name.startswith("Longcat"):
        values = {k: v for k, v in values.items() if k not in ("num_hidden_layers", "intermediate_size")}
    config = model_class.config_class(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


class Oracle:
    """The attention module that transformers builds for a folder, run on whole prompts."""

    def __init__(self, folder, dtype):
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, architecture).from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        is_longcat = architecture.startswith("Longcat")
        layers = self.model.model.layers
        self.attention = layers[0].self_attn[1] if is_longcat else layers[1].self_attn
        self.dtype = dtype

    @torch.no_grad()
    def __call__(self, hidden_states):
        """Run (T, hidden_size) float32 through the module in its dtype and return float32."""
        x = torch.from_numpy(hidden_states)[None].to(self.dtype)
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(self.dtype).min, dtype=self.dtype)
        output, _ = self.attention(
            hidden_states=x,
            position_embeddings=self.model.model.rotary_emb(x, positions),
            attention_mask=mask.triu(1)[None, None],
            position_ids=positions,
        )
        return output[0].float().numpy()


def hidden_states_of(prompts, dtype=np.float32):
    """Return standard normal hidden states per prompt, float32 values that `dtype` holds exactly."""
    generator = np.random.default_rng(1)
    return [generator.standard_normal((n, TINY["hidden_size"])).astype(dtype).astype(np.float32) for n in prompts]


def run_split(layer, prompts, split, **cache_options):
    """Feed the prompts to the layer in the steps of a split; return each prompt's outputs."""
    cache = PagedLatentCache(layer.config, 20, 4, **({"dtype": layer.dtype} | cache_options))
    outputs = [[] for _ in prompts]
    for request_id in range(len(prompts)):
        cache.add(request_id)
    for counts in split:
        done = [cache.seq_len(i) for i in range(len(prompts))]
        chunks = [x[n : n + count] for x, n, count in zip(prompts, done, counts, strict=True)]
        batch = cache.append(dict(enumerate(counts)))
        step = layer(np.concatenate(chunks).astype(layer.dtype), cache, batch)
        for output, part in zip(outputs, np.split(step, batch.query_start_loc[1:-1]), strict=True):
            output.append(part)
    return [np.concatenate(parts) for parts in outputs]


def largest_error(ours, exact):
    return max(abs(a.astype(np.float64) - b).max() for a, b in zip(ours, exact, strict=True))


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
        ("float8 weights", CheckpointError, r"o_proj\.weight: expected float32.*float8_e4m3fn"),
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
    elif damage == "float8 weights":
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
        ({"path": "materialised"}, ValueError, "path: expected one of auto, absorbed, got 'materialised'"),
        ({"out": np.ones((3, 16))}, TypeError, "out: .*float64"),
        ({"out": np.ones((2, 16), np.float32)}, ValueError, r"out: .*\(3, 16\), got .*\(2, 16\)"),
        ({"out": np.broadcast_to(np.float32(0), (3, 16))}, ValueError, "out: .*writable"),
    ],
)
def test_a_wrong_call_names_the_argument(changes, error, message, ones_layer):
    call = make_call(ones_layer) | changes
    with pytest.raises(error, match=message):
        ones_layer(call.pop("hidden_states"), call.pop("cache"), call.pop("batch"), **call)


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
    with pytest.raises(ValueError, match="cache: expected rows of 10 values, 8 of them latent, got 10 and 6"):
        ones_layer(call["hidden_states"], PagedLatentCache(other, 2, 4, dtype=np.float32), call["batch"])


@pytest.mark.parametrize("path", ["auto", "absorbed"])
def test_out_is_filled_and_returned(path, ones_layer):
    call = make_call(ones_layer)
    expected = ones_layer(**call)
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


def test_a_batch_without_tokens(ones_layer):
    cache = PagedLatentCache(CONFIG, 2, 4, dtype=np.float32)
    assert ones_layer(np.ones((0, 16), np.float32), cache, cache.append({})).shape == (0, 16)
    cache.add("a")
    assert ones_layer(np.ones((0, 16), np.float32), cache, cache.append({"a": 0})).shape == (0, 16)
