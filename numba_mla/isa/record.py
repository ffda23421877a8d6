"""What an instruction set is to the generator: sizes, and tile operations as LLVM text with numpy twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TileOp:
    """One step of a register block: LLVM text and its executable meaning, side by side.

    Parameters
    ----------
    text : str
        A template of LLVM lines. ``{result}`` is the value it defines, ``{width}`` the vector's float32
        lanes; the other fields are the operands that the register block fills in; ``{result}_x`` names are
        free for steps between.
    declarations : tuple of str
        Intrinsics that the text calls, with ``{width}`` for the vector's lanes.
    twin : callable
        The same operation on numpy arrays.
    """

    text: str
    declarations: tuple[str, ...]
    twin: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Isa:
    """An instruction set, as the generator and the kernels see it.

    Parameters
    ----------
    name : str
        LLVM's feature name, or ``generic``.
    cpu, features : str
        LLVM's target CPU and feature string that its functions are compiled for.
    vector_width : int
        float32 lanes of a vector.
    k_pack : int
        Features (of a score) or keys (of a value) that one dot step takes: 1 for float32 multiply-add.
    p_rounding : float
        Unit roundoff of a probability before P.V (u_P of the tolerance); 0 where it stays float32.
    native : str
        The element type whose rows the register blocks read in place; all others go through a panel.
    score_block : tuple of int
        MR x NR of a score product: key rows x vectors of lanes.
    value_block : tuple of int
        MR x NR of a value product: lanes x vectors of value columns.
    weight_block : tuple of int
        MR x NR of a product with packed weights: rows of the left operand x vectors of outputs.
    lane_group : int
        Lanes that one work item computes together.
    broadcast : TileOp
        ``(row)`` -> a vector whose lanes all hold the row's next dot step.
    multiply_add : TileOp
        ``(a, b, acc)`` -> acc + a . b, lane by lane.
    """

    name: str
    cpu: str
    features: str
    vector_width: int
    k_pack: int
    p_rounding: float
    native: str
    score_block: tuple[int, int]
    value_block: tuple[int, int]
    weight_block: tuple[int, int]
    lane_group: int
    broadcast: TileOp
    multiply_add: TileOp

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return 4 * self.vector_width
