"""How attention is cut to fit a machine: work items, register blocks, loops, and what is prefetched."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..checks import check_count

# A field that is left to the tiling that this one is laid over; those of instruction sets have none.
_OPEN: Any = None
_BLOCKS = ("score_block", "value_block")
_CHOICES = {"interleave": ("fused", "separate"), "item_order": ("auto", "heaviest", "rows")}
_LEAST = {"prefetch_rows": 0}
# Beyond these LLVM would be busy for minutes, or scratch memory be out of all proportion.
_MOST = {"lane_group": 4096, "least_lanes": 4096, "score_block": 64, "value_block": 64, "score_unroll": 64,
         "value_unroll": 64, "prefetch_rows": 256, "key_tile": 4096, "kv_split": 1 << 20}  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How an attention call is tiled. A field that is None is as the instruction set's own tiling has it.

    Parameters
    ----------
    lane_group : int, optional
        Lanes (query token, head) that one work item computes together at most.
    least_lanes : int, optional
        What that is halved down to where there would not be enough items for all threads; if ``lane_group`` is
        given, None means that it is kept.
    score_block : pair of int, optional
        MR x NR of S = K Q: key rows x vectors of lanes that are kept in registers.
    value_block : pair of int, optional
        MR x NR of O = P V: lanes x vectors of value columns.
    score_unroll : int, optional
        Dot steps (pairs of bfloat16, single float32) written out between two turns of the score's loop.
    value_unroll : int, optional
        Keys written out between two turns of the value's loop.
    prefetch_rows : int, optional
        How many rows before it is read a key row is prefetched.
    interleave : {"fused", "separate"}, optional
        Whether pairs of value rows are brought together in the value's loop, each time that they are read, or
        once a key tile, into a panel.
    item_order : {"auto", "heaviest", "rows"}, optional
        Which items are taken first: the longest, or by their key rows; "auto" is the first of these unless items are
        many.
    key_tile : int, optional
        **Changes bits.** Keys that the online softmax takes together.
    kv_split : int, optional
        **Changes bits.** Keys whose partial result is merged as a unit; whole key tiles.

    Notes
    -----
    All but the last two fields leave every bit of a result as it is. Whether a tiling fits an instruction set (its
    registers, its tiles) is found out by the call that uses it.

    Examples
    --------
    >>> from numba_mla import Tiling
    >>> tiling = Tiling(lane_group=64, score_block=(8, 2))
    >>> tiling.changes_bits, Tiling(key_tile=128).changes_bits
    (False, True)
    """

    lane_group: int = _OPEN
    least_lanes: int = _OPEN
    score_block: tuple[int, int] = _OPEN
    value_block: tuple[int, int] = _OPEN
    score_unroll: int = _OPEN
    value_unroll: int = _OPEN
    prefetch_rows: int = _OPEN
    interleave: Literal["fused", "separate"] = _OPEN
    item_order: Literal["auto", "heaviest", "rows"] = _OPEN
    key_tile: int = _OPEN
    kv_split: int = _OPEN

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))

    @property
    def changes_bits(self) -> bool:
        """Whether it names a field that changes bits of results."""
        return self.key_tile is not None or self.kv_split is not None

    def over(self, base: Tiling) -> Tiling:
        """This tiling, with another's value for each field that is None.

        Parameters
        ----------
        base : Tiling
            What is laid under.

        Returns
        -------
        Tiling
            ``least_lanes`` follows ``lane_group``, if that alone is given.

        Examples
        --------
        >>> from numba_mla import Tiling
        >>> Tiling(lane_group=64).over(Tiling(lane_group=128, least_lanes=16, prefetch_rows=8))
        Tiling(lane_group=64, least_lanes=64, prefetch_rows=8)
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if "lane_group" in given:
            given.setdefault("least_lanes", given["lane_group"])
        return replace(base, **given)

    def save(self, path) -> None:
        """Write the fields that are not None to a JSON file.

        Parameters
        ----------
        path : str or Path
            The file, which is written anew.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> from numba_mla import Tiling
        >>> path = Path(tempfile.mkdtemp()) / "tiling.json"
        >>> Tiling(lane_group=64).save(path)
        >>> Tiling.load(path)
        Tiling(lane_group=64)
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        Path(path).write_text(json.dumps(given, indent=2) + "\n")

    @classmethod
    def load(cls, path) -> Tiling:
        """Read what ``save`` has written.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Tiling

        Raises
        ------
        OSError, ValueError, TypeError
            No such file; not a tiling; a field that does not hold what it may.
        """
        try:
            given = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"path: expected a tiling in JSON, got {path}: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not given.keys() <= known:
            extra = sorted(given.keys() - known) if isinstance(given, dict) else type(given).__name__
            raise ValueError(f"path: expected fields of a tiling ({', '.join(sorted(known))}), got {extra} in {path}")
        return cls(**given)

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"Tiling({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


def _checked(name: str, value: Any) -> Any:
    """A field's value as it is kept; an error names the field."""
    if value is None:
        return None
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, _CHOICES[name]))}, got {value!r}")
        return value
    if name in _BLOCKS:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ValueError(f"{name}: expected a pair of numbers, MR and NR, got {value!r}")
        return tuple(_number(name, number) for number in value)
    return _number(name, value)


def _number(name: str, value: Any) -> int:
    number = check_count(name, value, _LEAST.get(name, 1))
    if number > _MOST[name]:
        raise ValueError(f"{name}: expected at most {_MOST[name]}, got {number}")
    return number


# What serves all instruction sets. MR x NR is what differs: 8 to 32 sums, enough to cover a dot instruction's latency
# twice over, which leave registers for the other operand; scores want few vectors of lanes, since a token's heads may
# fill one alone.
_COMMON = Tiling(
    lane_group=128, least_lanes=16, score_unroll=16, value_unroll=4, prefetch_rows=16, interleave="fused",
    item_order="auto", key_tile=256, kv_split=1024,
)  # fmt: skip
AVX512 = Tiling(score_block=(8, 1), value_block=(8, 2)).over(_COMMON)
# Rows of bfloat16 are read where they lie, one column of all after another, each by the load of its place in a turn. A
# turn is so long that this load's stride is none which processors predict: they would fetch rows past each page's end,
# from memory, that nobody reads.
AVX512BF16 = Tiling(value_unroll=32).over(AVX512)
AVX2 = Tiling(least_lanes=8, score_block=(4, 3), value_block=(6, 2)).over(_COMMON)
NEON = Tiling(least_lanes=4, score_block=(4, 4), value_block=(4, 4)).over(_COMMON)
SSE = Tiling(least_lanes=4, score_block=(4, 2), value_block=(4, 2)).over(_COMMON)
AMX = Tiling(score_block=(32, 2), value_block=(32, 2), value_unroll=32, interleave="separate").over(_COMMON)
