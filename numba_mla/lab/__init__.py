"""The laboratory: how attention is tiled, what becomes of it in machine code, where a call's time goes.

Not imported with the package: ``import numba_mla.lab``.
"""

from .breakdown import Breakdown, breakdown
from .inspection import Inspection, inspect

__all__ = ["Breakdown", "Inspection", "breakdown", "inspect"]
