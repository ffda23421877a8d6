"""One record per instruction set: what differs between them, and nothing else."""

from .record import Isa, TileOp
from .select import available_isas, select

__all__ = ["Isa", "TileOp", "available_isas", "select"]
