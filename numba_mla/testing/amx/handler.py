"""The signal handler: decode, execute, go on after the instruction, or let it fault as the hardware would."""

# Numba types these bodies.
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from . import execute, threads
from .decode import LDTILECFG, RIP, STTILECFG, TDPBF16PS, TILELOADD, TILERELEASE, TILEZERO, decode
from .execute import DONE, EXHAUSTED, PROTECTED, UNDEFINED
from .words import (
    copy_bytes,
    load_i32,
    load_i64,
    load_u8,
    read_for_real,
    set_mxcsr,
    store_i64,
    system_call,
    zero_bytes,
)

SIGILL = 4
_WRITE, _RT_SIGACTION = 1, 13
# `ucontext_t` up to its registers, `siginfo_t` up to si_code.
_REGISTERS_AT, _CODE_AT = 40, 8
# An address that no x86-64 processor translates: #GP.
_NON_CANONICAL = -(2**63)
# Round to nearest, denormals are zero, flush to zero, no exceptions.
_TILE_MXCSR = 0x9FC0
_FULL = np.frombuffer(
    f"numba_mla.testing.amx: more than {threads.CAPACITY} threads hold configured tiles at once\n".encode(), np.uint8
)

# The handler's memory: the kernel's own record of the action to fall back to, the default action, settings, the table.
ACTION_BYTES = 32
_FALLBACK_AT, _DEFAULT_AT, _FELL_BACK_AT, _MXCSR_AT = 0, 32, 64, 72
_TABLE_AT = 128
MEMORY_BYTES = _TABLE_AT + threads.TABLE_BYTES


@njit(error_model="numpy")
def _load_config(table, thread, address):
    palette = load_u8(address)
    if palette == 0:
        threads.release(table, thread)
        return DONE
    if not execute.is_legal(address):
        return PROTECTED
    state = threads.find(table, thread)
    if state == 0:
        state = threads.claim(table, thread)
        if state == 0:
            return EXHAUSTED
    execute.configure(state, address)
    return DONE


@njit(error_model="numpy")
def _run(table, operation, tiles, address, stride):
    """Execute a decoded instruction for this thread; how it ends."""
    thread = threads.this_thread()
    if operation == LDTILECFG:
        return _load_config(table, thread, address)
    if operation == TILERELEASE:
        threads.release(table, thread)
        return DONE
    state = threads.find(table, thread)
    if operation == STTILECFG:
        if state == 0:
            zero_bytes(address, execute.CONFIG_BYTES)
        else:
            copy_bytes(address, state, execute.CONFIG_BYTES)
        return DONE
    if state == 0:
        return UNDEFINED
    reg, rm, third = tiles
    if operation == TILEZERO:
        return execute.zero(state, reg)
    if operation == TDPBF16PS:
        return execute.dot_bfloat16(state, reg, rm, third)
    return execute.move(state, reg, address, stride, operation != TILELOADD)


@njit(error_model="numpy")
def _fall_back(memory):
    """Put the action back that was there before; if the signal still comes here, the default one."""
    action = memory + (_FALLBACK_AT if load_i64(memory + _FELL_BACK_AT) == 0 else _DEFAULT_AT)
    store_i64(memory + _FELL_BACK_AT, 1)
    system_call(_RT_SIGACTION, SIGILL, action, 0, 8)


@njit(error_model="numpy")
def _fault(memory, text, text_bytes, ending):
    if ending == PROTECTED:
        read_for_real(_NON_CANONICAL)
    if ending == EXHAUSTED:
        system_call(_WRITE, 2, text, text_bytes, 0)
    # On return the instruction raises its signal once more.
    _fall_back(memory)


@njit(error_model="numpy")
def _handle(memory, text, text_bytes, information, context):
    if load_i32(information + _CODE_AT) <= 0:
        # Somebody sent the signal; no instruction raised it, none will raise it again.
        _fall_back(memory)
        threads.send(threads.this_thread(), SIGILL)
        return
    set_mxcsr(memory + _MXCSR_AT)
    registers = context + _REGISTERS_AT
    place = registers + 8 * RIP
    ending, is_first = DONE, True
    # Tile instructions come in runs: one signal serves them all. The instruction after them raises its own.
    while ending == DONE:
        code = load_i64(place)
        operation, length, reg, rm, third, address, stride = decode(code, registers)
        ending = UNDEFINED
        if operation != 0:
            ending = _run(memory + _TABLE_AT, operation, (reg, rm, third), address, stride)
        if ending == DONE:
            store_i64(place, code + length)
        elif is_first:
            _fault(memory, text, text_bytes, ending)
        is_first = False


def build_handler(memory):
    """Compile the handler over its memory, whose address it holds.

    Parameters
    ----------
    memory : ndarray of uint8, (MEMORY_BYTES,)
        Set up by `new_memory`; it must live as long as the handler.

    Returns
    -------
    numba.core.ccallback.CFunc
        ``void (int signal, siginfo_t *, ucontext_t *)``.
    """
    address, text, text_bytes = memory.ctypes.data, _FULL.ctypes.data, _FULL.size

    @cfunc(types.void(types.int32, types.int64, types.int64), error_model="numpy")
    def handler(signal, information, context):
        _handle(address, text, text_bytes, information, context)

    return handler


def new_memory():
    """Memory of a handler: no thread has tiles, the action to fall back to is the default one."""
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    memory[_MXCSR_AT:][:4].view(np.uint32)[0] = _TILE_MXCSR
    return memory


def set_fallback(memory, action):
    """Set the action that meets signals which are not of tile instructions."""
    memory[_FALLBACK_AT:][:ACTION_BYTES] = np.frombuffer(action, np.uint8)
    memory[_FELL_BACK_AT:][:8] = 0
