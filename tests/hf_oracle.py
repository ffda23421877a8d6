"""Small random models that transformers builds and saves, and its own attention modules as oracles."""

import json

import ml_dtypes
import numpy as np
import torch
import transformers

from numba_mla.cache import PagedLatentCache

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
# Classes that hold a text model of another family beside a vision model: its family, and a tiny vision model.
NESTED = {
    "Kimi_K25ForConditionalGeneration": (
        "deepseek_v3",
        {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral4",
        {"model_type": "pixtral", "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
        | {"intermediate_size": 16, "head_dim": 8, "image_size": 32, "patch_size": 16},
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


class SavedModels:
    """Folders with the random models of a table of cases, saved once per dtype and shard size.

    A case is the name of a class of transformers and what differs from TINY in its config.
    """

    def __init__(self, cases, new_folder):
        self._cases, self._new_folder, self._folders = cases, new_folder, {}

    def __call__(self, case, dtype=torch.float32, max_shard_size="1GB"):
        key = (case, dtype, max_shard_size)
        if key not in self._folders:
            self._folders[key] = self._new_folder("checkpoint")
            model = random_model(*self._cases[case]).to(dtype)
            model.save_pretrained(self._folders[key], max_shard_size=max_shard_size)
        return self._folders[key]


def random_model(class_name, changes):
    model_class = getattr(transformers, class_name)
    values = TINY | changes
    if class_name.startswith("Longcat"):
        values = {k: v for k, v in values.items() if k not in ("num_hidden_layers", "intermediate_size")}
    if class_name in NESTED:
        model_type, vision_config = NESTED[class_name]
        values = {"text_config": values | {"model_type": model_type}, "vision_config": vision_config}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


class Oracle:
    """Attention `layer` of the model that transformers builds for a folder, run on whole prompts."""

    def __init__(self, folder, dtype, layer=1):
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        text_model = getattr(model.model, "language_model", model.model)
        if architecture.startswith("Longcat"):
            self.attention = text_model.layers[layer // 2].self_attn[layer % 2]
        else:
            self.attention = text_model.layers[layer].self_attn
        self.rotary_emb = getattr(text_model, "rotary_emb", None)
        self.dtype = dtype

    @torch.no_grad()
    def __call__(self, hidden_states):
        """Run (T, hidden_size) float32 through the module in its dtype and return float32."""
        x = torch.from_numpy(hidden_states)[None].to(self.dtype)
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(self.dtype).min, dtype=self.dtype)
        arguments = {"attention_mask": mask.triu(1)[None, None], "position_ids": positions}
        if self.rotary_emb is not None:
            arguments["position_embeddings"] = self.rotary_emb(x, positions)
        output, _ = self.attention(hidden_states=x, **arguments)
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
