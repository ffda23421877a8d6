"""What LLVM says of this machine: the CPU's name and its features, the operating system's state honoured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import llvmlite.binding as llvm

from .permission import tiles_are_granted

# What LLVM calls the tile instructions of this package.
TILE_FEATURES = frozenset({"amx-tile", "amx-bf16"})


@dataclass(frozen=True)
class Host:
    """A machine, as far as code generation is concerned.

    Parameters
    ----------
    triple, cpu : str
        LLVM's target triple and CPU name.
    feature_string : str
        The features as LLVM's command line takes them, those that are off included: a CPU's name may promise
        what the operating system has not switched on.
    tiles : bool
        Whether AMX tile instructions run: the processor has a palette and the system grants it, or they are
        emulated.
    """

    triple: str
    cpu: str
    feature_string: str
    tiles: bool = False

    @property
    def features(self) -> frozenset[str]:
        """Names of the features that are on."""
        return frozenset(part[1:] for part in self.feature_string.split(",") if part.startswith("+"))


@cache
def detect(cpu_name: str | None = None, cpu_features: str | None = None) -> Host:
    """This machine, or the one that Numba was told to compile for.

    Parameters
    ----------
    cpu_name, cpu_features : str, optional
        Numba's own overrides (``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES``): a named CPU brings the features
        that LLVM knows it by, not the host's.
    """
    triple = llvm.get_process_triple()
    if cpu_name is not None:
        return Host(triple, cpu_name, cpu_features or "")
    host = Host(triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    return replace(host, tiles=host.features >= TILE_FEATURES and tiles_are_granted())
