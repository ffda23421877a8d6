"""The laboratory: what a tiling costs, where the time goes, what the machine code looks like, and pictures of it."""

from .plots import heatmap, roofline

__all__ = ["heatmap", "roofline"]
