"""Whether the processor has a tile palette, and the system lets this process use it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import llvmlite.binding as llvm

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

# cpuid leaf 1DH, sub-leaf 0: the highest palette. A virtual machine may list AMX and have none.
_CPUID = """
define i32 @max_palette() {
  %all = call { i32, i32, i32, i32 } asm sideeffect "cpuid",
    "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"(i32 29, i32 0)
  %eax = extractvalue { i32, i32, i32, i32 } %all, 0
  ret i32 %eax
}
"""


@cache
def tiles_are_granted() -> bool:
    """Ask once for the process; only where the processor lists AMX, since cpuid is asked of it.

    Threads started later and earlier alike may then use tiles.
    """
    if sys.platform != "linux":
        return False
    try:
        return _max_palette() >= 1 and _request_permission()
    except (OSError, AttributeError, RuntimeError):
        return False


def _max_palette() -> int:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    machine = llvm.Target.from_default_triple().create_target_machine()
    with llvm.create_mcjit_compiler(llvm.parse_assembly(_CPUID), machine) as engine:
        engine.finalize_object()
        return ctypes.CFUNCTYPE(ctypes.c_int32)(engine.get_function_address("max_palette"))()


def _request_permission() -> bool:
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
