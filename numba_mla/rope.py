"""Rotary position embedding: the frequencies of each rope type, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .checks import FLOAT_DTYPES, check_array, check_flag, check_integers, check_scale


def apply_rope(
    x: np.ndarray,
    positions: np.ndarray,
    *,
    inv_freq: np.ndarray,
    interleaved: bool,
    scaling: float = 1.0,
) -> np.ndarray:
    """Rotate each pair of features of each token by its position times the pair's frequency.

    With angle t = position * inv_freq[i], pair i becomes
    ``(a cos t - b sin t, b cos t + a sin t) * scaling``. The pairs stay where they were.

    Parameters
    ----------
    x : ndarray, (T, H, Dr) or (T, Dr), float32, float16 or bfloat16
        Rotary part of queries or keys.
    positions : array_like, (T,), int32 or int64
        Absolute position of each token.
    inv_freq : ndarray, (Dr/2,), float32 or float64
        Angle in radians that pair i turns per position.
    interleaved : bool
        True: pair i is features (2i, 2i+1). False (half-split): features (i, i + Dr/2).
    scaling : float
        Multiplies cos and sin (YaRN's attention factor).

    Returns
    -------
    ndarray, x's shape and dtype
        A new array.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or scaling other than the above.

    Notes
    -----
    Angles, cos and sin are computed in float64 and rounded to float32 once, so they are right to half an ulp
    at any position; the rotation is float32.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 0.0, 0.0, 2.0]], dtype=np.float32)
    >>> quarter_turn = np.array([np.pi / 2, np.pi / 2])
    >>> apply_rope(x, [1], inv_freq=quarter_turn, interleaved=True).round(6).tolist()
    [[0.0, 1.0, -2.0, 0.0]]
    >>> apply_rope(x, [1], inv_freq=quarter_turn, interleaved=False).round(6).tolist()
    [[0.0, -2.0, 1.0, 0.0]]
    """
    shape = ("T", "H", "Dr") if isinstance(x, np.ndarray) and x.ndim == 3 else ("T", "Dr")
    check_array("x", x, shape, FLOAT_DTYPES)
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of features, got shape {x.shape}")
    positions = check_integers("positions", positions, x.shape[:1])
    frequencies = (np.dtype(np.float32), np.dtype(np.float64))
    check_array("inv_freq", inv_freq, (x.shape[-1] // 2,), frequencies)
    interleaved = check_flag("interleaved", interleaved)
    cos, sin = rotation(positions, inv_freq, check_scale("scaling", scaling))
    return rotate(x, cos, sin, interleaved=interleaved).astype(x.dtype, copy=False)


def rotation(positions: np.ndarray, inv_freq: np.ndarray, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scaling * cos and scaling * sin of each token's angles, both (T, Dr/2) float32."""
    angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
    return (np.cos(angles) * scaling).astype(np.float32), (np.sin(angles) * scaling).astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """Rotate the pairs of x, (T, H, Dr) or (T, Dr), by `rotation`'s cos and sin; the result is float32."""
    if x.ndim == 3:
        cos, sin = cos[:, None, :], sin[:, None, :]
    x = x.astype(np.float32, copy=False)
    rotated = np.empty(x.shape, dtype=np.float32)
    first, second = _pair_members(x.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


def inverse_frequencies(dim: int, theta: float | None, rope_scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Return the angle per position of each pair, (dim/2,) float64.

    The default is ``theta ** (-2i / dim)``. Linear scaling divides it by the factor. YaRN divides only the
    slow pairs, and blends the pairs between `beta_fast` and `beta_slow` turns over the original context.

    Parameters
    ----------
    dim : int
        Dr, the width of the rotary part.
    theta : float or None
        Base of the wavelengths; None: no pair turns.
    rope_scaling : mapping or None
        `MLAConfig.rope_scaling`.

    Returns
    -------
    ndarray, (dim/2,), float64

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2.

    Examples
    --------
    >>> inverse_frequencies(4, 10000.0, None).tolist()
    [1.0, 0.01]
    >>> inverse_frequencies(4, 10000.0, {"rope_type": "linear", "factor": 4.0}).tolist()
    [0.25, 0.0025]
    """
    if theta is None:
        return np.zeros(dim // 2)
    inv_freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / max(dim, 1))
    if not rope_scaling or rope_scaling["rope_type"] == "default":
        return inv_freq
    if rope_scaling["rope_type"] == "yarn":
        slow = _yarn_slow_share(dim, theta, rope_scaling)
        return inv_freq * (1 - slow) + inv_freq / rope_scaling["factor"] * slow
    return inv_freq / rope_scaling["factor"]


def rotation_scaling(rope_scaling: Mapping[str, Any] | None) -> float:
    """Return what multiplies cos and sin: YaRN's attention factor, else 1.

    Examples
    --------
    >>> rotation_scaling({"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707})
    1.0
    """
    if not rope_scaling or rope_scaling["rope_type"] != "yarn":
        return 1.0
    if rope_scaling.get("attention_factor") is not None:
        return float(rope_scaling["attention_factor"])
    factor = rope_scaling["factor"]
    mscale, mscale_all_dim = rope_scaling.get("mscale"), rope_scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def score_scaling(rope_scaling: Mapping[str, Any] | None) -> float:
    """Return what multiplies the softmax scale: ``yarn_mscale(factor, mscale_all_dim)`` squared, else 1.

    Examples
    --------
    >>> round(score_scaling({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}), 4)
    1.8739
    """
    if not rope_scaling or rope_scaling["rope_type"] == "default" or not rope_scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(rope_scaling["factor"], rope_scaling["mscale_all_dim"]) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return ``0.1 mscale ln(factor) + 1``, or 1 where the context is not extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_slow_share(dim: int, theta: float, rope_scaling: Mapping[str, Any]) -> np.ndarray:
    """Return how much of each pair's frequency is interpolated: 0 for fast pairs, 1 for slow ones."""
    original = rope_scaling["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(rope_scaling.get("beta_fast") or 32)
    high = pair_turning(rope_scaling.get("beta_slow") or 1)
    if rope_scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)


def _pair_members(dim: int, interleaved: bool) -> tuple[slice, slice]:
    if interleaved:
        return slice(0, dim, 2), slice(1, dim, 2)
    return slice(0, dim // 2), slice(dim // 2, dim)
