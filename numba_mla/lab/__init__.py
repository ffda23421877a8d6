"""The laboratory: what a tiling costs, where the time goes, what the machine code looks like, and pictures of it.

Not imported with the package: ``import numba_mla.lab``.
"""

from .breakdown import Breakdown, breakdown
from .inspection import Inspection, inspect
from .plots import heatmap, roofline
from .sweep import sweep
from .table import Table
from .workload import Workload

__all__ = ["Breakdown", "Inspection", "Table", "Workload", "breakdown", "heatmap", "inspect", "roofline", "sweep"]
