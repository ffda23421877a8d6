"""Context chunks: cached tokens of many requests, cut to fit a workspace of bounded size."""

from __future__ import annotations

from typing import NamedTuple

from .checks import check_count, check_integers

# Cached tokens that a layer materialises at a time. It bounds a call's memory whatever the prefixes: keys and values
# of all heads take H * (Dn + Dr + Dv) elements a token, 40 MiB for DeepSeek V2 Lite (H = 16) and 320 MiB for
# DeepSeek V3 (H = 128) in bfloat16. A multiple of the splits of 1024 keys that attention merges.
WORKSPACE_TOKENS = 4096


class ContextChunk(NamedTuple):
    """Cached tokens of consecutive requests that are gathered, materialised and attended to at once.

    Attributes
    ----------
    requests : range
        The requests, of which those in the middle may have no tokens here.
    starts, ends : tuple of int
        The positions of each of them: ``starts[i] <= p < ends[i]``.
    kv_start_loc : tuple of int
        Where each one's rows begin in the workspace, and where the last one's end.
    """

    requests: range
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    kv_start_loc: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the workspace that it takes."""
        return self.kv_start_loc[-1]


def plan_context_chunks(context_lens, workspace_tokens, block_size):
    """Pack the cached tokens of requests, in order, into chunks of at most ``workspace_tokens``.

    A request that does not fit what is left of a chunk is cut at the last multiple of ``block_size`` that does;
    the rest of it begins the next chunk. So only a chunk's first request continues an earlier one.

    Parameters
    ----------
    context_lens : int array or list (B,)
        Cached tokens of each request; one without any takes no room.
    workspace_tokens : int
        The most tokens of a chunk, at least ``block_size``.
    block_size : int
        Tokens that are not parted. With ``workspace_tokens`` itself, requests are cut at its multiples alone,
        whatever is packed beside them.

    Returns
    -------
    list of ContextChunk
        ``requests``, their ``starts`` and ``ends`` as ``gather_cache`` takes them (as ``starts`` and
        ``seq_lens``), ``kv_start_loc`` as ``prefill`` does, and ``num_tokens``.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Every position of every request is in exactly one chunk.

    Examples
    --------
    >>> import numba_mla
    >>> for chunk in numba_mla.plan_context_chunks([9, 0, 4], workspace_tokens=6, block_size=2):
    ...     print(chunk.requests, chunk.starts, chunk.ends, chunk.kv_start_loc)
    range(0, 1) (0,) (6,) (0, 6)
    range(0, 3) (6, 0, 0) (9, 0, 2) (0, 3, 3, 5)
    range(2, 3) (2,) (4,) (0, 2)
    """
    lengths = check_integers("context_lens", context_lens, ("B",))
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"context_lens: expected at least 0, got {lengths.min()}")
    block = check_count("block_size", block_size, 1)
    room = check_count("workspace_tokens", workspace_tokens, 1)
    if room < block:
        raise ValueError(f"workspace_tokens: expected at least block_size = {block}, got {room}")
    chunks: list[ContextChunk] = []
    pieces: list[tuple[int, int, int]] = []
    left = room
    for request, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            end = length if length - start <= left else (start + left) // block * block
            if end > start:
                pieces.append((request, start, end))
                left -= end - start
                start = end
            if start < length:
                chunks.append(_chunk(pieces))
                pieces, left = [], room
    return [*chunks, _chunk(pieces)] if pieces else chunks


def _chunk(pieces: list[tuple[int, int, int]]) -> ContextChunk:
    """The chunk of some requests' (request, start, end); requests between them have no tokens."""
    requests = range(pieces[0][0], pieces[-1][0] + 1)
    bounds = {request: (start, end) for request, start, end in pieces}
    starts, ends = zip(*(bounds.get(request, (0, 0)) for request in requests), strict=True)
    kv_start_loc = [0]
    for start, end in zip(starts, ends, strict=True):
        kv_start_loc.append(kv_start_loc[-1] + end - start)
    return ContextChunk(requests, starts, ends, tuple(kv_start_loc))
