"""The public names, from wherever they are made."""

from . import reference
from ._version import __version__
from .cache import Batch, CacheFullError, PagedLatentCache
from .chunks import plan_context_chunks
from .config import MLAConfig
from .errors import IsaUnavailableError
from .info import show_config
from .isa import Tiling
from .layer import MLALayer
from .ops import (
    BlockScaled,
    PackedWeight,
    absorb_weights,
    block_quant_to_tensor_quant,
    bmm,
    decode,
    expand_block_table,
    extend,
    gather_cache,
    merge_states,
    num_kv_splits,
    pack_weight,
    prefill,
    write_cache,
)
from .parallel import threads
from .paths import plan_path
from .rope import apply_rope
from .runtime import available_isas, default_tiling, use_isa
from .tuning import tune

__all__ = [
    "Batch",
    "BlockScaled",
    "CacheFullError",
    "IsaUnavailableError",
    "MLAConfig",
    "MLALayer",
    "PackedWeight",
    "PagedLatentCache",
    "Tiling",
    "__version__",
    "absorb_weights",
    "apply_rope",
    "available_isas",
    "block_quant_to_tensor_quant",
    "bmm",
    "decode",
    "default_tiling",
    "expand_block_table",
    "extend",
    "gather_cache",
    "merge_states",
    "num_kv_splits",
    "pack_weight",
    "plan_context_chunks",
    "plan_path",
    "prefill",
    "reference",
    "show_config",
    "threads",
    "tune",
    "use_isa",
    "write_cache",
]
