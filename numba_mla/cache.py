"""The paged latent cache: one array for all requests and layers, and who owns which of its pages."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .batch import Batch, build_batch
from .checks import MAX_POSITIONS, check_count, check_type, describe
from .config import MLAConfig
from .pages import PagePool, Request, check_prompt, count_needed_pages, prompt_page_keys
from .safetensors_file import CheckpointError
from .storage import Rows, load_rows, open_rows, row_format, save_rows


class CacheFullError(RuntimeError):
    """More pages were asked for than are free; nothing has changed."""


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
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    layout : {None, "fp8_ds_mla"}
        None: rows of `dtype`. "fp8_ds_mla", for Dc = 512 and Dr = 64: rows of 656 bytes, which are 512 fp8
        values, a float32 scale for each 128 of them, and 64 bfloat16 values.
    cache_scale : float, optional
        Of an fp8 `dtype`: value = stored * cache_scale; None: 1.
    storage : ndarray or path, optional
        Memory to use: an array, e.g. a memmap, of shape (num_layers, num_blocks, block_size, Dc+Dr) and of
        `dtype` ((..., 656) of uint8 for "fp8_ds_mla"), C-contiguous and writable; or a file to map, which is
        made if it is not there. None: zeros.

    Attributes
    ----------
    data : ndarray, (num_layers, num_blocks, block_size, Dc+Dr or 656)
        The rows; ``data[l]`` is the kv_cache of layer l.
    config, layout, cache_scale
        As given.

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
        layout: str | None = None,
        cache_scale: float | None = None,
        storage: Rows = None,
    ) -> None:
        check_type("config", config, MLAConfig, "an MLAConfig")
        check_count("num_blocks", num_blocks, 1)
        check_count("block_size", block_size, 1)
        check_count("num_layers", num_layers, 1)
        if num_blocks * block_size > MAX_POSITIONS:
            raise ValueError(
                f"num_blocks, block_size: expected at most {MAX_POSITIONS} rows, got {num_blocks} pages of {block_size}"
            )
        row_dtype, width = row_format(config.kv_lora_rank, config.qk_rope_head_dim, dtype, layout, cache_scale)
        self.config = config
        self.layout = layout
        self.cache_scale = cache_scale
        self.data = open_rows(storage, (num_layers, num_blocks, block_size, width), row_dtype)
        self._requests: dict[Hashable, Request] = {}
        self._pool = PagePool(num_blocks)
        self._committed: weakref.WeakSet[Batch] = weakref.WeakSet()

    def __repr__(self) -> str:
        used = self.num_blocks - self.num_free_blocks
        return (
            f"<PagedLatentCache: {self.layout or self.dtype}, num_layers {self.num_layers}, "
            f"block_size {self.block_size}, pages: {used} used, {self.num_free_blocks} free>"
        )

    @classmethod
    def load(cls, path: str | Path, *, storage: Rows = None) -> PagedLatentCache:
        """Return the cache that `save` wrote, with its requests and reusable pages.

        Parameters
        ----------
        path : path
            The file.
        storage : ndarray or path, optional
            Memory for the rows, as for the constructor.

        Returns
        -------
        PagedLatentCache

        Raises
        ------
        FileNotFoundError
            There is no such file.
        CheckpointError
            A ValueError: the file is cut short, damaged, or something else.
        """
        path = Path(path)
        rows, state = load_rows(path)
        try:
            geometry = {name: state[name] for name in ("num_blocks", "block_size", "layout", "cache_scale")}
            config, dtype, num_layers = MLAConfig(**state["config"]), rows[0].dtype, len(rows)
            cache = cls(config, dtype=dtype, num_layers=num_layers, **geometry, storage=storage)
            for kept, saved in zip(cache.data, rows, strict=True):
                if saved.dtype != kept.dtype or saved.shape[1:] != kept.shape[1:] or len(saved) > len(kept):
                    raise ValueError(f"rows: expected {kept.dtype} of at most {kept.shape}, got {saved.shape}")
                kept[: len(saved)] = saved
            cache._restore(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be loaded: {error!r}") from error
        return cache

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file: rows up to the last page in use, requests, reusable pages.

        Parameters
        ----------
        path : path
            Replaced, if it is there, once the new file is whole on the disk: a save that is killed leaves
            the old file.

        Raises
        ------
        TypeError
            A request's name is neither a string nor an integer; nothing is written.
        OSError
            The file cannot be written; the old one is left.

        Notes
        -----
        Batches are not part of it: steps that are under way end before the save, or start anew after `load`.
        """
        for request_id in self._requests:
            if not isinstance(request_id, (str, Integral)):
                raise TypeError(f"request_id: expected strings and integers to save, got {request_id!r}")
        keys = self._pool.keys
        used = {*keys, *(page for request in self._requests.values() for page in request.pages)}
        state = {
            "config": {f.name: getattr(self.config, f.name) for f in dataclasses.fields(MLAConfig) if f.init},
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "layout": self.layout,
            "cache_scale": self.cache_scale,
            "free": self._pool.free_pages,
            "keys": [[page, key.hex()] for page, key in keys.items()],
            "requests": [[request_id, request.saved()] for request_id, request in self._requests.items()],
        }
        save_rows(Path(path), self.data, max(used, default=-1) + 1, state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        for request_id, saved in state["requests"]:
            self._check_new(request_id)
            self._requests[request_id] = Request.restore(saved, self.block_size)
        held = [page for request in self._requests.values() for page in request.pages]
        page_keys = {page: bytes.fromhex(key) for page, key in state["keys"]}
        self._pool = PagePool.restore(self.num_blocks, held, state["free"], page_keys)

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
        """Bytes of the rows: num_layers * num_blocks * block_size * (Dc+Dr) * itemsize (656 for "fp8_ds_mla")."""
        return self.data.nbytes

    @property
    def num_free_blocks(self) -> int:
        """Pages that no request holds."""
        return self._pool.num_free

    @property
    def request_ids(self) -> tuple[Hashable, ...]:
        """The requests that were added and not freed."""
        return tuple(self._requests)

    def seq_len(self, request_id: Hashable) -> int:
        """Return how many tokens a request holds.

        Parameters
        ----------
        request_id : hashable
            A live request.

        Raises
        ------
        ValueError
            The request is not live.
        """
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
        request = Request()
        if prompt_ids is not None:
            tokens = check_prompt(prompt_ids)
            request.page_keys = prompt_page_keys(tokens, self.block_size)
            for key in request.page_keys[: max(len(tokens) - 1, 0) // self.block_size]:
                page = self._pool.find(key)
                if page is None:
                    break
                request.pages.append(page)
            self._pool.hold(request.pages)
            request.seq_len = len(request.pages) * self.block_size
        self._requests[request_id] = request
        return request.seq_len

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Start a request that continues another one, on the same pages until either writes to them.

        The other one's tokens have been written by all layers, and their step is committed: before that there
        is nothing yet to continue.

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
        self._pool.hold(source.pages)
        # Where the two part, nothing says that the fork's next tokens are the prompt's.
        filled_keys = source.page_keys[: source.seq_len // self.block_size]
        self._requests[new_id] = Request(source.pages[:], source.seq_len, filled_keys)

    def truncate(self, request_id: Hashable, n: int) -> None:
        """Drop a request's tokens from position n on, e.g. rejected speculative ones.

        Batches from before are stale if this drops any token: commit them first.

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
        self._pool.release(request.pages[kept:])
        del request.pages[kept:]
        # What comes next need not be the rest of the prompt.
        if n < request.seq_len:
            del request.page_keys[n // self.block_size :]
            request.life = object()
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
        self._pool.release(self._request(request_id).pages)
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
        if not isinstance(num_new_tokens, Mapping):
            raise TypeError(f"num_new_tokens: expected a mapping of request to count, got {describe(num_new_tokens)}")
        counts = [check_count(f"num_new_tokens[{r!r}]", n, 0) for r, n in num_new_tokens.items()]
        requests = [self._request(request_id) for request_id in num_new_tokens]
        needed = count_needed_pages(self._pool, requests, counts, self.block_size)
        if needed > self._pool.num_free:
            raise CacheFullError(
                f"{sum(counts)} new tokens need {needed} pages, {self._pool.num_free} of {self.num_blocks} are free"
            )
        for request, count in zip(requests, counts, strict=True):
            self._grow(request, count)
        return build_batch(
            tuple(num_new_tokens),
            counts,
            seq_lens=[request.seq_len for request in requests],
            pages=[request.pages for request in requests],
            lives=tuple(request.life for request in requests),
            block_size=self.block_size,
        )

    def commit(self, batch: Batch) -> None:
        """End a step: offer the prompt pages that it has filled, in every layer, to later requests.

        Its rows are final then: no layer takes the batch again.

        Parameters
        ----------
        batch : Batch
            A step whose rows have been written by all layers.

        Raises
        ------
        TypeError, ValueError
            Not a batch, or one that is committed, stale or another cache's; nothing has changed.
        """
        requests = self._requests_of(batch)
        for request, written in zip(requests, batch.seq_lens.tolist(), strict=True):
            full = written // self.block_size
            for page, key in zip(request.pages[:full], request.page_keys[:full], strict=False):
                self._pool.offer(page, key)
        self._committed.add(batch)

    def check_batch(self, batch: Batch) -> None:
        """Raise unless a batch is this cache's and its rows still are its requests'.

        Parameters
        ----------
        batch : Batch
            From `append`.

        Raises
        ------
        TypeError, ValueError
            Not a batch; another cache's; committed; or a request of it has been freed, truncated, added
            again, or has moved to a copy of a shared page since.
        """
        requests = self._requests_of(batch)
        used = np.flatnonzero(batch.seq_lens)
        # Only the last page of a request that has not been cut back is ever replaced.
        last = (batch.seq_lens[used] - 1) // self.block_size
        for index, number, page in zip(used.tolist(), last.tolist(), batch.block_table[used, last], strict=True):
            if requests[index].pages[number] != page:
                raise ValueError(
                    f"batch: request {batch.request_ids[index]!r} has moved to a copy of a page that it shared "
                    "since this batch was made"
                )

    def _requests_of(self, batch: Batch) -> list[Request]:
        if not isinstance(batch, Batch):
            raise TypeError(f"batch: expected a Batch, got {type(batch).__name__}")
        if len(batch.lives) != len(batch.request_ids):
            raise ValueError("batch: expected one from this cache's append")
        requests = []
        for request_id, life in zip(batch.request_ids, batch.lives, strict=True):
            request = self._requests.get(request_id)
            if request is None or request.life is not life:
                raise ValueError(
                    f"batch: request {request_id!r} has been freed, truncated or added again since this batch "
                    "was made, or the batch is another cache's"
                )
            requests.append(request)
        if batch in self._committed:
            raise ValueError("batch: has been committed, and its rows may serve others: append the next step")
        return requests

    def _is_live(self, request_id: Hashable) -> bool:
        try:
            return request_id in self._requests
        except TypeError:
            raise TypeError(f"request_id: expected a hashable name, got {describe(request_id)}") from None

    def _request(self, request_id: Hashable) -> Request:
        if not self._is_live(request_id):
            raise ValueError(f"request_id: {request_id!r} is not a live request")
        return self._requests[request_id]

    def _check_new(self, request_id: Hashable) -> None:
        if self._is_live(request_id):
            raise ValueError(f"request_id: {request_id!r} is already a live request")

    def _grow(self, request: Request, count: int) -> None:
        if request.writes_to_last_page(count, self.block_size):
            request.pages[-1] = self._own_page(request.pages[-1])
        request.seq_len += count
        while len(request.pages) * self.block_size < request.seq_len:
            request.pages.append(self._pool.take())

    def _own_page(self, page: int) -> int:
        """Return a page with the same rows that may be written: itself, or a copy of a shared one."""
        if self._pool.num_holders(page) == 1:
            self._pool.forget(page)
            return page
        copy = self._pool.take()
        self.data[:, copy] = self.data[:, page]
        self._pool.release([page])
        return copy
