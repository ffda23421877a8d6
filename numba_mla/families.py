"""The one table of how the model families differ, and where a family's checkpoints keep its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How one model family differs from DeepSeek V3.

    Attributes
    ----------
    rope_interleave : bool or None
        Pair order of the rotary features; None: the config's `rope_interleave`, True when it is absent.
    rope_theta : float or None
        Used when the config has none; None: the family does not rotate, whatever its config says.
    scales_latents : bool
        q is multiplied by sqrt(hidden_size / q_lora_rank), the normed latent by
        sqrt(hidden_size / kv_lora_rank).
    scales_queries : bool
        q is multiplied by ``1 + beta ln(1 + floor(position / original_max))``, where beta is
        `llama_4_scaling_beta`.
    rotary_share_of_head : bool
        `partial_rotary_factor` is Dr's share of Dn + Dr; else of Dr itself.
    derives_v_head_dim : bool
        A missing `v_head_dim` means hidden_size / num_heads.
    attentions_per_layer : int
        More than one: they are numbered below `self_attn`, and `layer` counts attentions.
    has_linear_layers : bool
        Some layers are linear attention (KDA); the config says which.
    always_true : tuple of str
        Flags of the published configs that the family's attention takes for granted.
    """

    rope_interleave: bool | None = None
    rope_theta: float | None = 10000.0
    scales_latents: bool = False
    scales_queries: bool = False
    rotary_share_of_head: bool = False
    derives_v_head_dim: bool = False
    attentions_per_layer: int = 1
    has_linear_layers: bool = False
    always_true: tuple[str, ...] = field(default=())


FAMILIES = {
    "deepseek_v2": Family(rope_interleave=True),
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "youtu": Family(),
    "glm4_moe_lite": Family(),
    "axk1": Family(),
    "minicpm3": Family(rope_interleave=False, derives_v_head_dim=True),
    "longcat_flash": Family(
        rope_interleave=True,
        rope_theta=1e7,
        scales_latents=True,
        attentions_per_layer=2,
        always_true=("mla_scale_q_lora", "mla_scale_kv_lora"),
    ),
    "mistral4": Family(scales_queries=True, rotary_share_of_head=True),
    "kimi_linear": Family(rope_theta=None, has_linear_layers=True, always_true=("mla_use_nope",)),
}
SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "glm5_next", "glm5_next_text")

# What a nested text model is where its own config does not say.
NESTED_DEFAULTS = {"kimi_k25": "deepseek_v3"}
# What the layers of the text model start with: alone; nested, as published; nested, as transformers writes
# it, which renames those of kimi_k25 together with its vision model's.
LAYER_ROOTS = (
    "model.layers.",
    "language_model.model.layers.",
    "model.language_model.layers.",
    "language_model.model.blocks.",
)


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a `config.json`: its `text_config`, or all of it.

    Examples
    --------
    >>> text_config({"model_type": "kimi_k25", "text_config": {"hidden_size": 7168}})
    {'model_type': 'deepseek_v3', 'hidden_size': 7168}
    """
    if "text_config" not in values or values.get("model_type") in SPARSE_FAMILIES:
        return values
    nested = values["text_config"]
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config: expected an object, got {nested!r}")
    default = NESTED_DEFAULTS.get(values.get("model_type", ""))
    return nested if default is None else {"model_type": default} | dict(nested)


def find_family(values: Mapping[str, Any]) -> Family:
    """Return the row of `FAMILIES` for a `config.json`, or raise a ValueError that names the `model_type`."""
    values = text_config(values)
    if "model_type" not in values:
        raise ValueError("model_type: missing from config.json")
    model_type = values["model_type"]
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    why = "its sparse attention is not supported" if model_type in SPARSE_FAMILIES else "not supported"
    raise ValueError(f"model_type: {model_type!r}: {why}; supported: {', '.join(sorted(FAMILIES))}")


def attention_prefix(values: Mapping[str, Any], layer: int) -> str:
    """Return what the names of attention `layer`'s tensors start with in a published checkpoint.

    Raises
    ------
    ValueError
        The layer is not MLA; the message lists those that are.

    Examples
    --------
    >>> attention_prefix({"model_type": "deepseek_v3"}, 5)
    'model.layers.5.self_attn.'
    >>> attention_prefix({"model_type": "longcat_flash"}, 5)
    'model.layers.2.self_attn.1.'
    >>> attention_prefix({"model_type": "kimi_k25", "text_config": {}}, 5)
    'language_model.model.layers.5.self_attn.'
    """
    root = LAYER_ROOTS[0] if text_config(values) is values else LAYER_ROOTS[1]
    return root + attention_name(values, layer)


def attention_name(values: Mapping[str, Any], layer: int) -> str:
    """Return the part of `attention_prefix` that is the same wherever the text model is nested."""
    family = find_family(values)
    if family.has_linear_layers:
        _check_is_mla(text_config(values), layer)
    per_layer = family.attentions_per_layer
    if per_layer == 1:
        return f"{layer}.self_attn."
    return f"{layer // per_layer}.self_attn.{layer % per_layer}."


def _check_is_mla(values: Mapping[str, Any], layer: int) -> None:
    mla_layers = _find_mla_layers(values)
    if layer not in mla_layers:
        raise ValueError(
            f"layer: {layer} of {values['model_type']} is not MLA but linear attention (KDA), which is not supported, "
            f"or not there; MLA layers: {', '.join(map(str, mla_layers)) or 'none'}"
        )


def _find_mla_layers(values: Mapping[str, Any]) -> list[int]:
    """Return the MLA layers of a model that has others too, from any of the spellings."""
    kinds, linear = values.get("layer_types"), values.get("linear_attn_config") or {}
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ValueError(f"layer_types: expected a list, got {kinds!r}")
        return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if "full_attn_layers" in linear:
        numbers = linear["full_attn_layers"]
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"full_attn_layers: expected a list of integers, got {numbers!r}")
        return [number - 1 for number in numbers]  # counted from 1
    num_layers = values.get("num_hidden_layers", 0)
    if not isinstance(num_layers, int):
        raise ValueError(f"num_hidden_layers: expected an integer, got {num_layers!r}")
    return list(range(4, num_layers, 4))
