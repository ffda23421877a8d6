"""The operations on numpy arrays: check the arguments, find the elements, call the kernels."""

from .attention import decode, extend
from .linear import PackedWeight, absorb_weights, bmm, pack_weight
from .merging import merge_states
from .paging import expand_block_table, gather_cache, write_cache

__all__ = [
    "PackedWeight",
    "absorb_weights",
    "bmm",
    "decode",
    "expand_block_table",
    "extend",
    "gather_cache",
    "merge_states",
    "pack_weight",
    "write_cache",
]
