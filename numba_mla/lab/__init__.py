"""Experiments: operations on inputs that are made, under any tiling, checked before they are timed."""

from .sweep import sweep
from .table import Table
from .workload import Workload

__all__ = ["Table", "Workload", "sweep"]
