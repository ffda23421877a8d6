"""Multi-head Latent Attention for numpy: a paged latent KV cache, on any CPU, with pip and no compiler."""

from . import reference
from ._version import __version__

__all__ = ["__version__", "reference"]
