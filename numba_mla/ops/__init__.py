"""The operations on numpy arrays: check the arguments, find the elements, call the kernels."""

from ..kernels.schedule import num_kv_splits
from ..quant import BlockScaled, block_quant_to_tensor_quant
from .attention import decode, extend
from .linear import PackedWeight, absorb_weights, bmm, pack_weight
from .merging import merge_states
from .paging import expand_block_table, gather_cache
from .prefill import prefill
from .writing import write_cache

__all__ = [
    "BlockScaled",
    "PackedWeight",
    "absorb_weights",
    "block_quant_to_tensor_quant",
    "bmm",
    "decode",
    "expand_block_table",
    "extend",
    "gather_cache",
    "merge_states",
    "num_kv_splits",
    "pack_weight",
    "prefill",
    "write_cache",
]
