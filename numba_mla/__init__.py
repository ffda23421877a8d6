"""Multi-head Latent Attention for numpy: a paged latent KV cache, on any CPU, with pip and no compiler."""

import sys

from ._version import __version__ as __version__

if "vllm" not in sys.modules:
    from .public import *
    from .public import __all__ as __all__
else:
    # In each of its processes vLLM looks at what plug-in there is before it is set up itself, and would stumble
    # over llvmlite then: there, names are loaded when they are asked for.
    import importlib
    import importlib.util
    from typing import Any

    def __getattr__(name: str) -> Any:
        if name != "__all__" and name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        return getattr(importlib.import_module(f"{__name__}.public"), name)
