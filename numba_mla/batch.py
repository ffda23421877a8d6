"""Batch: what a step's layers have to know of its requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Requests(NamedTuple):
    """Some requests of a step: their pages, lengths and new tokens, as `extend` takes them."""

    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's metadata, shared by all layers.

    Attributes
    ----------
    request_ids : tuple
        The step's B requests, in the order of their tokens.
    positions : ndarray, (T,), int64
        Position in its request of each new token.
    query_start_loc : ndarray, (B+1,), int32
        Where each request's new tokens start, from 0 to T.
    seq_lens : ndarray, (B,), int32
        Tokens of each request, the new ones included.
    block_table : ndarray, (B, M), int32
        Pages of each request, padded with -1.
    slot_mapping : ndarray, (T,), int64
        Row of the cache that each new token goes to: ``page * block_size + offset``.
    lives : tuple
        What tells this batch from one of another cache, or of a request that has been cut back since.
    """

    request_ids: tuple[Hashable, ...]
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    lives: tuple[object, ...] = field(default=(), repr=False)

    @property
    def requests(self) -> Requests:
        """All of its requests."""
        return Requests(self.block_table, self.seq_lens, self.query_start_loc)


def build_batch(
    request_ids: tuple[Hashable, ...],
    counts: Sequence[int],
    *,
    seq_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    lives: tuple[object, ...],
    block_size: int,
) -> Batch:
    """Describe a step in which each request adds the last `counts` of its `seq_lens` tokens, on its `pages`.

    Examples
    --------
    >>> batch = build_batch(("a", "b"), [1, 2], seq_lens=[3, 2], pages=[[5, 0], [1]], lives=(), block_size=2)
    >>> batch.positions.tolist(), batch.slot_mapping.tolist(), batch.block_table.tolist()
    ([2, 0, 1], [0, 2, 3], [[5, 0], [1, -1]])
    """
    num_new, lengths = np.array(counts, np.int64), np.array(seq_lens, np.int64)
    block_table = np.full((len(pages), max(map(len, pages), default=0)), -1, np.int32)
    for row, held in zip(block_table, pages, strict=True):
        row[: len(held)] = held
    query_start_loc = np.concatenate(([0], np.cumsum(num_new)))
    request_of_token = np.repeat(np.arange(len(pages)), num_new)
    first_position = lengths - num_new - query_start_loc[:-1]
    positions = np.arange(query_start_loc[-1]) + first_position[request_of_token]
    page_of_token = block_table[request_of_token, positions // block_size].astype(np.int64)
    arrays = (
        positions,
        query_start_loc.astype(np.int32),
        lengths.astype(np.int32),
        block_table,
        page_of_token * block_size + positions % block_size,
    )
    for values in arrays:
        values.flags.writeable = False
    return Batch(request_ids, *arrays, lives=lives)
