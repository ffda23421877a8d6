"""Whether this machine runs AMX tile instructions itself."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import llvmlite.binding as llvm
from numba import njit

from .words import max_tile_palette

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def require_platform() -> None:
    """Raise RuntimeError where neither the hardware nor the emulator runs tile instructions."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise RuntimeError(f"AMX emulation: expected Linux on x86-64, got {sys.platform} on {machine}")
    if not llvm.get_host_cpu_features().get("fma"):
        raise RuntimeError("AMX emulation: expected a processor with fused multiply-add (FMA3), got one without")


@njit
def _max_palette():
    return max_tile_palette()  # type: ignore[call-arg] # the first argument is Numba's


@cache
def has_amx() -> bool:
    """Whether the processor has AMX for bfloat16 and the kernel lets this process use it (asked once)."""
    features = llvm.get_host_cpu_features()
    # A virtual machine may list the features and no palette.
    if not (features.get("amx-tile") and features.get("amx-bf16") and _max_palette() >= 1):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
