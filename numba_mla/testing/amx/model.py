"""AMX in numpy, written from the manual's pseudocode: what the emulator and the hardware are checked against.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, STTILECFG, TILERELEASE,
TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, and section 2.10 (exception classes AMX-E1 to AMX-E6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

_TILES, _MAX_ROWS, _MAX_COLSB = 8, 16, 64
_MIN_NORMAL = 2.0**-126


class IllegalInstruction(Exception):  # noqa: N818 - the manual's name of #UD
    """#UD: Linux sends SIGILL."""


class ProtectionFault(Exception):  # noqa: N818 - the manual's name of #GP
    """#GP: Linux sends SIGSEGV."""


def tile_config(shapes: Sequence[tuple[int, int]], *, palette: int = 1, start_row: int = 0) -> np.ndarray:
    """The 64 bytes that `ldtilecfg` reads.

    Parameters
    ----------
    shapes : sequence of (int, int)
        Rows and bytes per row (colsb) of tiles 0, 1, ...; the tiles after them are not configured.
    palette, start_row : int
        The first two bytes.

    Returns
    -------
    ndarray of uint8, (64,)

    Examples
    --------
    >>> config = tile_config([(16, 64), (8, 32)])
    >>> int(config[0]), config[16:20].view(np.uint16).tolist(), config[48:50].tolist()
    (1, [64, 32], [16, 8])
    """
    config = np.zeros(64, np.uint8)
    config[:2] = palette, start_row
    for tile, (rows, colsb) in enumerate(shapes):
        config[16 + 2 * tile :][:2].view(np.uint16)[0] = colsb
        config[48 + tile] = rows
    return config


class Tiles:
    """The tile state of one thread, and the instructions as its methods.

    Methods raise `IllegalInstruction` and `ProtectionFault` where the instructions do. Memory is given as a
    one-dimensional array of uint8, addresses as offsets into it.
    """

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        """`tilerelease`: nothing is configured."""
        self._config: np.ndarray | None = None
        self._data = np.zeros((_TILES, _MAX_ROWS, _MAX_COLSB), np.uint8)

    def load_config(self, config: np.ndarray) -> None:
        """`ldtilecfg`: all tiles are zero after it."""
        if config[0] == 0:
            self.release()
            return
        colsb, rows = config[16:32].view(np.uint16), config[48:56]
        legal = config[0] == 1 and not (config[2:16].any() or config[32:48].any() or config[56:].any())
        legal = legal and (colsb <= _MAX_COLSB).all() and (rows <= _MAX_ROWS).all()
        if not (legal and ((rows == 0) == (colsb == 0)).all()):
            raise ProtectionFault("ldtilecfg")
        self.release()
        self._config = config.copy()

    def store_config(self) -> np.ndarray:
        """`sttilecfg`: the configuration's 64 bytes, zeros if there is none."""
        return np.zeros(64, np.uint8) if self._config is None else self._config.copy()

    def zero(self, tile: int) -> None:
        """`tilezero`."""
        self._shape(tile)
        self._data[tile] = 0
        self._start_row(0)

    def load(self, tile: int, memory: np.ndarray, address: int, stride: int) -> None:
        """`tileloadd`: rows from the start row on, bytes past them zero."""
        rows, colsb = self._whole_shape(tile)
        for row in self._rows_to_do(rows):
            self._data[tile, row] = 0
            self._data[tile, row, :colsb] = memory[address + row * stride :][:colsb]
        self._data[tile, rows:] = 0
        self._start_row(0)

    def store(self, tile: int, memory: np.ndarray, address: int, stride: int) -> None:
        """`tilestored`: rows from the start row on."""
        rows, colsb = self._whole_shape(tile)
        for row in self._rows_to_do(rows):
            memory[address + row * stride :][:colsb] = self._data[tile, row, :colsb]
        self._start_row(0)

    def dot_bf16(self, target: int, left: int, right: int) -> None:
        """`tdpbf16ps`: target += left . right."""
        if len({target, left, right}) < 3:
            raise IllegalInstruction("a tile named twice")
        rows, colsb = self._whole_shape(target)
        depth = self._whole_shape(right)[0]
        if self._whole_shape(left) != (rows, 4 * depth) or self._whole_shape(right)[1] != colsb:
            raise IllegalInstruction("shapes disagree")
        columns = colsb // 4
        a = self._pairs(left)[:rows, :depth]  # [row, k, 2]
        b = self._pairs(right)[:depth, :columns]  # [k, column, 2]
        c = self._data[target].view(np.float32)[:rows, :columns]
        sums = np.zeros((rows, columns, 2), np.float32)
        for k in range(depth):
            sums = fused_multiply_add(a[:, None, k], b[None, k], sums)
        one = np.float32(1)
        c[...] = fused_multiply_add(one, c, fused_multiply_add(one, sums[..., 0], sums[..., 1]))
        self._start_row(0)

    def _pairs(self, tile: int) -> np.ndarray:
        """A tile's bfloat16 values, exact in float32, [row, element, 2]."""
        codes = self._data[tile].view(np.uint16).astype(np.uint32) << 16
        return codes.view(np.float32).reshape(_MAX_ROWS, -1, 2)

    def _shape(self, tile: int) -> tuple[int, int]:
        if self._config is None or self._config[48 + tile] == 0:
            raise IllegalInstruction(f"tile {tile} is not configured")
        return int(self._config[48 + tile]), int(self._config[16 + 2 * tile :][:2].view(np.uint16)[0])

    def _whole_shape(self, tile: int) -> tuple[int, int]:
        rows, colsb = self._shape(tile)
        if colsb % 4:
            raise IllegalInstruction(f"tile {tile} has {colsb} bytes per row")
        return rows, colsb

    def _rows_to_do(self, rows: int) -> range:
        start = int(self.store_config()[1])
        if start >= rows:
            raise IllegalInstruction(f"start row {start} of {rows}")
        return range(start, rows)

    def _start_row(self, row: int) -> None:
        if self._config is not None:
            self._config[1] = row


def fused_multiply_add(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """a * b + c of float32 with one rounding, to nearest even, denormals taken as zero and flushed to zero.

    Parameters
    ----------
    a, b : array_like of float32
        Their product must be exact in float64: bfloat16 values, or one of them 1.
    c : array_like of float32

    Returns
    -------
    ndarray of float32
        A result is flushed if it is below 2^-126 after rounding to 24 bits.

    Examples
    --------
    >>> float(fused_multiply_add(np.float32(1 + 2**-7), np.float32(1 + 2**-7), np.float32(2**-30)))
    1.0156860...
    """
    with np.errstate(all="ignore"):
        product = _without_denormals(a) * _without_denormals(b)
        addend = _without_denormals(c)
        total = _round_to_odd(product, addend)
        # Scaled up, float32 has all its 24 bits where the result itself would be denormal.
        is_tiny = np.abs((total * 2.0**64).astype(np.float32)) < np.float32(_MIN_NORMAL * 2.0**64)
        flushed = np.copysign(np.where(is_tiny, 0.0, _MIN_NORMAL), total)
        return np.where(np.abs(total) < _MIN_NORMAL, flushed, total).astype(np.float32)


def _without_denormals(x: ArrayLike) -> np.ndarray:
    """float32 to float64, denormals to zeros of their sign."""
    wide = np.asarray(x, np.float32).astype(np.float64)
    return np.where(np.abs(wide) < _MIN_NORMAL, np.copysign(0.0, wide), wide)


def _round_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64; the last bit is set if the sum is not exact, so that rounding once more to fewer bits is right.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd
    (IEEE Transactions on Computers 57(4), 2008).
    """
    total = np.asarray(a + b)
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)  # Knuth's two-sum: exact
    bits = total.view(np.int64)
    is_off = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(is_off, bits + step, bits).view(np.float64)
