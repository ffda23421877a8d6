"""A call's outputs against the reference: from hidden states to outputs, one stage at a time.

Every stage is compared with its float64 definition on the bits that the stage before it stored, so that an
error is held against the tolerance of one product, one norm or one attention, and not of their sum. The chain
is closed: it starts from the hidden states and the weights as loaded, passes through the rows in the cache,
and ends at the outputs that the layer returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from . import ops, reference
from .attention import split_by_path
from .batch import Batch, Requests
from .cache import PagedLatentCache
from .config import MLAConfig
from .layer import MLALayer
from .rope import inverse_frequencies, rotation, rotation_scaling
from .runtime import select_isa
from .testing.tolerance import FLUSHED, U_FLOAT32, bmm_bounds, excess, extend_bounds, prefill_bounds

FLOAT32 = np.dtype(np.float32)
STAGES = (
    "queries",
    "cached latents",
    "absorbed queries",
    "attention",
    "values",
    "keys of heads",
    "values of heads",
    "attention to keys of heads",
    "outputs",
)


@dataclass(frozen=True)
class StageError:
    """How far one stage of a layer was from its definition.

    Parameters
    ----------
    stage : str
        What was computed.
    largest_error : float
        Of all its values, from the float64 reference.
    of_tolerance : float
        The largest error over its own tolerance: within it if at most 1.
    """

    stage: str
    largest_error: float
    of_tolerance: float

    @property
    def within_tolerance(self) -> bool:
        """Whether every value was."""
        return self.of_tolerance <= 1.0


@dataclass(frozen=True)
class Bounded:
    """Float64 values, and how far the computed ones may be from them, element by element."""

    value: np.ndarray
    bound: np.ndarray

    def __getitem__(self, key: Any) -> Bounded:
        return Bounded(self.value[key], self.bound[key])

    def reshape(self, *shape: int) -> Bounded:
        """Both arrays in another shape."""
        return Bounded(self.value.reshape(shape), self.bound.reshape(shape))

    def rounded(self, dtype: np.dtype) -> Bounded:
        """What is left after storing the computed values in a format."""
        info = ml_dtypes.finfo(dtype)
        unit, floor = float(info.eps) / 2, FLUSHED + float(info.smallest_subnormal) / 2
        return Bounded(self.value, self.bound + unit * (abs(self.value) + self.bound) + floor)

    def scaled(self, factor: np.ndarray | float) -> Bounded:
        """The product with a factor that was rounded to float32."""
        value = self.value * factor
        bound = self.bound * factor
        return Bounded(value, bound + 2 * U_FLOAT32 * (abs(value) + bound))

    def error_of(self, stage: str, got: np.ndarray) -> StageError:
        """Hold computed values against these."""
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf
            largest = abs(got - self.value).max(initial=0.0)
        return StageError(stage, float(largest), excess(got, self.value, self.bound))


def check_layer(
    layer: MLALayer,
    weights: Mapping[str, np.ndarray],
    hidden_states: np.ndarray,
    outputs: np.ndarray,
    cache: PagedLatentCache,
    batch: Batch,
) -> tuple[StageError, ...]:
    """Check what a layer's call returned and wrote, with each request on the path that `plan_path` chose.

    Parameters
    ----------
    layer : MLALayer
        What was run.
    weights : mapping of str to ndarray
        What it was built from, fp8 dequantised.
    hidden_states, outputs : ndarray, (T, hidden_size)
        The call's inputs, in the layer's dtype, and its outputs.
    cache : PagedLatentCache
        With the rows that the call wrote, and maybe later ones.
    batch : Batch
        The call's.

    Returns
    -------
    tuple of StageError
        In the order of STAGES, those of the paths that were taken.
    """
    c = layer.config
    inv_freq = inverse_frequencies(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling)
    cos, sin = rotation(batch.positions, inv_freq, rotation_scaling(c.rope_scaling))
    q = layer._project_queries(hidden_states, batch.positions, cos, sin)
    kv_cache = cache.data[0]
    kv_c, k_pe, _ = ops.gather_cache(
        kv_cache,
        batch.block_table,
        batch.seq_lens,
        starts=batch.seq_lens - np.diff(batch.query_start_loc),
        kv_lora_rank=c.kv_lora_rank,
    )
    queries = queries_bound(c, weights, hidden_states, batch.positions, layer.dtype)
    latents = latents_bound(c, weights, hidden_states, batch.positions).rounded(cache.dtype)
    errors: tuple[StageError, ...] = (
        queries.error_of("queries", q),
        latents.error_of("cached latents", np.concatenate([kv_c, k_pe], axis=-1)),
    )
    values = np.empty((len(q), c.num_heads, c.v_head_dim), layer.dtype)
    for path, requests, tokens in split_by_path(batch.requests, c, layer.dtype):
        own = q[tokens]
        if path == "absorbed":
            q_nope, q_pe = own[..., : c.qk_nope_head_dim], own[..., c.qk_nope_head_dim :]
            queries_of = q_nope.astype(layer.dtype), q_pe.astype(cache.dtype)
            values[tokens], found = check_absorbed(c, weights, *queries_of, kv_cache, requests)
        else:
            values[tokens], found = check_materialised(layer, weights, own.astype(layer.dtype), kv_cache, requests)
        errors += found
    projected = linear(exact(values.reshape(len(values), -1)), weights, "o_proj", outputs.dtype)
    errors += (projected.error_of("outputs", outputs),)
    return tuple(sorted(errors, key=lambda error: STAGES.index(error.stage)))


def worst_of_calls(calls: Iterable[tuple[StageError, ...]]) -> tuple[StageError, ...]:
    """The largest errors of each stage in several calls."""
    by_stage: dict[str, list[StageError]] = {}
    for error in chain.from_iterable(calls):
        by_stage.setdefault(error.stage, []).append(error)
    return tuple(
        StageError(
            stage,
            # NaN is the largest.
            float(np.max([error.largest_error for error in by_stage[stage]])),
            float(np.max([error.of_tolerance for error in by_stage[stage]])),
        )
        for stage in STAGES
        if stage in by_stage
    )


def check_absorbed(
    config: MLAConfig,
    weights: Mapping[str, np.ndarray],
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    kv_cache: np.ndarray,
    requests: Requests,
) -> tuple[np.ndarray, tuple[StageError, ...]]:
    """Return the heads' values (T, H, Dv) and the errors of absorption, attention and the way back."""
    c = config
    dtype = q_nope.dtype
    heads = (c.num_heads, c.qk_nope_head_dim, c.v_head_dim)
    w_uk, w_uv = ops.absorb_weights(weights["kv_b_proj.weight"], *heads)
    absorbed, absorbed_error = checked_bmm("absorbed queries", q_nope, w_uk, FLOAT32)
    q = (absorbed.astype(kv_cache.dtype), q_pe)
    metadata = (kv_cache, *requests)
    settings = {"scale": c.softmax_scale, "kv_lora_rank": c.kv_lora_rank}
    attended, _ = ops.extend(q, *metadata, **settings, out=np.empty(absorbed.shape, FLOAT32))
    rounding = select_isa().p_rounding
    expected = extend_bounds(q, *metadata, **settings, p_rounding=rounding, out_dtype=FLOAT32)
    attention_error = Bounded(expected.out, expected.out_bound).error_of("attention", attended)
    values, values_error = checked_bmm("values", attended.astype(dtype), w_uv, dtype)
    return values, (absorbed_error, attention_error, values_error)


def check_materialised(
    layer: MLALayer,
    weights: Mapping[str, np.ndarray],
    q: np.ndarray,
    kv_cache: np.ndarray,
    requests: Requests,
) -> tuple[np.ndarray, tuple[StageError, ...]]:
    """Return the heads' values (T, H, Dv) and the errors of keys, values and attention over them.

    Chunks of cached tokens are merged with float32 weights, as splits of keys are: the tolerance is that of
    attention to all keys at once.
    """
    c = layer.config
    w_uk, w_uv = ops.absorb_weights(weights["kv_b_proj.weight"], c.num_heads, c.qk_nope_head_dim, c.v_head_dim)
    kv_c, k_pe, kv_start_loc = ops.gather_cache(
        kv_cache, requests.block_table, requests.seq_lens, kv_lora_rank=c.kv_lora_rank, dtype=layer.dtype
    )
    rows = np.broadcast_to(kv_c[:, None], (len(kv_c), c.num_heads, c.kv_lora_rank))
    k_nope, keys_error = checked_bmm("keys of heads", rows, w_uk.swapaxes(1, 2), layer.dtype)
    v, values_error = checked_bmm("values of heads", rows, w_uv, layer.dtype)
    k = np.concatenate([k_nope, np.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], k_pe.shape[1]))], axis=-1)
    attended = np.empty((len(q), c.num_heads, c.v_head_dim), layer.dtype)
    layer._attention.materialised(q, kv_cache, requests, None, attended)
    expected = prefill_bounds(
        q,
        k,
        v,
        requests.query_start_loc,
        kv_start_loc,
        scale=c.softmax_scale,
        p_rounding=select_isa(None, layer.dtype.name).p_rounding,
    )
    attention_error = Bounded(expected.out, expected.out_bound).error_of("attention to keys of heads", attended)
    return attended, (keys_error, values_error, attention_error)


def checked_bmm(stage: str, a: np.ndarray, w: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, StageError]:
    """Return the product of token-major a (T, H, K) with w (H, N, K), (T, H, N) of dtype, and its error."""
    out = np.empty((len(a), len(w), w.shape[1]), dtype)
    ops.bmm(a.swapaxes(0, 1), ops.pack_weight(w), out=out.swapaxes(0, 1))
    expected = Bounded(*bmm_bounds(a.swapaxes(0, 1), w, out_dtype=dtype))
    return out, expected.error_of(stage, out.swapaxes(0, 1))


def queries_bound(
    config: MLAConfig,
    weights: Mapping[str, np.ndarray],
    hidden_states: np.ndarray,
    positions: np.ndarray,
    dtype: np.dtype,
) -> Bounded:
    """Return what [q_nope | rotated q_pe] of all heads has to be, (T, H, Dn+Dr)."""
    c = config
    x = exact(hidden_states)
    if c.q_lora_rank is not None:
        latent = rms_norm(linear(x, weights, "q_a_proj"), weights["q_a_layernorm.weight"], c.norm_eps)
        q = linear(latent.rounded(dtype), weights, "q_b_proj")
    else:
        q = linear(x, weights, "q_proj")
    q = q.reshape(len(x.value), c.num_heads, -1).scaled(c.q_latent_scale)
    if c.query_scale_beta:
        original = (c.rope_scaling or {})["original_max_position_embeddings"]
        q = q.scaled(1 + c.query_scale_beta * np.log1p(positions // original)[:, None, None])
    return joined(q[..., : c.qk_nope_head_dim], rope(c, q[..., c.qk_nope_head_dim :], positions))


def latents_bound(
    config: MLAConfig, weights: Mapping[str, np.ndarray], hidden_states: np.ndarray, positions: np.ndarray
) -> Bounded:
    """Return what the rows [kv_c | k_pe] have to be before they are stored, (T, Dc+Dr)."""
    c = config
    kv = linear(exact(hidden_states), weights, "kv_a_proj_with_mqa")
    normed = rms_norm(kv[:, : c.kv_lora_rank], weights["kv_a_layernorm.weight"], c.norm_eps)
    return joined(normed.scaled(c.kv_latent_scale), rope(c, kv[:, c.kv_lora_rank :], positions))


def exact(stored: np.ndarray) -> Bounded:
    """Values as they are stored."""
    return Bounded(stored.astype(np.float64), np.zeros(stored.shape))


def joined(left: Bounded, right: Bounded) -> Bounded:
    """Two ranges of features side by side."""
    return Bounded(
        np.concatenate([left.value, right.value], axis=-1), np.concatenate([left.bound, right.bound], axis=-1)
    )


def linear(x: Bounded, weights: Mapping[str, np.ndarray], module: str, dtype: np.dtype = FLOAT32) -> Bounded:
    """A projection, its result stored in dtype: bmm's tolerance, and x's own bound through |W|."""
    w = weights[f"{module}.weight"][None]
    bias = weights.get(f"{module}.bias")
    value, bound = bmm_bounds(x.value[None], w, out_dtype=dtype if bias is None else FLOAT32)
    projected = Bounded(value[0], bound[0])
    if x.bound.any():
        spread = (1 + (w.shape[-1] + 2) * U_FLOAT32) * reference.bmm(x.bound[None], abs(w))[0]
        projected = Bounded(projected.value, projected.bound + spread)
    if bias is None:
        return projected
    biased = Bounded(projected.value + bias.astype(np.float64), projected.bound)
    return biased.rounded(FLOAT32).rounded(dtype)


def rms_norm(x: Bounded, weight: np.ndarray, eps: float) -> Bounded:
    """``x / sqrt(mean(x^2) + eps) * weight``; the root lies between those of the smallest and largest x^2."""

    def inverse_root(magnitude: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(np.mean(magnitude**2, axis=-1, keepdims=True) + eps)

    magnitude = abs(x.value)
    exact_root = inverse_root(magnitude)
    smallest, largest = inverse_root(magnitude + x.bound), inverse_root(np.maximum(magnitude - x.bound, 0))
    root_error = np.maximum(largest - exact_root, exact_root - smallest)
    weight = weight.astype(np.float64)
    value = x.value * exact_root * weight
    bound = (x.bound * largest + magnitude * root_error) * abs(weight)
    # In float32: the sum over the row and 8 more operations.
    arithmetic = (x.value.shape[-1] + 8) * U_FLOAT32 * (abs(value) + bound)
    return Bounded(value, bound + arithmetic)


def rope(config: MLAConfig, x: Bounded, positions: np.ndarray) -> Bounded:
    """The rotation: a pair's errors mix; its products, their sum, cos and sin add 4 float32 units."""
    c = config
    scaling = rotation_scaling(c.rope_scaling)
    value = reference.apply_rope(
        x.value,
        positions,
        inv_freq=inverse_frequencies(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling),
        interleaved=c.rope_interleave,
        scaling=scaling,
    )
    pairs = (-1, 2) if c.rope_interleave else (2, -1)

    def pair_sum(magnitude: np.ndarray) -> np.ndarray:
        split = magnitude.reshape(*magnitude.shape[:-1], *pairs)
        axis = split.ndim - 2 + pairs.index(2)
        return np.broadcast_to(split.sum(axis=axis, keepdims=True), split.shape).reshape(magnitude.shape)

    largest = pair_sum(abs(x.value) + x.bound)
    return Bounded(value, scaling * (pair_sum(x.bound) + 4 * U_FLOAT32 * largest))
