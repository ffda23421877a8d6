"""Programs of tile instructions for tests: LLVM text, compiled for AMX on any host, called by address."""

import ctypes
import platform
import re
import sys
import threading
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest

from numba_mla.testing.amx import tile_config

MARKS = [
    pytest.mark.amx,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="AMX runs, and is emulated, on Linux on x86-64",
    ),
]

TRIPLES = [(0, 1, 2), (2, 0, 1), (7, 6, 5), (3, 4, 7), (5, 3, 0), (6, 2, 4), (1, 5, 3), (4, 7, 6)]
NAMED_TWICE = [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
FULL = tile_config([(16, 64)] * 8)
REGISTER_NAMES = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16))]

DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.sttilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tileloaddt164(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
attributes #0 = { nounwind "target-features"="+amx-tile,+amx-bf16" }
"""


def define(name, parameters, *lines):
    body = "\n  ".join(lines)
    return f"define void @{name}({parameters}) #0 {{\n  {body}\n  ret void\n}}\n"


def compile_program(text):
    """Functions by name; their arguments are addresses and integers."""
    llvm.initialize_native_asmparser()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True)
    module = llvm.parse_assembly(DECLARATIONS + text)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    functions = {}
    for name, parameters in re.findall(r"^define void @(\w+)\((.*)\)", text, re.MULTILINE):
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64 for _ in filter(None, parameters.split(","))])
        functions[name] = kind(engine.get_function_address(name))
        functions[name].engine = engine
    return functions


@cache
def instructions():
    """One function for each instruction and tile."""
    text = define("ldtilecfg", "ptr %p", "call void @llvm.x86.ldtilecfg(ptr %p)")
    text += define("sttilecfg", "ptr %p", "call void @llvm.x86.sttilecfg(ptr %p)")
    text += define("tilerelease", "", "call void @llvm.x86.tilerelease()")
    text += define("get_mxcsr", "ptr %p", "call void @llvm.x86.sse.stmxcsr(ptr %p)")
    text += define("set_mxcsr", "ptr %p", "call void @llvm.x86.sse.ldmxcsr(ptr %p)")
    text += define("ud2", "", 'call void asm sideeffect "ud2", ""()')
    # tdpbssd %tmm2, %tmm1, %tmm0: a tile instruction that is not emulated.
    text += define("tdpbssd", "", 'call void asm sideeffect ".byte 0xc4, 0xe2, 0x6b, 0x5e, 0xc1", ""()')
    # tileloadd (%rdi), %tmm0 with no SIB byte, which no assembler writes.
    text += define("no_sib", "ptr %p", 'call void asm sideeffect ".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x07", "{rdi}"(ptr %p)')
    for tile in range(8):
        where = f"i8 {tile}, ptr %p, i64 %stride"
        text += define(f"tilezero_{tile}", "", f"call void @llvm.x86.tilezero(i8 {tile})")
        for name in ("tileloadd", "tileloaddt1", "tilestored"):
            text += define(f"{name}_{tile}", "ptr %p, i64 %stride", f"call void @llvm.x86.{name}64({where})")
    for triple in TRIPLES + NAMED_TWICE:
        tiles = ", ".join(f"i8 {tile}" for tile in triple)
        name = "tdpbf16ps_" + "_".join(map(str, triple))
        text += define(name, "", f"call void @llvm.x86.tdpbf16ps({tiles})")
    return compile_program(text)


def run(name, *arguments):
    """Execute one instruction: arrays are passed by address."""
    instructions()[name](*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments])


def random_floats(rng, count, low, high):
    """float32 of both signs, evenly over the exponents low .. high; below -126 they are denormals."""
    mantissas = rng.integers(2**23, 2**24, count) * 2.0**-23
    return (rng.choice([-1, 1], count) * mantissas * 2.0 ** rng.integers(low, high + 1, count)).astype(np.float32)


def run_in_thread(*names):
    """A thread that executes instructions and ends, its tiles as they are then."""

    def work():
        for name in names:
            run(name, FULL) if name == "ldtilecfg" else run(name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def random_form(rng):
    """A memory operand in AT&T syntax with a base and an index register."""
    base, index = rng.permutation([name for name in REGISTER_NAMES if name != "rsp"])[:2]
    displacement = int(rng.choice([0, int(rng.integers(-128, 128)), int(rng.integers(-(2**31), 2**31))]))
    return base, index, int(rng.choice([1, 2, 4, 8])), displacement


def form_program(forms):
    """A function (base, index) for each form and for load and store, on tile 3, assembled by LLVM."""
    text = ""
    for i, (base, index, scale, displacement) in enumerate(forms):
        operand = f"{displacement}(%{base},%{index},{scale})"
        constraint = f'"{{{base}}},{{{index}}},~{{memory}}"(i64 %base, i64 %index)'
        for name, line in [("load", f"tileloadd {operand}, %tmm3"), ("store", f"tilestored %tmm3, {operand}")]:
            text += define(f"{name}_{i}", "i64 %base, i64 %index", f'call void asm sideeffect "{line}", {constraint}')
    return compile_program(text)
