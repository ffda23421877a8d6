"""The pages of a cache: which are free, which requests are on the others, whose content is known."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .checks import check_count, check_integers


class PagePool:
    """Bookkeeping of `num_blocks` pages: numbers only, no rows.

    A page is held by one request, shared by several, or free. A page's content may be known by a key, which
    stands for the tokens of its rows and of all rows before them; such a page keeps its key when it becomes
    free, until it is taken.

    Parameters
    ----------
    num_blocks : int
        Pages, numbered from 0.

    Examples
    --------
    >>> pool = PagePool(2)
    >>> page = pool.take()
    >>> pool.offer(page, b"key")
    >>> pool.release([page])
    >>> page, pool.num_free, pool.find(b"key"), pool.take(), pool.take(), pool.find(b"key")
    (0, 2, 0, 1, 0, None)
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = [0] * num_blocks
        # The next page to take comes first. Pages whose content may serve again wait at the end, oldest
        # first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}

    @classmethod
    def restore(cls, num_blocks: int, held: Iterable[int], free: Sequence[int], keys: Mapping[int, bytes]) -> PagePool:
        """Return the pool whose pages are held once per mention, free in that order, and known by keys.

        Raises
        ------
        ValueError
            A page is out of range, both held and free or neither, or two share a key.
        """
        pool = cls(num_blocks)
        holders = Counter(held)
        if sorted([*holders, *free]) != list(range(num_blocks)):
            raise ValueError(f"pages: expected each of 0 to {num_blocks - 1} either held or free")
        if not keys.keys() <= set(range(num_blocks)):
            raise ValueError(f"keys: expected pages of 0 to {num_blocks - 1}, got {sorted(keys)}")
        pool._num_holders = [holders[page] for page in range(num_blocks)]
        pool._free = OrderedDict.fromkeys(free)
        for page, key in keys.items():
            pool.offer(page, key)
        if len(pool._key_of_page) != len(keys):
            raise ValueError("keys: expected each once")
        return pool

    @property
    def num_free(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        """The pages that no request holds, the next to take first."""
        return list(self._free)

    @property
    def keys(self) -> dict[int, bytes]:
        """What is known of pages' content."""
        return dict(self._key_of_page)

    def num_holders(self, page: int) -> int:
        """Return how many requests hold a page."""
        return self._num_holders[page]

    def take(self) -> int:
        """Return a free page for one holder to write to; what it held is forgotten."""
        page, _ = self._free.popitem(last=False)
        self.forget(page)
        self._num_holders[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each of the pages."""
        for page in pages:
            self._free.pop(page, None)
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder of each of the pages, which belong to one request, in its order."""
        # Backwards, so that of a prompt's pages the last, which fewest other prompts share, is taken first.
        for page in reversed(pages):
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._free[page] = None
                if page not in self._key_of_page:
                    self._free.move_to_end(page, last=False)

    def find(self, key: bytes) -> int | None:
        """Return the page with this content, or None."""
        return self._page_of_key.get(key)

    def offer(self, page: int, key: bytes) -> None:
        """Make a page's content known, unless another page has the same."""
        if key not in self._page_of_key:
            self._page_of_key[key] = page
            self._key_of_page[page] = key

    def forget(self, page: int) -> None:
        """Forget a page's content, since it is about to be written."""
        if page in self._key_of_page:
            del self._page_of_key[self._key_of_page.pop(page)]


@dataclass
class Request:
    """One request's tokens: which pages they are on, and what is known of them.

    Attributes
    ----------
    pages : array of int
        In the order of positions; C ints, since they are copied into the block table at every step.
    seq_len : int
        Tokens.
    page_keys : list of bytes
        Identity of the content of the first pages, as far as the prompt is known to fill them.
    life : object
        Replaced when tokens are dropped, so that batches from before can be told.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    seq_len: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    life: object = field(default_factory=object, compare=False, repr=False)

    def writes_to_last_page(self, num_new_tokens: int, block_size: int) -> bool:
        """Return whether new tokens go to a page that has tokens already."""
        return num_new_tokens > 0 and self.seq_len % block_size > 0

    def saved(self) -> list[Any]:
        """Return it as plain numbers, names and lists."""
        return [self.seq_len, list(self.pages), [key.hex() for key in self.page_keys]]

    @classmethod
    def restore(cls, saved: list[Any], block_size: int) -> Request:
        """Return what `saved` gave, or raise a ValueError or TypeError."""
        seq_len, pages, keys = saved
        if len(pages) != -(-check_count("seq_len", seq_len, 0) // block_size):
            raise ValueError(f"pages: expected as many as {seq_len} tokens take, got {len(pages)}")
        return cls(array("i", pages), seq_len, [bytes.fromhex(key) for key in keys])


def count_needed_pages(pool: PagePool, requests: Sequence[Request], counts: Sequence[int], block_size: int) -> int:
    """Return how many free pages it takes to add new tokens to requests, copies of shared pages included."""
    needed = 0
    holders_left: dict[int, int] = {}
    for request, count in zip(requests, counts, strict=True):
        needed += -(-(request.seq_len + count) // block_size) - len(request.pages)
        if request.writes_to_last_page(count, block_size):
            page = request.pages[-1]
            left = holders_left.get(page, pool.num_holders(page))
            if left > 1:  # a copy; whoever is left alone on the page writes in place
                needed += 1
                holders_left[page] = left - 1
    return needed


def prompt_page_keys(tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Return a key per full page of a prompt that stands for all tokens up to the page's end."""
    keys = []
    key = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = hashlib.sha256(key + tokens[start : start + block_size].tobytes()).digest()
        keys.append(key)
    return keys


def check_prompt(prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a prompt's tokens as an int64 array of one axis."""
    return check_integers("prompt_ids", prompt_ids, ("tokens",))
