"""Workloads: an attention operation on inputs that are made, under any tiling, and what its result is checked by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..checks import FLOAT_DTYPES, check_count
from ..isa import Tiling
from ..memory import aligned_zeros
from ..ops import decode, extend, prefill
from ..runtime import select_isa, tiled_isa
from ..testing.inputs import decode_problem, latent_problem, prefill_problem, start_locations
from ..testing.tolerance import AttentionBounds, extend_bounds, prefill_bounds

OPERATIONS: dict[str, Callable] = {"decode": decode, "extend": extend, "prefill": prefill}
# DeepSeek's: a cached row and its latent part; a materialised key and a value.
ROW_WIDTH, LATENT = 576, 512
QK_DIM, V_DIM = 192, 128
_NEW_TOKENS = 64
# Scores that the float64 reference computes at most: a few seconds' work.
_CHECKED_SCORES = 1 << 21


class Check(NamedTuple):
    """What a check found.

    Attributes
    ----------
    error : float
        The largest error over its tolerance: 1 at most if the result is right.
    same_bits : bool or None
        Whether the bits are those of the default tiling; None where there is nothing to compare with.
    """

    error: float
    same_bits: bool | None

    def is_right(self, tiling: Tiling) -> bool:
        """Whether the error is within its tolerance, and the bits are what the tiling promises."""
        return self.error <= 1 and (tiling.changes_bits or self.same_bits is not False)


@dataclass(frozen=True)
class Candidate:
    """What is timed: a call with a tiling that fits, its check, and its work.

    Parameters
    ----------
    run : callable
        One call.
    check : callable
        Gives a ``Check`` of what a call computes.
    flops, num_bytes : int
        Work of one call; bytes that it must read.
    """

    run: Callable[[], object]
    check: Callable[[], Check]
    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Workload:
    """An attention operation on inputs that are made, into outputs that are reused.

    Parameters
    ----------
    op : {"decode", "extend", "prefill"}
        The operation. Prefill is of whole requests, with keys of 192 and values of 128 columns; the others read rows
        of 576 from shuffled pages.
    num_requests, num_heads : int
    seq_len : int
        Tokens of each request, the new ones included.
    num_new : int, optional
        Of extend: new tokens of each request, 64 (or all) by default; 1 in decode, all in prefill.
    block_size : int
        Rows of a page; unused in prefill.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of queries and of the cache, or of keys and values.
    isa : str, optional
        One of ``available_isas()``; None: the one in force when it is made.
    seed : int
        Of all inputs.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.

    Examples
    --------
    >>> from numba_mla import Tiling
    >>> from numba_mla.lab import Workload
    >>> workload = Workload("decode", num_heads=3, seq_len=70, isa="generic")
    >>> workload.flops == 2 * 3 * 70 * (576 + 512)
    True
    >>> check = workload.check(Tiling(lane_group=64))
    >>> check.error <= 1, check.same_bits
    (True, True)
    """

    op: str
    _: KW_ONLY
    num_requests: int = 1
    num_heads: int = 128
    seq_len: int = 4096
    num_new: int | None = None
    block_size: int = 64
    dtype: str = "bfloat16"
    isa: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        dtypes = [str(known) for known in FLOAT_DTYPES]
        for name, value, choices in (("op", self.op, list(OPERATIONS)), ("dtype", self.dtype, dtypes)):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
        for name, least in (("num_requests", 1), ("num_heads", 1), ("seq_len", 1), ("block_size", 1), ("seed", 0)):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least))
        object.__setattr__(self, "num_new", self._new_tokens())
        object.__setattr__(self, "isa", select_isa(self.isa, self.dtype).name)

    def _new_tokens(self) -> int:
        default = {"decode": 1, "extend": min(_NEW_TOKENS, self.seq_len), "prefill": self.seq_len}[self.op]
        if self.num_new is None:
            return default
        number = check_count("num_new", self.num_new, 1)
        if number > self.seq_len or (self.op != "extend" and number != default):
            wanted = f"1 to seq_len = {self.seq_len}" if self.op == "extend" else f"{default} or None in {self.op}"
            raise ValueError(f"num_new: expected {wanted}, got {number}")
        return number

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call; those that causality leaves."""
        new = self._new
        seen = new * (self.seq_len - new) + new * (new + 1) // 2
        widths = QK_DIM + V_DIM if self.op == "prefill" else ROW_WIDTH + LATENT
        return 2 * self.num_requests * self.num_heads * seen * widths

    @property
    def num_bytes(self) -> int:
        """Bytes that one call must read: of the cache's rows, or of queries, keys and values."""
        width = self.num_heads * (2 * QK_DIM + V_DIM) if self.op == "prefill" else ROW_WIDTH
        return self.num_requests * self.seq_len * width * np.dtype(self.dtype).itemsize

    @property
    def checked(self) -> float:
        """How much of the default tiling's result is compared with the float64 reference: 1 is all of it."""
        requests, windows = self._sample()
        tokens = len(requests) * sum(stop - start for start, stop in windows)
        return tokens / (self.num_requests * self._new)

    def candidate(self, tiling: Tiling) -> Candidate:
        """A call with a tiling.

        Raises
        ------
        ValueError
            Where the tiling does not fit the instruction set; the message says why.
        """
        tiled_isa(self.isa, self.dtype, tiling, one_head=self.op == "prefill")
        return Candidate(lambda: self.run(tiling), lambda: self.check(tiling), self.flops, self.num_bytes)

    def run(self, tiling: Tiling | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Run the operation once.

        Parameters
        ----------
        tiling : Tiling, optional
            None: the default.

        Returns
        -------
        out, lse : ndarray
            The same arrays each time.

        Raises
        ------
        ValueError, TypeError
            A tiling that does not fit the instruction set.
        """
        out, lse = self._outputs
        return OPERATIONS[self.op](**self.problem, out=out, lse=lse, isa=self.isa, tiling=tiling)

    def check(self, tiling: Tiling | None = None) -> Check:
        """Run once into spoilt outputs and compare.

        Parameters
        ----------
        tiling : Tiling, optional
            None: the default.

        Returns
        -------
        Check
            Bits are those of the whole result. The error is that of what ``checked`` tells: all of it, or where
            that would take the float64 reference more than a few seconds, of some requests (spread evenly) their
            first, middle and last tokens, with all heads. A result with the bits of the default one is not computed
            again: its error is the default one's.
        """
        # Before the run: making it leaves the default tiling's result in the same outputs.
        expected = self._expected
        found = self._run_spoilt(tiling)
        if all(np.array_equal(x, y) for x, y in zip(found, expected.bits, strict=True)):
            return Check(expected.error, True)
        return Check(self._error(), False)

    @cached_property
    def problem(self) -> dict:
        """The arguments of the operation."""
        rng, lengths = np.random.default_rng(self.seed), [self.seq_len] * self.num_requests
        if self.op == "prefill":
            return prefill_problem(rng, self.num_heads, lengths, None, QK_DIM, V_DIM, self.dtype)
        if self.op == "decode":
            problem = decode_problem(rng, self.num_heads, lengths, self.block_size, dtype=self.dtype)
        else:
            new = [self._new] * self.num_requests
            problem = latent_problem(rng, self.num_heads, lengths, new, self.block_size, dtype=self.dtype)
        # Where PagedLatentCache would have it: on a cache line's boundary.
        cache = aligned_zeros(problem["kv_cache"].shape, problem["kv_cache"].dtype)
        cache[:] = problem["kv_cache"]
        return problem | {"kv_cache": cache}

    @property
    def _new(self) -> int:
        assert self.num_new is not None
        return self.num_new

    @cached_property
    def _outputs(self) -> tuple[np.ndarray, np.ndarray]:
        q = self.problem["q"]
        width = V_DIM if self.op == "prefill" else LATENT
        return np.empty((*q.shape[:2], width), q.dtype), np.empty(q.shape[:2], np.float32)

    @cached_property
    def _expected(self) -> _Expected:
        bits = tuple(x.copy() for x in self._run_spoilt(None))
        return _Expected(bits, self._error())

    def _run_spoilt(self, tiling: Tiling | None) -> tuple[np.ndarray, ...]:
        """The bits of a run into outputs that held NaN."""
        for out in self._outputs:
            out.fill(np.nan)
        return tuple(x.view(f"u{x.itemsize}") for x in self.run(tiling))

    def _error(self) -> float:
        """The largest error over the tolerance of what the outputs hold, as far as it is compared."""
        out, lse = (x[self._sampled_tokens] for x in self._outputs)
        return self._bounds.excess(out, lse)

    def _sample(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Which requests are compared with the reference, and which of their new tokens: first to before last."""
        tokens = max(1, _CHECKED_SCORES // (self.seq_len * self.num_heads))
        requests = np.unique(np.linspace(0, self.num_requests - 1, min(tokens, self.num_requests)).astype(int))
        each = tokens // len(requests)
        if each >= self._new:
            return requests.tolist(), [(0, self._new)]
        size = max(1, each // 3)
        starts = sorted({0, (self._new - size) // 2, self._new - size})
        return requests.tolist(), [(start, start + size) for start in starts]

    @cached_property
    def _sampled_tokens(self) -> np.ndarray:
        requests, windows = self._sample()
        return np.concatenate([request * self._new + np.arange(*window) for request in requests for window in windows])

    @cached_property
    def _bounds(self) -> AttentionBounds:
        """The reference and its tolerance, each window of tokens as a request of its own that ends with it."""
        requests, windows = self._sample()
        lengths = [self.seq_len - self._new + stop for _ in requests for _, stop in windows]
        starts = start_locations([stop - start for _ in requests for start, stop in windows])
        problem, q = self.problem, self.problem["q"][self._sampled_tokens]
        rounding = select_isa(self.isa, self.dtype).p_rounding
        if self.op == "prefill":
            begins = [request * self.seq_len for request in requests for _ in windows]
            rows = np.concatenate([begin + np.arange(n) for begin, n in zip(begins, lengths, strict=True)])
            keys = {"k": problem["k"][rows], "v": problem["v"][rows], "kv_start_loc": start_locations(lengths)}
            return prefill_bounds(q, query_start_loc=starts, scale=problem["scale"], p_rounding=rounding, **keys)
        table = problem["block_table"][np.repeat(requests, len(windows))]
        return extend_bounds(q, problem["kv_cache"], table, lengths, starts, scale=problem["scale"],
                             p_rounding=rounding)  # fmt: skip


class _Expected(NamedTuple):
    """The default tiling's result, and its error over the tolerance."""

    bits: tuple[np.ndarray, ...]
    error: float
