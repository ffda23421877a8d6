"""From a module's text to addresses of functions that kernels call.

The functions are compiled by LLVM alone, apart from Numba, and reached by address. So the Numba loops are
compiled once for every instruction set and element type, and a change in the generated text can never meet
a stale copy of a loop.
"""

from __future__ import annotations

import threading
from functools import cache

import llvmlite
import llvmlite.binding as llvm

from ..isa import Isa
from . import store
from .module import build_module, symbols

# Reentrant, for calls in signal handlers.
link_lock = threading.RLock()
# Execution engines own the machine code: kept for the life of the process.
_engines: list[llvm.ExecutionEngine] = []


def target_machine(isa: Isa, triple: str) -> llvm.TargetMachine:
    """LLVM's code generator for a record, this machine's or another's."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    # Tile operations may be text of the assembler.
    llvm.initialize_native_asmparser()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def assembly(isa: Isa, triple: str) -> str:
    """The assembly of a record's module, for reading and for tests; any target's, not only this machine's."""
    module = llvm.parse_assembly(build_module(isa, triple))
    return target_machine(isa, triple).emit_assembly(module)


def build_object(text: str, machine: llvm.TargetMachine) -> bytes:
    """Machine code of a module, as an object file."""
    module = llvm.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


@cache
def link(isa: Isa, triple: str) -> dict[str, int]:
    """Addresses of a record's functions by symbol, compiled or taken from the cache folder."""
    text = build_module(isa, triple)
    name = f"{isa.name}-{store.content_hash(text, llvmlite.__version__, str(llvm.llvm_version_info))}.o"
    with link_lock:
        machine = target_machine(isa, triple)
        compiled = store.load(name)
        if compiled is None:
            compiled = build_object(text, machine)
            store.save(name, compiled)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
        engine.finalize_object()
        _engines.append(engine)
        return {symbol: engine.get_function_address(symbol) for symbol in symbols(text)}
