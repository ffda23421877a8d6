"""Whether this machine runs AMX tile instructions itself."""

from __future__ import annotations

import platform
import sys

import llvmlite.binding as llvm

from ...isa.host import detect


def require_platform() -> None:
    """Raise RuntimeError where neither the hardware nor the emulator runs tile instructions."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise RuntimeError(f"AMX emulation: expected Linux on x86-64, got {sys.platform} on {machine}")
    if not llvm.get_host_cpu_features().get("fma"):
        raise RuntimeError("AMX emulation: expected a processor with fused multiply-add (FMA3), got one without")


def has_amx() -> bool:
    """Whether the processor has AMX for bfloat16 and the kernel lets this process use it (asked once)."""
    return detect().tiles
