"""Absorbed or materialised: which of the two ways to compute the same attention costs less."""

from __future__ import annotations

from typing import NamedTuple

from .checks import check_count, check_type
from .chunks import WORKSPACE_TOKENS
from .config import MLAConfig
from .runtime import select_isa

# With fewer new tokens attention is always absorbed: decodes, speculative tokens and small chunks of a prompt give
# the same bits however they are cut.
LEAST_MATERIALISED = 32


class Terms(NamedTuple):
    """Kinds of work: how much of each a path does, or what a unit of each costs.

    Attributes
    ----------
    product : float
        Floating point operations of products with packed weights.
    latent, prefill : float
        Those of attention over latents, and over materialised keys and values.
    element : float
        Elements that are gathered, copied, converted or merged.
    call : float
        Calls of an operation.
    """

    product: float = 0.0
    latent: float = 0.0
    prefill: float = 0.0
    element: float = 0.0
    call: float = 0.0


# In floating point operations that the instruction set's dot product could do in the same time at its peak: the
# first three are inverse fractions of that peak. `benchmarks/paths.py --fit` measures them.
UNIT_COSTS = {
    "amx_bf16": Terms(product=1.6, latent=1.3, prefill=1.6, element=600.0, call=1e8),
    "avx512bf16": Terms(product=1.25, latent=1.12, prefill=1.25, element=250.0, call=2.5e7),
    "avx512f": Terms(product=1.15, latent=1.12, prefill=1.2, element=125.0, call=1.2e7),
    "avx2": Terms(product=1.15, latent=1.12, prefill=1.2, element=125.0, call=1.2e7),
    "generic": Terms(product=1.15, latent=1.12, prefill=1.2, element=125.0, call=1.2e7),
}


def absorbed_work(num_new: int, prefix: int, config: MLAConfig) -> Terms:
    """What the absorbed path does: queries into latents, attention over these, latents into values."""
    c = config
    lanes = num_new * c.num_heads
    return Terms(
        product=2 * lanes * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim),
        latent=2 * c.num_heads * _seen(num_new, prefix) * (2 * c.kv_lora_rank + c.qk_rope_head_dim),
        element=lanes * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        call=3,
    )


def materialised_work(num_new: int, prefix: int, config: MLAConfig) -> Terms:
    """What the materialised path does: latents into keys and values, chunk by chunk, attention over these, merging."""
    c = config
    tokens, lanes = num_new + prefix, num_new * c.num_heads
    num_chunks = -(-prefix // WORKSPACE_TOKENS)
    queries = lanes * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    gathered = tokens * (c.cache_row_width + c.num_heads * c.qk_rope_head_dim)
    return Terms(
        product=2 * tokens * c.num_heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim),
        prefill=2 * c.num_heads * _seen(num_new, prefix) * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim),
        element=queries + gathered + lanes * c.v_head_dim * num_chunks,
        call=4 + 5 * num_chunks,
    )


def _seen(num_new: int, prefix: int) -> int:
    """Pairs of a new token and a token that it sees."""
    return num_new * prefix + num_new * (num_new + 1) // 2


def cost(work: Terms, unit_costs: Terms) -> float:
    """The sum over the kinds of work."""
    return sum(amount * unit for amount, unit in zip(work, unit_costs, strict=True))


def plan_path(num_new, prefix, config, isa=None):
    """Choose the path that costs less for one request's new tokens.

    Per head, absorbed attention takes ``2 (2 Dc + Dr)`` operations for each pair of tokens of which one sees the
    other, materialised ``2 (Dn + Dr + Dv)``, and ``2 Dc (Dn + Dv)`` for each token of the prefix. So many new
    tokens pay for materialising the prefix, few do not.

    Parameters
    ----------
    num_new : int
        New tokens of the request.
    prefix : int
        Its cached tokens before these.
    config : MLAConfig
        The layer's numbers.
    isa : str, optional
        The instruction set, one of ``available_isas()``; None: the one in force. A layer names the one that its
        dtype runs on.

    Returns
    -------
    {"absorbed", "materialised"}

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Operations, moved elements and calls are weighed by constants of the instruction set; nothing is timed. Fewer
    than 32 new tokens are always absorbed. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, for both forms.

    Examples
    --------
    >>> import numba_mla
    >>> config = numba_mla.MLAConfig(
    ...     hidden_size=2048, num_heads=16, q_lora_rank=None, kv_lora_rank=512,
    ...     qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> numba_mla.plan_path(4, 16384, config), numba_mla.plan_path(2048, 0, config)
    ('absorbed', 'materialised')
    """
    num_new = check_count("num_new", num_new, 0)
    prefix = check_count("prefix", prefix, 0)
    check_type("config", config, MLAConfig, "an MLAConfig")
    unit_costs = UNIT_COSTS[select_isa(isa).name]
    if num_new < LEAST_MATERIALISED:
        return "absorbed"
    absorbed = cost(absorbed_work(num_new, prefix, config), unit_costs)
    materialised = cost(materialised_work(num_new, prefix, config), unit_costs)
    return "materialised" if materialised < absorbed else "absorbed"
