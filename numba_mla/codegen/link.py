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
from .listing import function_body, spills
from .module import build_modules, symbols

# Reentrant, for calls in signal handlers.
link_lock = threading.RLock()
# Execution engines own the machine code: kept for the life of the process.
_engines: list[llvm.ExecutionEngine] = []
# Addresses of what is linked already, by the name of its object file, which tells its content.
_linked: dict[str, dict[str, int]] = {}


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
    """The assembly of a record's modules, for reading and for tests; any target's, not only this machine's."""
    machine = target_machine(isa, triple)
    return "".join(machine.emit_assembly(llvm.parse_assembly(text)) for text in build_modules(isa, triple))


def find_spills(isa: Isa, triple: str) -> dict[str, list[str]]:
    """Instructions that move a vector to or from the stack in inner loops of attention's products, by function."""
    text, _ = build_modules(isa, triple)
    code = target_machine(isa, triple).emit_assembly(llvm.parse_assembly(text))
    found = {symbol: spills(function_body(code, symbol)) for symbol in symbols(text)}
    return {symbol: lines for symbol, lines in found.items() if lines}


def build_object(text: str, machine: llvm.TargetMachine) -> bytes:
    """Machine code of a module, as an object file."""
    module = llvm.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


@cache
def link(isa: Isa, triple: str) -> dict[str, int]:
    """Addresses of a record's functions by symbol, compiled or taken from the cache folder."""
    with link_lock:
        machine = target_machine(isa, triple)
        found: dict[str, int] = {}
        for text in build_modules(isa, triple):
            name = f"{isa.name}-{store.content_hash(text, llvmlite.__version__, str(llvm.llvm_version_info))}.o"
            if name not in _linked:
                _linked[name] = _link_module(name, text, machine)
            found |= _linked[name]
        return found


def _link_module(name: str, text: str, machine: llvm.TargetMachine) -> dict[str, int]:
    compiled = store.load(name)
    if compiled is None:
        compiled = build_object(text, machine)
        store.save(name, compiled)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    engine.finalize_object()
    _engines.append(engine)
    return {symbol: engine.get_function_address(symbol) for symbol in symbols(text)}
