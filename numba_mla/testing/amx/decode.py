"""From the bytes of an AMX instruction to what it asks for.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, sections 2.1.5 (ModR/M and SIB), 2.3
(VEX) and the pages of the instructions. Not decoded, so left to fault: instructions with a prefix before VEX (a
segment, a 32-bit address) and the tile instructions of other element types.
"""

# Numba types these bodies.
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from .words import load_i8, load_i32, load_i64, load_u8

# What `decode` returns first; 0 is none of them.
LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS = range(1, 8)

# Where `ucontext_t` keeps the registers in the processor's order (rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8..r15).
REGISTERS = 16
RIP = 16
_PLACES = np.array([13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7])

_VEX3 = 0xC4
_MAP_0F38 = 2
_NP, _P66, _PF3, _PF2 = range(4)


@njit(error_model="numpy")
def _register(registers, number):
    return load_i64(registers + 8 * _PLACES[number])


@njit(error_model="numpy")
def _operand(at, high, registers):
    """Address without the index, scaled index (the rows' stride) and end of a memory operand.

    Its ModR/M byte stands at ``at``. ``high`` is the VEX byte that holds the fourth bits of index (0x40) and base
    (0x20), inverted.
    """
    modrm = load_u8(at)
    mode, base = modrm >> 6, modrm & 7
    base_high, index_high = (~high & 0x20) >> 2, (~high & 0x40) >> 3
    at += 1
    has_sib = base == 4
    stride = 0
    if has_sib:
        sib = load_u8(at)
        at += 1
        base = sib & 7
        index = (sib >> 3 & 7) | index_high
        if index != 4:
            stride = _register(registers, index) << (sib >> 6)
    address = 0
    if mode == 0 and base == 5:
        # No base register: an address, or one relative to the next instruction.
        address = load_i32(at)
        at += 4
        if not has_sib:
            address += at
        return address, stride, at
    address = _register(registers, base | base_high)
    if mode == 1:
        address += load_i8(at)
        at += 1
    elif mode == 2:
        address += load_i32(at)
        at += 4
    return address, stride, at


@njit(error_model="numpy")
def _operation(opcode, prefix, modrm):
    """Which instruction an opcode is with its implied prefix and form; 0 for none."""
    in_memory = modrm < 0xC0
    reg, rm = modrm >> 3 & 7, modrm & 7
    if opcode == 0x49:
        if in_memory and reg == 0 and prefix == _NP:
            return LDTILECFG
        if in_memory and reg == 0 and prefix == _P66:
            return STTILECFG
        if modrm == 0xC0 and prefix == _NP:
            return TILERELEASE
        if not in_memory and rm == 0 and prefix == _PF2:
            return TILEZERO
    # Rows are addressed by base and index: there must be a SIB byte.
    if opcode == 0x4B and in_memory and rm == 4:
        if prefix in (_PF2, _P66):  # tileloadd, tileloaddt1
            return TILELOADD
        if prefix == _PF3:
            return TILESTORED
    if opcode == 0x5C and not in_memory and prefix == _PF3:
        return TDPBF16PS
    return 0


@njit(error_model="numpy")
def decode(code, registers):
    """Decode the instruction at an address, reading no byte that the processor would not read.

    Parameters
    ----------
    code : int
        Address of the instruction.
    registers : int
        Address of the general registers in ``ucontext_t``'s order, 8 bytes each.

    Returns
    -------
    operation : int
        One of this module's constants, 0 where it is not one of these instructions or not a legal form of it.
    length : int
        Bytes of the instruction.
    reg, rm, third : int
        Tile numbers: of ModRM:reg, ModRM:r/m and VEX.vvvv, for the operations that have them.
    address, stride : int
        Of the memory operand, for the operations that have one.
    """
    nothing = (0, 0, 0, 0, 0, 0, 0)
    if load_u8(code) != _VEX3:
        return nothing
    high, last = load_u8(code + 1), load_u8(code + 2)
    # VEX.128 and W0 only.
    if high & 0x1F != _MAP_0F38 or last & 0x84 != 0:
        return nothing
    modrm = load_u8(code + 4)
    operation = _operation(load_u8(code + 3), last & 3, modrm)
    third = ~(last >> 3) & 15
    reg, rm = modrm >> 3 & 7, modrm & 7
    # There are eight tiles: the fourth bits of tile numbers must be off.
    tile_is_high = high & 0x80 == 0
    if operation == TDPBF16PS:
        legal = third < 8 and not tile_is_high and high & 0x20 != 0
    elif operation in (TILEZERO, TILELOADD, TILESTORED):
        legal = third == 0 and not tile_is_high
    else:
        legal = third == 0
    if operation == 0 or not legal:
        return nothing
    if modrm >= 0xC0:
        return operation, 5, reg, rm, third, 0, 0
    address, stride, end = _operand(code + 4, high, registers)
    if operation in (LDTILECFG, STTILECFG):
        # An ordinary operand: the scaled index is part of the address.
        address, stride = address + stride, 0
    return operation, end - code, reg, rm, third, address, stride
