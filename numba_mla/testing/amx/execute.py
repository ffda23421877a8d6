"""What each instruction does to a thread's tiles, and when it faults, in Numba.

A thread's tile state is a block of memory: the configuration as `ldtilecfg` reads it, eight tiles of 16 rows of 64
bytes, and room for the sums of `tdpbf16ps`. Only a thread with configured tiles has one.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the pages of the instructions and
section 2.10 (exception classes AMX-E1 to AMX-E6).
"""

# Numba types these bodies.
# mypy: ignore-errors
from __future__ import annotations

from numba import njit

from .words import accumulate_pairs, add_rows, copy_bytes, load_i64, load_u8, load_u16, store_u8, zero_bytes

TILES = 8
MAX_ROWS = 16
ROW_BYTES = 64
TILE_BYTES = MAX_ROWS * ROW_BYTES

CONFIG_BYTES = 64
_START_ROW_AT, _COLSB_AT, _RESERVED_AT, _ROWS_AT = 1, 16, 32, 48
_TILES_AT = CONFIG_BYTES
_EVEN_AT = _TILES_AT + TILES * TILE_BYTES
_ODD_AT = _EVEN_AT + TILE_BYTES
STATE_BYTES = _ODD_AT + TILE_BYTES

# How an instruction ends.
DONE, UNDEFINED, PROTECTED, EXHAUSTED = range(4)


@njit(error_model="numpy")
def _rows(state, tile):
    return load_u8(state + _ROWS_AT + tile)


@njit(error_model="numpy")
def _colsb(state, tile):
    return load_u16(state + _COLSB_AT + 2 * tile)


@njit(error_model="numpy")
def _tile(state, tile):
    return state + _TILES_AT + TILE_BYTES * tile


@njit(error_model="numpy")
def _is_usable(state, tile):
    """Whether a tile is configured, in whole 32-bit elements."""
    return _rows(state, tile) != 0 and _colsb(state, tile) & 3 == 0


@njit(error_model="numpy")
def is_legal(config):
    """Whether the 64 bytes at an address are a configuration of palette 1."""
    if load_u8(config) != 1 or load_i64(config) >> 16 != 0 or load_i64(config + 8) != 0:
        return False
    if load_i64(config + _RESERVED_AT) != 0 or load_i64(config + _RESERVED_AT + 8) != 0:
        return False
    if load_i64(config + _ROWS_AT + TILES) != 0:
        return False
    for tile in range(TILES):
        rows, colsb = _rows(config, tile), _colsb(config, tile)
        if rows > MAX_ROWS or colsb > ROW_BYTES or (rows == 0) != (colsb == 0):
            return False
    return True


@njit(error_model="numpy")
def configure(state, config):
    """`ldtilecfg` with a legal configuration of palette 1: all tiles zero."""
    zero_bytes(state + _TILES_AT, TILES * TILE_BYTES)
    copy_bytes(state, config, CONFIG_BYTES)


@njit(error_model="numpy")
def zero(state, tile):
    """`tilezero`."""
    if _rows(state, tile) == 0:
        return UNDEFINED
    zero_bytes(_tile(state, tile), TILE_BYTES)
    store_u8(state + _START_ROW_AT, 0)
    return DONE


@njit(error_model="numpy")
def move(state, tile, address, stride, to_memory):
    """`tileloadd`, `tileloaddt1`, and `tilestored` if ``to_memory``."""
    start, rows, colsb = load_u8(state + _START_ROW_AT), _rows(state, tile), _colsb(state, tile)
    if not _is_usable(state, tile) or start >= rows:
        return UNDEFINED
    for row in range(start, rows):
        inside, outside = _tile(state, tile) + ROW_BYTES * row, address + stride * row
        if to_memory:
            copy_bytes(outside, inside, colsb)
        else:
            copy_bytes(inside, outside, colsb)
    store_u8(state + _START_ROW_AT, 0)
    return DONE


@njit(error_model="numpy")
def dot_bfloat16(state, target, left, right):
    """`tdpbf16ps`: target += left . right, even and odd products summed apart, in the vector unit's settings.

    All 16 lanes are computed: what lies past ``colsb`` is never seen, and gone with the next configuration.
    """
    if target in (left, right) or left == right:
        return UNDEFINED
    if not (_is_usable(state, target) and _is_usable(state, left) and _is_usable(state, right)):
        return UNDEFINED
    rows, depth = _rows(state, left), _rows(state, right)
    if _rows(state, target) != rows or _colsb(state, left) != 4 * depth:
        return UNDEFINED
    if _colsb(state, target) != _colsb(state, right):
        return UNDEFINED
    even, odd = state + _EVEN_AT, state + _ODD_AT
    zero_bytes(even, 2 * TILE_BYTES)
    # Down the rows inside: each accumulator rests 16 steps between two sums.
    for k in range(depth):
        for row in range(rows):
            at = ROW_BYTES * row
            pair = _tile(state, left) + at + 4 * k
            accumulate_pairs(even + at, odd + at, pair, _tile(state, right) + ROW_BYTES * k)
    for row in range(rows):
        at = ROW_BYTES * row
        add_rows(_tile(state, target) + at, even + at, odd + at)
    store_u8(state + _START_ROW_AT, 0)
    return DONE
