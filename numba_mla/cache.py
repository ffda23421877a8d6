"""The paged latent cache: one array for all requests and layers, and who owns which of its pages."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .checks import FLOAT_DTYPES, check_array, check_count, names
from .config import MLAConfig


class CacheFullError(RuntimeError):
    """More pages were asked for than are free; nothing has changed."""


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
    """

    request_ids: tuple[Hashable, ...]
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray


@dataclass
class _Request:
    # An array of C ints, since it is copied into the block table at every step.
    pages: array[int] = field(default_factory=lambda: array("i"))
    seq_len: int = 0
    # Identity of the content of the request's first pages, as far as its prompt is known to fill them.
    page_keys: list[bytes] = field(default_factory=list)


class PagedLatentCache:
    """The latent KV cache of many requests and layers, in pages of `block_size` tokens.

    A token takes one row [kv_c | k_pe] of ``Dc + Dr`` values per layer, whatever the number of heads.
    Requests hold pages; full pages of equal prompts can be shared, and a shared page is copied before it is
    written.

    Parameters
    ----------
    config : MLAConfig
        Gives the row's width.
    num_blocks : int
        Pages per layer.
    block_size : int
        Tokens per page.
    num_layers : int
        Layers that share the pages' bookkeeping.
    dtype : dtype
        float32, float16 or bfloat16.
    layout : None
        Only the plain layout of `dtype` rows.
    cache_scale : None
        Only for fp8 caches.
    storage : ndarray, optional
        Memory to use, e.g. a memmap: (num_layers, num_blocks, block_size, Dc+Dr) of `dtype`, C-contiguous,
        writable. None: zeros.

    Attributes
    ----------
    data : ndarray, (num_layers, num_blocks, block_size, Dc+Dr)
        The rows; ``data[l]`` is the kv_cache of layer l.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Examples
    --------
    >>> config = MLAConfig(
    ...     hidden_size=64, num_heads=4, q_lora_rank=None, kv_lora_rank=16,
    ...     qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    >>> cache = PagedLatentCache(config, num_blocks=4, block_size=2, dtype=np.float32)
    >>> cache.add("a")
    0
    >>> batch = cache.append({"a": 3})
    >>> batch.positions.tolist(), batch.slot_mapping.tolist(), batch.block_table.tolist()
    ([0, 1, 2], [0, 1, 2], [[0, 1]])
    >>> cache.free("a")
    >>> cache.num_free_blocks, cache.nbytes
    (4, 768)
    """

    def __init__(
        self,
        config: MLAConfig,
        num_blocks: int,
        block_size: int = 64,
        *,
        num_layers: int = 1,
        dtype: Any = ml_dtypes.bfloat16,
        layout: None = None,
        cache_scale: None = None,
        storage: np.ndarray | None = None,
    ) -> None:
        dtype = np.dtype(dtype)
        check_count("num_blocks", num_blocks, 1)
        check_count("block_size", block_size, 1)
        check_count("num_layers", num_layers, 1)
        if layout is not None:
            raise ValueError(f"layout: expected None (rows of dtype), got {layout!r}")
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"dtype: expected {names(FLOAT_DTYPES)}, got {dtype}")
        if cache_scale is not None:
            raise ValueError(f"cache_scale: expected None with a {np.dtype(dtype)} cache, got {cache_scale!r}")
        shape = (num_layers, num_blocks, block_size, config.cache_row_width)
        if storage is not None:
            _check_storage(storage, shape, dtype)
        self.kv_lora_rank = config.kv_lora_rank
        self.data = np.zeros(shape, dtype) if storage is None else storage
        self._requests: dict[Hashable, _Request] = {}
        self._holders = [0] * num_blocks
        # The next page to take comes first. Pages whose content may serve again wait at the end, oldest
        # first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}

    @property
    def num_layers(self) -> int:
        """Layers in the cache."""
        return self.data.shape[0]

    @property
    def num_blocks(self) -> int:
        """Pages per layer."""
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.data.shape[2]

    @property
    def dtype(self) -> np.dtype:
        """Type of the rows."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the rows: num_layers * num_blocks * block_size * (Dc+Dr) * itemsize."""
        return self.data.nbytes

    @property
    def num_free_blocks(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    @property
    def request_ids(self) -> tuple[Hashable, ...]:
        """The requests that were added and not freed."""
        return tuple(self._requests)

    def seq_len(self, request_id: Hashable) -> int:
        """Return how many tokens a request holds."""
        return self._request(request_id).seq_len

    def add(self, request_id: Hashable, prompt_ids: Sequence[int] | np.ndarray | None = None) -> int:
        """Start a request, on the pages of an equal prompt where there are such.

        Parameters
        ----------
        request_id : hashable
            A name that no live request has.
        prompt_ids : sequence of int, optional
            Tokens of the prompt. Committed pages of earlier requests with the same first tokens are reused.

        Returns
        -------
        int
            How many tokens of the prompt are cached already, and so not to be appended: a multiple of
            `block_size`, and never the last token, whose output is still wanted.

        Raises
        ------
        ValueError, TypeError
            The name is taken, or the prompt is not a sequence of integers.
        """
        self._check_new(request_id)
        request = _Request()
        if prompt_ids is not None:
            tokens = _check_prompt(prompt_ids)
            request.page_keys = _prompt_page_keys(tokens, self.block_size)
            for key in request.page_keys[: max(len(tokens) - 1, 0) // self.block_size]:
                if key not in self._page_of_key:
                    break
                request.pages.append(self._page_of_key[key])
            self._hold(request.pages)
            request.seq_len = len(request.pages) * self.block_size
        self._requests[request_id] = request
        return request.seq_len

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Start a request that continues another one, on the same pages until either writes to them.

        Parameters
        ----------
        request_id : hashable
            A live request.
        new_id : hashable
            A name that no live request has.

        Raises
        ------
        ValueError
            The first is not live, or the second is.
        """
        source = self._request(request_id)
        self._check_new(new_id)
        self._hold(source.pages)
        # Where the two part, nothing says that the fork's next tokens are the prompt's.
        filled_keys = source.page_keys[: source.seq_len // self.block_size]
        self._requests[new_id] = _Request(source.pages[:], source.seq_len, filled_keys)

    def truncate(self, request_id: Hashable, n: int) -> None:
        """Drop a request's tokens from position n on, e.g. rejected speculative ones.

        Parameters
        ----------
        request_id : hashable
            A live request.
        n : int
            Tokens to keep, at most what it holds.

        Raises
        ------
        ValueError
            The request is not live, or n is negative or too large.
        """
        request = self._request(request_id)
        check_count("n", n, 0)
        if n > request.seq_len:
            raise ValueError(f"n: request {request_id!r} holds {request.seq_len} tokens, got {n}")
        kept = -(-n // self.block_size)
        self._release(request.pages[kept:])
        del request.pages[kept:]
        # What comes next need not be the rest of the prompt.
        if n < request.seq_len:
            del request.page_keys[n // self.block_size :]
        request.seq_len = n

    def free(self, request_id: Hashable) -> None:
        """End a request; its committed pages serve equal prompts until they are taken.

        Parameters
        ----------
        request_id : hashable
            A live request.

        Raises
        ------
        ValueError
            The request is not live.
        """
        self._release(self._request(request_id).pages)
        del self._requests[request_id]

    def append(self, num_new_tokens: Mapping[Hashable, int]) -> Batch:
        """Reserve rows for each request's new tokens and describe the step.

        Parameters
        ----------
        num_new_tokens : mapping of request id to int
            How many tokens each request of the step adds; its order is that of the batch.

        Returns
        -------
        Batch
            What a layer needs to write and read the new tokens.

        Raises
        ------
        CacheFullError
            Too few pages are free; nothing has changed.
        ValueError, TypeError
            A request is not live, or a count is not an integer >= 0; nothing has changed.
        """
        counts = [check_count(f"num_new_tokens[{r!r}]", n, 0) for r, n in num_new_tokens.items()]
        requests = [self._request(request_id) for request_id in num_new_tokens]
        needed = self._count_needed_pages(requests, counts)
        if needed > len(self._free):
            raise CacheFullError(
                f"{sum(counts)} new tokens need {needed} pages, {len(self._free)} of {self.num_blocks} are free"
            )
        for request, count in zip(requests, counts, strict=True):
            self._grow(request, count)
        return self._describe(tuple(num_new_tokens), requests, np.array(counts, dtype=np.int64))

    def commit(self, batch: Batch) -> None:
        """Offer the prompt pages that a step has filled, in every layer, to later requests.

        Parameters
        ----------
        batch : Batch
            A step whose rows have been written by all layers.

        Raises
        ------
        ValueError
            A request of the batch is no longer live.
        """
        requests = [self._request(request_id) for request_id in batch.request_ids]
        for request, written in zip(requests, batch.seq_lens.tolist(), strict=True):
            full = min(written, request.seq_len) // self.block_size
            for page, key in zip(request.pages[:full], request.page_keys[:full], strict=False):
                if key not in self._page_of_key:
                    self._page_of_key[key] = page
                    self._key_of_page[page] = key

    def _request(self, request_id: Hashable) -> _Request:
        if request_id not in self._requests:
            raise ValueError(f"request_id: {request_id!r} is not a live request")
        return self._requests[request_id]

    def _check_new(self, request_id: Hashable) -> None:
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id!r} is already a live request")

    def _count_needed_pages(self, requests: list[_Request], counts: list[int]) -> int:
        needed = 0
        holders_left: dict[int, int] = {}
        for request, count in zip(requests, counts, strict=True):
            needed += -(-(request.seq_len + count) // self.block_size) - len(request.pages)
            if self._writes_to_last_page(request, count):
                page = request.pages[-1]
                left = holders_left.get(page, self._holders[page])
                if left > 1:  # a copy; whoever is left alone on the page writes in place
                    needed += 1
                    holders_left[page] = left - 1
        return needed

    def _writes_to_last_page(self, request: _Request, count: int) -> bool:
        return count > 0 and request.seq_len % self.block_size > 0

    def _grow(self, request: _Request, count: int) -> None:
        if self._writes_to_last_page(request, count):
            request.pages[-1] = self._own_page(request.pages[-1])
        request.seq_len += count
        while len(request.pages) * self.block_size < request.seq_len:
            request.pages.append(self._take_page())

    def _own_page(self, page: int) -> int:
        """Return a page with the same rows that may be written: itself, or a copy of a shared one."""
        if self._holders[page] == 1:
            self._forget_content(page)
            return page
        copy = self._take_page()
        self.data[:, copy] = self.data[:, page]
        self._holders[page] -= 1
        return copy

    def _take_page(self) -> int:
        page, _ = self._free.popitem(last=False)
        self._forget_content(page)
        self._holders[page] = 1
        return page

    def _forget_content(self, page: int) -> None:
        if page in self._key_of_page:
            del self._page_of_key[self._key_of_page.pop(page)]

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        # Backwards, so that of a prompt's pages the last, which fewest other prompts share, is taken first.
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._key_of_page:
                    self._free.move_to_end(page, last=False)

    def _describe(self, request_ids: tuple[Hashable, ...], requests: list[_Request], counts: np.ndarray) -> Batch:
        seq_lens = np.array([request.seq_len for request in requests], dtype=np.int64)
        block_table = np.full((len(requests), max((len(r.pages) for r in requests), default=0)), -1, np.int32)
        for row, request in zip(block_table, requests, strict=True):
            row[: len(request.pages)] = request.pages
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        request_of_token = np.repeat(np.arange(len(requests)), counts)
        first_position = seq_lens - counts - query_start_loc[:-1]
        positions = np.arange(query_start_loc[-1]) + first_position[request_of_token]
        pages = block_table[request_of_token, positions // self.block_size].astype(np.int64)
        arrays = (
            positions,
            query_start_loc.astype(np.int32),
            seq_lens.astype(np.int32),
            block_table,
            pages * self.block_size + positions % self.block_size,
        )
        for values in arrays:
            values.flags.writeable = False
        return Batch(request_ids, *arrays)


def _prompt_page_keys(tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Return a key per full page of a prompt that stands for all tokens up to the page's end."""
    keys = []
    key = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = hashlib.sha256(key + tokens[start : start + block_size].tobytes()).digest()
        keys.append(key)
    return keys


def _check_prompt(prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    tokens = np.asarray(prompt_ids)
    if tokens.ndim != 1:
        raise ValueError(f"prompt_ids: expected one axis, got shape {tokens.shape}")
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"prompt_ids: expected integers, got {tokens.dtype}")
    return tokens.astype(np.int64)


def _check_storage(storage: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    check_array("storage", storage, shape, (dtype,))
    if not (storage.flags.c_contiguous and storage.flags.writeable):
        raise ValueError("storage: expected a writable C-contiguous array")
