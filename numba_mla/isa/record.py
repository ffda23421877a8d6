"""What an instruction set is to the generator: sizes, and tile operations as LLVM text with numpy twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .tiling import Tiling


@dataclass(frozen=True)
class TileOp:
    """One step of a register block: LLVM text and its executable meaning, side by side.

    Parameters
    ----------
    text : str
        A template of LLVM lines. ``{result}`` is the value it defines, ``{width}`` the vector's float32
        lanes; the other fields are the operands that the register block fills in;
        ``{result}_x`` names are free for steps between.
    declarations : tuple of str
        Intrinsics that the text calls, with ``{width}`` for the vector's lanes.
    twin : callable
        The same operation on numpy arrays.
    """

    text: str
    declarations: tuple[str, ...]
    twin: Callable[..., np.ndarray]


@dataclass(frozen=True)
class PowerOps:
    """What takes a power of two apart and puts it together, an instruction each.

    Parameters
    ----------
    round_off : TileOp
        ``(x)`` -> x rounded to a whole number.
    scale : TileOp
        ``(x, n, keep)`` -> x 2**n where ``keep`` is true, else 0; n is a float32.
    """

    round_off: TileOp
    scale: TileOp


@dataclass(frozen=True)
class TileOps:
    """Instructions on tile operands of 16 rows of 64 bytes, as LLVM text, and what the dot product means.

    Parameters
    ----------
    load, store, zero, dot, configure, release : str
        Templates of one LLVM line. Tiles are named by number: ``{tile}``, or ``{total}``, ``{left}`` and
        ``{right}``; ``{pointer}`` and ``{stride}`` say where in memory.
    declarations : tuple of str
        Intrinsics that they call.
    twin : callable
        ``(left, right, total)`` on numpy arrays, in the bits of float32.
    """

    load: str
    store: str
    zero: str
    dot: str
    configure: str
    release: str
    declarations: tuple[str, ...]
    twin: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Blocks:
    """Vectors, and the register blocks made of them, MR x NR: rows of the broadcast operand x vectors of the other.

    Parameters
    ----------
    vector_width : int
        float32 lanes of a vector.
    registers : int
        How many vectors there are registers for.
    weight : tuple of int
        Rows of the left operand x vectors of outputs, of a product with packed weights.
    tiling : Tiling
        Attention's blocks, loops and work items.
    """

    vector_width: int
    registers: int
    weight: tuple[int, int]
    tiling: Tiling


@dataclass(frozen=True)
class Isa:
    """An instruction set, as the generator and the kernels see it.

    Parameters
    ----------
    name : str
        LLVM's feature name, or ``generic``.
    cpu, features : str
        LLVM's target CPU and feature string that its functions are compiled for.
    blocks : Blocks
        The vectors, and the register blocks made of them.
    k_pack : int
        Features (of a score) or keys (of a value) that one dot step takes: 1 for float32 multiply-add.
    p_rounding : float
        Unit roundoff of a probability before P.V (u_P of the tolerance); 0 where it stays float32.
    native : str
        The element type whose rows the register blocks read in place; all others go through a panel.
    dtypes : tuple of str
        Element types of queries and left operands that it takes.
    companion : str or None
        The instruction set that takes all others.
    prefill_group : int
        Lanes that one work item computes together at most where rows are one head's of many: more than the tiling has
        for rows that heads share, since these are narrower.
    multiply_add : TileOp
        ``(row, b, acc)`` -> acc + a . b, lane by lane, where a is the dot step that ``row`` points at, in all
        lanes. A step's elements, ``k_pack`` of them, are in the bits of one float32.
    power : PowerOps or None
        Where instructions for powers of two are at hand; else integer arithmetic does.
    tiles : TileOps or None
        Where both products run on tile operands instead.
    look_up : TileOp or None
        ``(first, codes, second)`` -> the bytes, of the 128 that ``first`` and ``second`` hold, which the lower 7
        bits of 64 codes say; None where arithmetic does as well.
    narrow : TileOp or None
        ``(low, high)`` -> two vectors of float32, rounded to bfloat16, side by side; None where arithmetic does it.
    """

    name: str
    cpu: str
    features: str
    blocks: Blocks
    k_pack: int
    p_rounding: float
    native: str
    dtypes: tuple[str, ...]
    companion: str | None
    prefill_group: int
    multiply_add: TileOp
    power: PowerOps | None = None
    tiles: TileOps | None = None
    look_up: TileOp | None = None
    narrow: TileOp | None = None

    @property
    def declarations(self) -> tuple[str, ...]:
        """What its operations on vectors declare."""
        powers = () if self.power is None else (self.power.round_off, self.power.scale)
        ops = filter(None, (self.multiply_add, *powers, self.look_up, self.narrow))
        return tuple(line.format(width=self.vector_width) for op in ops for line in op.declarations)

    @property
    def granule(self) -> int:
        """Rows, lanes and dot steps that the products take together: what a tile holds, or 1."""
        return 1 if self.tiles is None else 16

    @property
    def vector_width(self) -> int:
        """float32 lanes of a vector."""
        return self.blocks.vector_width

    @property
    def has_step_order(self) -> bool:
        """Whether sums of values have their columns in the order in which a step of two keys brings them."""
        return self.tiles is None and self.k_pack > 1

    @property
    def value_lanes(self) -> tuple[int, ...]:
        """Lanes of a value block: the most, and what covers any rest, largest first."""
        most = self.tiling.value_block[0]
        if self.tiles is not None:
            return tuple(range(most, 0, -self.granule))
        return (most, *(n for n in (4, 2, 1) if n < most))

    @property
    def value_vectors(self) -> tuple[int, ...]:
        """Vectors of columns of a value block: the most, and what covers any rest, largest first."""
        return tuple(range(self.tiling.value_block[1], 0, -self.k_pack if self.has_step_order else -1))

    @property
    def weight_rows(self) -> tuple[int, ...]:
        """Rows of a block of packed weights: the most, and what covers any rest, largest first."""
        most = self.blocks.weight[0]
        return (most,) if self.tiles is not None else (most, *(n for n in (4, 2, 1) if n < most))

    @property
    def native_bytes(self) -> int:
        """Bytes of a native element."""
        return 4 // self.k_pack

    @property
    def column_step(self) -> int:
        """Value columns that a value block takes at least: whole vectors, of each key that a step takes."""
        return self.vector_width * self.k_pack

    @property
    def tiling(self) -> Tiling:
        """How attention is tiled."""
        return self.blocks.tiling

    @property
    def separate_values(self) -> bool:
        """Whether the value product reads a panel of pairs of rows that are brought together once a key tile."""
        return self.k_pack > 1 and self.tiling.interleave == "separate"

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return 4 * self.vector_width
