"""One record per instruction set: what differs between them, and nothing else."""

from .fit import fit, misfit
from .record import Isa, PowerOps, TileOp
from .select import available_isas, select
from .tiling import Tiling

__all__ = ["Isa", "PowerOps", "TileOp", "Tiling", "available_isas", "fit", "misfit", "select"]
