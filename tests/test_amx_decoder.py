"""The decoder of tile instructions, against iced-x86 and LLVM's assembler."""

import ctypes

import iced_x86
import numpy as np
import tile_programs
from tile_programs import REGISTER_NAMES, form_program, random_form

from numba_mla.testing.amx import decode as decoder

pytestmark = tile_programs.MARKS

TILE_FIRST = (decoder.TILEZERO, decoder.TILELOADD, decoder.TILESTORED)
CONTEXT_ORDER = [*(f"r{i}" for i in range(8, 16)), "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx", "rsp"]


def decode(code, values):
    """The package's decoder on some bytes, at the address of an array that holds them, with registers by name."""
    code = np.frombuffer(code.ljust(16, b"\xcc"), np.uint8).copy()
    registers = np.array([values[name] for name in CONTEXT_ORDER], np.int64)
    return decoder.decode(code.ctypes.data, registers.ctypes.data), code.ctypes.data


def random_registers(rng):
    return {name: int(rng.integers(-(2**62), 2**62)) for name in REGISTER_NAMES}


def wrap(x):
    """An integer as the processor's 64 bits hold it, signed."""
    return (x + 2**63) % 2**64 - 2**63


def random_encoding(rng):
    """Bytes that look like a tile instruction: most are one, in any addressing form, and some are not quite."""

    def rare(usual, other):
        return other if rng.random() < 0.06 else usual

    opcode = int(rng.choice([0x49, 0x4B, 0x4B, 0x4B, 0x5C, rare(0x49, 0x5E)]))
    prefix = int(rng.integers(0, 4))
    third = int(rng.integers(0, 8)) if opcode == 0x5C else 0
    high = int(rng.integers(0, 4)) << 5 | rare(0x80, 0) | rare(2, int(rng.integers(0, 8)))
    if opcode == 0x5C:
        high |= rare(0x20, 0)
    last = rare(0, 0x80) | (~rare(third, int(rng.integers(0, 16))) & 15) << 3 | rare(0, 4) | prefix
    mode = 3 if opcode == 0x5C or rng.random() < 0.15 else int(rng.integers(0, 3))
    reg = 0 if opcode == 0x49 and prefix < 2 and rng.random() < 0.9 else int(rng.integers(0, 8))
    rm = int(rng.choice([0, 4, 4, 5, int(rng.integers(0, 8))])) if opcode != 0x5C else int(rng.integers(0, 8))
    return bytes([rare(0xC4, 0x62), high, last, opcode, mode << 6 | reg << 3 | rm]) + rng.bytes(6)


def second_opinion(code, address, values):
    """What iced-x86 says of some bytes, as the package's decoder would say it."""
    names = {
        iced_x86.Code.VEX_LDTILECFG_M512: decoder.LDTILECFG,
        iced_x86.Code.VEX_STTILECFG_M512: decoder.STTILECFG,
        iced_x86.Code.VEX_TILERELEASE: decoder.TILERELEASE,
        iced_x86.Code.VEX_TILEZERO_TMM: decoder.TILEZERO,
        iced_x86.Code.VEX_TILELOADD_TMM_SIBMEM: decoder.TILELOADD,
        iced_x86.Code.VEX_TILELOADDT1_TMM_SIBMEM: decoder.TILELOADD,
        iced_x86.Code.VEX_TILESTORED_SIBMEM_TMM: decoder.TILESTORED,
        iced_x86.Code.VEX_TDPBF16PS_TMM_TMM_TMM: decoder.TDPBF16PS,
    }
    found = iced_x86.Decoder(64, code.ljust(16, b"\xcc"), ip=address % 2**64).decode()
    operation = names.get(found.code, 0)
    if operation == 0:
        return 0, 0, (), 0, 0
    tiles, place, stride = [], 0, 0
    for operand in range(found.op_count):
        if found.op_kind(operand) == iced_x86.OpKind.REGISTER:
            tiles.append(found.op_register(operand) - iced_x86.Register.TMM0)
        else:
            by_number = {iced_x86.Register.RAX + i: values[name] for i, name in enumerate(REGISTER_NAMES)}
            place = found.memory_displacement + by_number.get(found.memory_base, 0)
            stride = by_number.get(found.memory_index, 0) * found.memory_index_scale
    if not tiles:
        place, stride = place + stride, 0
    return operation, found.len, tuple(tiles), wrap(place), wrap(stride)


def test_decoder_agrees_with_iced_on_random_encodings(rng):
    seen = []
    for _ in range(6000):
        code, values = random_encoding(rng), random_registers(rng)
        (operation, length, reg, rm, third, place, stride), address = decode(code, values)
        tiles = {decoder.TDPBF16PS: (reg, rm, third)}.get(operation, (reg,) if operation in TILE_FIRST else ())
        if len(set(tiles)) < len(tiles):
            continue  # iced-x86 calls a tile named twice undecodable; here it is the execution that faults
        want = second_opinion(code, address, values)
        assert (operation, length, tiles, place, stride) == want, code.hex()
        seen.append((operation, code[4] >> 6, code[4] & 7))
    assert sum(operation != 0 for operation, _, _ in seen) >= 1000
    assert {operation for operation, _, _ in seen} == set(range(8))
    loads = {(mode, rm) for operation, mode, rm in seen if operation == decoder.TILELOADD}
    assert loads == {(0, 4), (1, 4), (2, 4)}


def test_decoder_reads_what_llvm_assembles(rng):
    forms = [random_form(rng) for _ in range(80)]
    program = form_program(forms)
    for i, (base, index, scale, displacement) in enumerate(forms):
        for name, operation in [("load", decoder.TILELOADD), ("store", decoder.TILESTORED)]:
            start = ctypes.cast(program[f"{name}_{i}"], ctypes.c_void_p).value
            code = ctypes.string_at(start, 64)
            # The moves around it are not the decoder's matter.
            at = next(x.ip for x in iced_x86.Decoder(64, code) if "TILE" in repr(x).upper())
            values = random_registers(rng)
            got, _ = decode(code[at : at + 16], values)
            want = (values[base] + displacement, values[index] * scale)
            assert (got[0], got[2], got[5:]) == (operation, 3, tuple(map(wrap, want))), (forms[i], code.hex())
