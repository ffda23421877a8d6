"""``generic``: portable LLVM vectors and float32 multiply-add, on whatever the host has.

The register blocks follow the host's vectors: what matters is how many float32 lanes one holds and how many
of them there are, not which instruction set they belong to.
"""

from __future__ import annotations

from . import tiling
from .fma import MULTIPLY_ADD
from .host import Host
from .record import Blocks, Isa

# Blocks of weights hold 8 to 16 sums, enough to cover a multiply-add's latency twice over.
AVX512_BLOCKS = Blocks(16, registers=32, weight=(4, 4), tiling=tiling.AVX512)
AVX_BLOCKS = Blocks(8, registers=16, weight=(4, 2), tiling=tiling.AVX2)
NEON_BLOCKS = Blocks(4, registers=32, weight=(4, 4), tiling=tiling.NEON)
SSE_BLOCKS = Blocks(4, registers=16, weight=(4, 2), tiling=tiling.SSE)


def runs_on(host: Host) -> bool:
    """Everywhere."""
    return True


def record(host: Host) -> Isa:
    """The record for this host's vectors."""
    if "avx512f" in host.features:
        blocks = AVX512_BLOCKS
    elif "avx" in host.features:
        blocks = AVX_BLOCKS
    elif host.triple.startswith(("aarch64", "arm64")):
        blocks = NEON_BLOCKS
    else:
        blocks = SSE_BLOCKS
    return Isa(
        name="generic",
        cpu=host.cpu,
        features=host.feature_string,
        blocks=blocks,
        k_pack=1,
        p_rounding=0.0,
        native="float32",
        dtypes=("float32", "float16", "bfloat16"),
        companion=None,
        prefill_group=256,
        multiply_add=MULTIPLY_ADD,
    )
