"""MLAConfig, from any spelling of a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .checks import check_type
from .families import Family, find_family, text_config
from .rope import score_scaling

ROPE_TYPES = ("default", "linear", "yarn")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """The numbers that define one MLA layer, whatever its model family calls them.

    Parameters
    ----------
    hidden_size : int
        Width of the layer's input and output.
    num_heads : int
        H, query heads.
    q_lora_rank : int or None
        Width of the query latent; None: queries are projected directly.
    kv_lora_rank : int
        Dc, width of the latent that all heads share.
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
        Dn, Dr (even) and Dv: the widths of a head's non-rotary part, rotary part and value.
    norm_eps : float
        Added to the mean square in the latents' RMSNorm. Model families use 1e-6 here, and their
        `rms_norm_eps` for other norms only.
    rope_theta : float or None
        Base of the rotary wavelengths; None: nothing is rotated.
    rope_interleave : bool
        True: rotary pairs are features (2i, 2i+1); False: (i, i + Dr/2).
    rope_scaling : mapping or None
        `rope_type` ("default", "linear" or "yarn") and that type's values under their Hugging Face names.
    q_latent_scale, kv_latent_scale : float
        Multiply q and the normed latent.
    query_scale_beta : float
        beta in the factor ``1 + beta ln(1 + floor(position / original_max_position_embeddings))`` of q.

    Attributes
    ----------
    softmax_scale : float
        Derived: ``1 / sqrt(Dn + Dr)``, times the square of YaRN's mscale for `mscale_all_dim`.

    Raises
    ------
    ValueError
        A value out of its range; the message names it.

    Examples
    --------
    >>> config = MLAConfig(
    ...     hidden_size=2048, num_heads=16, q_lora_rank=None, kv_lora_rank=512,
    ...     qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> round(config.softmax_scale * 192**0.5, 6)
    1.0
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float | None = 10000.0
    rope_interleave: bool = True
    # Not hashed: a mapping is not hashable, and configs that differ only here may share a hash.
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    q_latent_scale: float = 1.0
    kv_latent_scale: float = 1.0
    query_scale_beta: float = 0.0
    softmax_scale: float = field(init=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            _check_int(name, getattr(self, name), minimum=1)
        if self.q_lora_rank is not None:
            _check_int("q_lora_rank", self.q_lora_rank, minimum=1)
        _check_int("qk_rope_head_dim", self.qk_rope_head_dim, minimum=0)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}")
        for name in ("norm_eps", "q_latent_scale", "kv_latent_scale"):
            _check_positive(name, getattr(self, name))
        if self.rope_theta is not None:
            _check_positive("rope_theta", self.rope_theta)
        elif self.rope_scaling is not None:
            raise ValueError(f"rope_scaling: expected None where rope_theta is None, got {self.rope_scaling!r}")
        if not isinstance(self.rope_interleave, bool):
            raise ValueError(f"rope_interleave: expected true or false, got {self.rope_interleave!r}")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_rope_scaling(self.rope_scaling, self.rope_theta))
        self._check_query_scale()
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        object.__setattr__(self, "softmax_scale", scale * score_scaling(self.rope_scaling))

    def _check_query_scale(self) -> None:
        if not _is_number(self.query_scale_beta) or self.query_scale_beta < 0:
            raise ValueError(f"query_scale_beta: expected a number >= 0, got {self.query_scale_beta!r}")
        if self.query_scale_beta and "original_max_position_embeddings" not in (self.rope_scaling or {}):
            raise ValueError("rope_scaling: query_scale_beta needs original_max_position_embeddings in it")

    @property
    def cache_row_width(self) -> int:
        """Dc + Dr, the features that a token keeps in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MLAConfig:
        """Read `config.json` of a Hugging Face checkpoint folder.

        Parameters
        ----------
        folder : path
            The checkpoint's folder.

        Returns
        -------
        MLAConfig

        Raises
        ------
        FileNotFoundError
            The folder or its `config.json` is missing.
        ValueError
            As `from_dict`, or `config.json` is not a JSON object.
        """
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MLAConfig:
        """Translate the contents of a Hugging Face `config.json`.

        Parameters
        ----------
        values : mapping
            The parsed file. Rotary values may come as `rope_parameters`, or as `rope_scaling` and
            `rope_theta`; the whole may be nested, as `text_config`.

        Returns
        -------
        MLAConfig

        Raises
        ------
        ValueError
            An unsupported `model_type` or rope type, or a missing or wrong value; the message names the key.

        Examples
        --------
        >>> values = dict(
        ...     model_type="deepseek_v2", hidden_size=2048, num_attention_heads=16, q_lora_rank=None,
        ...     kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        >>> MLAConfig.from_dict(values).num_heads
        16
        """
        check_type("values", values, Mapping, "a mapping")
        family = find_family(values)
        values = text_config(values)
        for key in family.always_true:
            if values.get(key, True) is not True:
                raise ValueError(f"{key}: {values['model_type']} is supported with true alone, got {values[key]!r}")
        if family.rope_interleave is None:
            # A null counts as false, as it does in the models' own code.
            interleave = values.get("rope_interleave", True)
            interleave = False if interleave is None else interleave
        else:
            interleave = family.rope_interleave
        dims = _read_dims(values, family)
        rope_theta, rope_scaling = _read_rope(values, family, dims)
        q_latent_scale = kv_latent_scale = 1.0
        if family.scales_latents:
            if dims["q_lora_rank"] is None:
                raise ValueError(f"q_lora_rank: {values['model_type']} needs a number, got null")
            q_latent_scale = math.sqrt(dims["hidden_size"] / dims["q_lora_rank"])
            kv_latent_scale = math.sqrt(dims["hidden_size"] / dims["kv_lora_rank"])
        return cls(
            **dims,
            rope_theta=rope_theta,
            rope_interleave=interleave,
            rope_scaling=rope_scaling,
            q_latent_scale=q_latent_scale,
            kv_latent_scale=kv_latent_scale,
            query_scale_beta=_read_query_scale(rope_scaling) if family.scales_queries else 0.0,
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return `config.json` of a checkpoint folder as a dict; errors name the file."""
    check_type("folder", folder, (str, os.PathLike), "a path")
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"checkpoint folder {path.parent} does not exist")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _read_dims(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    keys = {"num_heads": "num_attention_heads"}
    keys |= {
        name: name for name in ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    }
    for key in keys.values():
        if key not in values:
            raise ValueError(f"{key}: missing from config.json")
        if key != "q_lora_rank" or values[key] is not None:
            _check_int(key, values[key], minimum=0 if key == "qk_rope_head_dim" else 1)
    dims = {name: values[key] for name, key in keys.items()}
    if family.derives_v_head_dim and values.get("v_head_dim") is None:
        dims["v_head_dim"] = dims["hidden_size"] // dims["num_heads"]
    elif "v_head_dim" not in values:
        raise ValueError("v_head_dim: missing from config.json")
    else:
        dims["v_head_dim"] = values["v_head_dim"]
    return dims


def _read_rope(
    values: Mapping[str, Any], family: Family, dims: Mapping[str, Any]
) -> tuple[float | None, dict[str, Any] | None]:
    """Return theta and the rope values that matter, from either spelling."""
    if family.rope_theta is None:
        return None, None
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = values.get(key) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}: expected an object, got {given!r}")
    theta = given.get("rope_theta", values.get("rope_theta", family.rope_theta))
    _check_positive("rope_theta", theta)
    rope = {k: v for k, v in given.items() if k in _ROPE_KEYS and v is not None}
    rope["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if rope["rope_type"] == "yarn":
        _fill_yarn(rope, values)
    if rope["rope_type"] == "default" and not family.scales_queries:
        return theta, None
    _check_rotary_width(given, values, family, dims)
    return theta, rope


_ROPE_KEYS = frozenset(
    {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
        "llama_4_scaling_beta",
    }
)


def _fill_yarn(rope: dict[str, Any], values: Mapping[str, Any]) -> None:
    original_key, longest = "original_max_position_embeddings", values.get("max_position_embeddings")
    if original_key in values:  # beside the rope values it wins over the one among them
        rope[original_key] = values[original_key]
    elif original_key not in rope:
        if longest is None:
            raise ValueError(f"{original_key}: missing from the rope values, as is max_position_embeddings")
        rope[original_key] = longest
    if "factor" not in rope:
        _check_positive(original_key, rope[original_key])
        if longest is None:
            raise ValueError("factor: missing from the rope values, as is max_position_embeddings")
        _check_positive("max_position_embeddings", longest)
        rope["factor"] = longest / rope[original_key]


def _check_rotary_width(
    given: Mapping[str, Any], values: Mapping[str, Any], family: Family, dims: Mapping[str, Any]
) -> None:
    """Refuse a `partial_rotary_factor` that rotates other than all of the rotary part."""
    share = given.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share is None:
        return
    _check_positive("partial_rotary_factor", share)
    rotary = dims["qk_rope_head_dim"]
    width = rotary + dims["qk_nope_head_dim"] if family.rotary_share_of_head else rotary
    if int(width * share) != rotary:
        raise ValueError(f"partial_rotary_factor: {share} of {width} features is not qk_rope_head_dim ({rotary})")


def _read_query_scale(rope_scaling: Mapping[str, Any] | None) -> float:
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if key not in (rope_scaling or {}):
            raise ValueError(f"{key}: missing from the rope values")
    return (rope_scaling or {})["llama_4_scaling_beta"]


def _checked_rope_scaling(rope_scaling: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    check_type("rope_scaling", rope_scaling, Mapping, "a mapping or None")
    rope_type = rope_scaling.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type: {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    required = {
        "default": (),
        "linear": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
    }[rope_type]
    for key in required:
        if rope_scaling.get(key) is None:
            raise ValueError(f"{key}: missing from the rope values of type {rope_type}")
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if rope_scaling.get(key) is not None:
            _check_positive(key, rope_scaling[key])
    for key in ("mscale", "mscale_all_dim"):
        value = rope_scaling.get(key)
        if value is not None and not (_is_number(value) and value >= 0):
            raise ValueError(f"{key}: expected a number >= 0, got {value!r}")
    if rope_type == "yarn" and theta is not None and theta <= 1:
        raise ValueError(f"rope_theta: yarn needs a number > 1, got {theta!r}")
    return dict(rope_scaling)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _check_int(name: str, value: Any, *, minimum: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
