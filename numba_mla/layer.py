"""MLALayer: a model's attention layer, from hidden states to hidden states, on a paged latent cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import ops
from .attention import LatentAttention, split_by_path
from .batch import Batch
from .cache import PagedLatentCache
from .checkpoint import Checkpoint, attention_shapes, bias_shapes, read_attention
from .checks import BFLOAT16, FLOAT_DTYPES, check_array, check_count, check_flag, check_output, check_type, describe
from .config import MLAConfig
from .quant import FLOAT8_DTYPES, BlockScaled, check_block_scales, check_block_size
from .rope import inverse_frequencies, rotate, rotation, rotation_scaling

PATHS = ("auto", "absorbed", "materialised")
FLOAT32 = np.dtype(np.float32)


class MLALayer:
    """One attention layer: projections, norms, rotation, attention over the latent cache, output projection.

    The boundary is that of `self_attn` in Hugging Face's models: hidden states come in normed, and no
    residual is added. kv_b_proj is split per head into W_UK and W_UV. Absorbed, keys and values are never
    made: ``q_nope . (W_UK c) = (q_nope W_UK) . c``, so queries absorb W_UK, and W_UV is applied to the attended
    latent. Materialised, they are, a bounded number of cached tokens at a time, and new tokens attend to each of
    these chunks in turn. `plan_path` chooses for each request.

    Parameters
    ----------
    config : MLAConfig
        The layer's numbers.
    weights : mapping of str to ndarray or BlockScaled
        By their names below `self_attn.`: `q_proj.weight`, or `q_a_proj.weight`, `q_a_layernorm.weight` and
        `q_b_proj.weight`; `kv_a_proj_with_mqa.weight`, `kv_a_layernorm.weight`, `kv_b_proj.weight`,
        `o_proj.weight`; a `.bias` of any of these projections but kv_b_proj. Projections are float32, float16
        or bfloat16, all the same, or fp8 with its scales; norm weights and biases are any of the three.
    requantize_kv_b_proj : bool
        An fp8 kv_b_proj, which is split into W_UK and W_UV, keeps its scales (False), or is quantised anew
        with one scale for all of it, as vLLM does (True).

    Attributes
    ----------
    config : MLAConfig
        As given.
    dtype : dtype
        Of hidden states: that of the projections, or bfloat16 where all of them are fp8.

    Raises
    ------
    TypeError, ValueError
        A weight is missing, unknown, or has another shape or dtype; the message names it.

    Notes
    -----
    A value is rounded to `dtype` (or the cache's) only where the next product takes it; norms, rotation,
    biases and scalings work on float32. fp8 weights stay fp8: products take their exact values. A request's
    result does not depend on what it is batched with, nor, absorbed, on how its tokens are split into calls.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", section 2.1 and appendix C.

    Examples
    --------
    >>> config = MLAConfig(
    ...     hidden_size=32, num_heads=2, q_lora_rank=None, kv_lora_rank=16,
    ...     qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    >>> weights = {name: np.ones(shape, np.float32) for name, shape in attention_shapes(config).items()}
    >>> layer = MLALayer(config, weights)
    >>> cache = PagedLatentCache(config, num_blocks=4, dtype=np.float32)
    >>> cache.add("a")
    0
    >>> layer(np.ones((3, 32), np.float32), cache, cache.append({"a": 3})).shape
    (3, 32)
    """

    def __init__(
        self,
        config: MLAConfig,
        weights: Mapping[str, np.ndarray | BlockScaled],
        *,
        requantize_kv_b_proj: bool = False,
    ) -> None:
        check_type("config", config, MLAConfig, "an MLAConfig")
        check_type("weights", weights, Mapping, "a mapping of names to arrays")
        self.config = config
        self.dtype = _check_weights(config, weights)
        self._packed = {
            _module(name): ops.pack_weight(_as_one_head(weights[name]))
            for name, shape in attention_shapes(config).items()
            if len(shape) == 2 and name != "kv_b_proj.weight"
        }
        kv_b_proj = weights["kv_b_proj.weight"]
        if check_flag("requantize_kv_b_proj", requantize_kv_b_proj):
            kv_b_proj = _with_one_scale(kv_b_proj)
        self._attention = LatentAttention(config, kv_b_proj, self.dtype)
        self._biases = {
            _module(name): np.asarray(values, np.float32) for name, values in weights.items() if name.endswith(".bias")
        }
        self._kv_norm = np.array(weights["kv_a_layernorm.weight"], np.float32)
        self._kv_norm *= np.float32(config.kv_latent_scale)
        if config.q_lora_rank is not None:
            self._q_norm = np.array(weights["q_a_layernorm.weight"], np.float32)
        self._inv_freq = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self._rotation_scaling = rotation_scaling(config.rope_scaling)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<MLALayer: {self.dtype}, hidden_size {c.hidden_size}, {c.num_heads} heads, q_lora_rank {c.q_lora_rank}, "
            f"kv_lora_rank {c.kv_lora_rank}, qk_nope_head_dim {c.qk_nope_head_dim}, "
            f"qk_rope_head_dim {c.qk_rope_head_dim}, v_head_dim {c.v_head_dim}>"
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, layer: int = 0, *, requantize_kv_b_proj: bool = False) -> MLALayer:
        """Build a layer from a Hugging Face checkpoint folder, reading only its own tensors.

        Parameters
        ----------
        folder : path
            Holds `config.json` and `model.safetensors`, or shards with their index.
        layer : int
            Which attention of the model, from 0.
        requantize_kv_b_proj : bool
            As for the constructor.

        Returns
        -------
        MLALayer

        Raises
        ------
        FileNotFoundError
            The folder or a file is missing.
        ValueError
            The model family or the layer is not supported, or (as CheckpointError) a file is broken, or a
            tensor is missing, has another shape, or has no place in the layer; the message names it.
        """
        checkpoint = Checkpoint(folder)
        config = MLAConfig.from_dict(checkpoint.config)
        weights = read_attention(checkpoint, config, layer)
        return cls(config, weights, requantize_kv_b_proj=requantize_kv_b_proj)

    def __call__(
        self,
        hidden_states: np.ndarray,
        cache: PagedLatentCache,
        batch: Batch,
        *,
        cache_layer: int = 0,
        path: str = "auto",
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Write the new tokens to the cache and attend from each to its request's tokens up to itself.

        Parameters
        ----------
        hidden_states : ndarray, (T, hidden_size), `dtype`
            Normed hidden states of the new tokens, in the batch's order.
        cache : PagedLatentCache
            Holds the earlier tokens; gets the new ones.
        batch : Batch
            From the cache's `append`, and not yet committed.
        cache_layer : int
            Which of the cache's layers is this one's.
        path : {"auto", "absorbed", "materialised"}
            How attention is computed: all requests one way, or each as `plan_path` says.
        out : ndarray, (T, hidden_size), `dtype` or float32, optional
            Filled and returned.

        Returns
        -------
        ndarray, (T, hidden_size), `dtype` or out's

        Raises
        ------
        TypeError, ValueError
            An argument other than the above, or a batch that is stale or committed; the message names it.

        Notes
        -----
        On the absorbed path tokens that are split into several calls give the bits that they give in one. The
        materialised path merges chunks of cached tokens, and there a split changes roundings. Which path "auto"
        takes depends on a request's numbers of new and cached tokens (and on the instruction set) alone; fewer
        than 32 new tokens are absorbed.
        """
        self._check_call(hidden_states, cache, batch, cache_layer, path)
        num_tokens = len(hidden_states)
        if out is None:
            out = np.empty((num_tokens, self.config.hidden_size), self.dtype)
        else:
            dtypes = (self.dtype, np.dtype(np.float32))
            check_output("out", out, hidden_states.shape, dtypes, {"hidden_states": hidden_states})
        # NaN and inf reach just the outputs that depend on them, as in the operations: no warning.
        with np.errstate(over="ignore", invalid="ignore"):
            cos, sin = rotation(batch.positions, self._inv_freq, self._rotation_scaling)
            q = self._project_queries(hidden_states, batch.positions, cos, sin)
            kv_c, k_pe = self._project_latents(hidden_states, cos, sin)
            kv_cache = cache.data[cache_layer]
            # What is quantised is quantised once, from float32.
            row_dtype = cache.dtype if cache.dtype in FLOAT_DTYPES else FLOAT32
            kv_c, k_pe = _cast(kv_c, row_dtype), _cast(k_pe, row_dtype)
            ops.write_cache(kv_c, k_pe, kv_cache, batch.slot_mapping, cache_scale=cache.cache_scale)
            heads = self.config.num_heads, self.config.v_head_dim
            values = np.empty((num_tokens, heads[0] * heads[1]), self.dtype)
            parts = split_by_path(batch.requests, self.config, self.dtype, path)
            self._attention(q, kv_cache, parts, cache.cache_scale, values.reshape(num_tokens, *heads))
            return self._project("o_proj", values, out)

    def _project_queries(
        self, hidden_states: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        """Return q (T, H, Dn + Dr), its last part rotated, in float32."""
        c = self.config
        if c.q_lora_rank is None:
            q = self._project("q_proj", hidden_states)
        else:
            q_latent = _rms_norm(self._project("q_a_proj", hidden_states), self._q_norm, c.norm_eps)
            q = self._project("q_b_proj", _cast(q_latent, self.dtype))
        q = q.reshape(-1, c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_latent_scale != 1.0:
            q *= np.float32(c.q_latent_scale)
        if c.query_scale_beta:
            q *= _query_scales(positions, c)[:, None, None]
        q_pe = q[..., c.qk_nope_head_dim :]
        q_pe[...] = rotate(q_pe, cos, sin, interleaved=c.rope_interleave)
        return q

    def _project_latents(
        self, hidden_states: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the normed latent kv_c (T, Dc) and the rotated k_pe (T, Dr), both float32."""
        c = self.config
        kv = self._project("kv_a_proj_with_mqa", hidden_states)
        kv_c = _rms_norm(kv[:, : c.kv_lora_rank], self._kv_norm, c.norm_eps)
        return kv_c, rotate(kv[:, c.kv_lora_rank :], cos, sin, interleaved=c.rope_interleave)

    def _project(self, module: str, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return x (T, K) times a projection's weight plus its bias, (T, N) float32 or `out`."""
        bias = self._biases.get(module)
        if out is not None and bias is None:
            ops.bmm(x[None], self._packed[module], out=out[None])
            return out
        product = np.empty((len(x), self._packed[module].shape[1]), np.float32)
        ops.bmm(x[None], self._packed[module], out=product[None])
        if bias is not None:
            product += bias
        if out is None:
            return product
        out[...] = product
        return out

    def _check_call(
        self, hidden_states: np.ndarray, cache: PagedLatentCache, batch: Batch, cache_layer: int, path: str
    ) -> None:
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        if not isinstance(cache, PagedLatentCache):
            raise TypeError(f"cache: expected a PagedLatentCache, got {type(cache).__name__}")
        widths = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        if (cache.config.kv_lora_rank, cache.config.qk_rope_head_dim) != widths:
            raise ValueError(
                f"cache: expected rows of a latent of {widths[0]} and a rotary part of {widths[1]} values, "
                f"got {cache.config.kv_lora_rank} and {cache.config.qk_rope_head_dim}"
            )
        cache.check_batch(batch)
        if check_count("cache_layer", cache_layer, 0) >= cache.num_layers:
            raise ValueError(f"cache_layer: expected at most {cache.num_layers - 1}, got {cache_layer}")
        castable = {*FLOAT_DTYPES, np.dtype(np.float64)} - {self.dtype}
        if isinstance(hidden_states, np.ndarray) and hidden_states.dtype in castable:
            raise TypeError(
                f"hidden_states: expected {self.dtype}, got {describe(hidden_states)}; "
                "cast it: hidden_states.astype(layer.dtype)"
            )
        shape = (len(batch.positions), self.config.hidden_size)
        check_array("hidden_states", hidden_states, shape, (self.dtype,))


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.astype(dtype, copy=False)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def _query_scales(positions: np.ndarray, config: MLAConfig) -> np.ndarray:
    """Return each token's ``1 + beta ln(1 + floor(position / original_max))``, (T,) float32."""
    original = (config.rope_scaling or {})["original_max_position_embeddings"]
    return (1 + config.query_scale_beta * np.log1p(positions // original)).astype(np.float32)


def _as_one_head(weight: np.ndarray | BlockScaled) -> np.ndarray | BlockScaled:
    """Return a projection (N, K) as a weight of `bmm`, (1, N, K)."""
    if isinstance(weight, BlockScaled):
        return BlockScaled(weight.weight[None], weight.scale[None], weight.block_size)
    return weight[None]


def _with_one_scale(weight: np.ndarray | BlockScaled) -> BlockScaled:
    if not isinstance(weight, BlockScaled):
        raise ValueError(f"requantize_kv_b_proj: expected False where kv_b_proj is {weight.dtype}, got True")
    requantized, scale = ops.block_quant_to_tensor_quant(*weight)
    return BlockScaled(requantized, np.full((1, 1), scale, np.float32), requantized.shape)


def _check_weights(config: MLAConfig, weights: Mapping[str, Any]) -> np.dtype:
    """Return the dtype of hidden states that goes with the projections."""
    shapes = attention_shapes(config)
    known = shapes | bias_shapes(config)
    for name in shapes:
        if name not in weights:
            raise ValueError(f"weights: {name} is missing")
    dtypes = {}
    for name, values in weights.items():
        if name not in known:
            raise ValueError(f"weights: {name} is not a weight of this layer; expected {', '.join(known)}")
        if len(known[name]) == 1:
            check_array(f"weights[{name!r}]", values, known[name], FLOAT_DTYPES)
        elif isinstance(values, BlockScaled):
            _check_block_scaled(f"weights[{name!r}]", values, known[name])
        else:
            _refuse_bare_fp8(name, values)
            dtypes[name] = check_array(f"weights[{name!r}]", values, known[name], FLOAT_DTYPES).dtype
    if len(set(dtypes.values())) > 1:
        listing = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"weights: expected projections of one dtype, got {listing}")
    return next(iter(dtypes.values()), BFLOAT16)


def _refuse_bare_fp8(name: str, values: Any) -> None:
    if isinstance(values, np.ndarray) and values.dtype in FLOAT8_DTYPES:
        raise TypeError(f"weights[{name!r}]: expected fp8 with its scales, as BlockScaled, got {describe(values)}")


def _check_block_scaled(name: str, values: BlockScaled, shape: tuple[int, ...]) -> None:
    check_array(f"{name}.weight", values.weight, shape, FLOAT8_DTYPES)
    num_blocks = tuple(-(-n // size) for n, size in zip(shape, check_block_size(values.block_size), strict=True))
    check_block_scales(f"{name}.scale", values.scale, num_blocks)
