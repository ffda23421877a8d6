"""One record per instruction set: what differs between them, and nothing else."""

from .record import Isa, PowerOps, TileOp
from .select import available_isas, select

__all__ = ["Isa", "PowerOps", "TileOp", "available_isas", "select"]
