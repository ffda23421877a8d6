"""``write_cache``: new tokens' rows into the paged cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..checks import (
    check_array,
    check_count,
    check_flag,
    check_integers,
    check_writable,
    dense_rows,
    overlap,
)
from ..kernels.validity import BAD_METADATA, MAY_MEET
from ..kernels.writing import ADDRESSES, Writing, find_bad_slot, write_rows
from ..runtime import context_for, isa_choice, workspace
from .elements import CODES
from .forms import Calls, Forms, Prepared, extents, forms_of, objects_of, serve
from .launch import integers, metadata
from .pages import check_pages, check_row_dtype


class _Arrays(NamedTuple):
    """What a call reads, and the cache that it writes to."""

    kv_c: Any
    k_pe: Any
    out: Any
    slot_mapping: Any


class _WriteCall(NamedTuple):
    """A checked call: all that does not depend on where arrays lie and which slots are written.

    ``packed`` is the call, with offsets in the place of addresses; ``forms`` what the arrays look like; ``apart`` says
    which of them must not meet.
    """

    context: np.ndarray
    packed: np.ndarray
    forms: Forms
    apart: np.ndarray
    cache_scale: float
    checks: int
    pad_slot: int

    def complete(self, arrays: _Arrays) -> _Arrays:
        """The arrays, which are all there."""
        return arrays

    def run(self, arrays: _Arrays) -> int:
        """Run it: DONE, or OTHER_FORM and nothing was done."""
        objects, apart = objects_of(arrays), self.apart
        memory = workspace.kept
        while True:
            status = write_rows(self.context, self.packed, self.forms.numbers, apart, self.cache_scale, self.checks,
                                self.pad_slot, *objects, memory.address, memory.size)  # fmt: skip
            if status > 0:
                memory = workspace.reserve(status)
            elif status == MAY_MEET:
                _check_apart(arrays)
                # Interleaved, but apart.
                apart = apart[:0]
            else:
                if status == BAD_METADATA:
                    _explain(arrays, self.pad_slot)
                    raise AssertionError("slots that the kernel refused hold")
                return status


_calls: Calls[_WriteCall] = Calls()


def write_cache(kv_c, k_pe, kv_cache, slot_mapping, *, cache_scale=None, pad_slot_id=-1, validate=True):
    """Write new tokens' rows ``[kv_c | k_pe]`` to their slots of the paged cache.

    ``kv_cache[slot // block_size, slot % block_size] = [kv_c[i] | k_pe[i]]`` for ``slot = slot_mapping[i]``.

    Parameters
    ----------
    kv_c : ndarray (T, Dc)
        Normed latents: of the cache's dtype, or any of float32, float16, bfloat16 for a quantised cache.
    k_pe : ndarray (T, Dr) or (T, 1, Dr)
        Rotated keys, of kv_c's dtype.
    kv_cache : ndarray (num_blocks, block_size, Dc + Dr), or uint8 (num_blocks, block_size, 656)
        The paged cache, written in place: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, or rows of
        656 bytes (512 e4m3fn, 4 float32 scales, one for each 128, 64 bfloat16).
    slot_mapping : int array or list (<= T,)
        ``page * block_size + offset`` of each token; the rows past its end are padding, and not written.
    cache_scale : float, optional
        Of an fp8 cache: stored = value / cache_scale, finite and positive; None: 1.
    pad_slot_id : int
        A slot that says "do not write this row"; negative.
    validate : bool
        False skips the checks of slots' values.

    Returns
    -------
    None

    Raises
    ------
    TypeError, ValueError
        Before anything is written: an argument other than the above, a slot outside the cache, or one that
        appears twice; the message names it.

    Notes
    -----
    Bits are copied; an fp8 store is float32(value) / float32(cache_scale), rounded to nearest even, saturated
    at the largest finite number, NaN kept. The scale of 128 latents in a row of 656 bytes is their largest
    finite magnitude / 448. Source of that layout: FlashMLA.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> cache = np.zeros((2, 2, 3), np.float32)
    >>> numba_mla.write_cache(np.ones((2, 2), np.float32), np.ones((2, 1), np.float32), cache, [3, -1])
    >>> cache.sum(axis=-1).tolist()
    [[0.0, 0.0], [0.0, 3.0]]
    """
    arrays = _Arrays(kv_c, k_pe, kv_cache, integers("slot_mapping", slot_mapping, ("<= T",)))
    # Numbers that are equal and of other types are other settings: 1.0, 1 and True.
    settings = (isa_choice(None), type(cache_scale), cache_scale, type(pad_slot_id), pad_slot_id, type(validate),
                validate)  # fmt: skip
    serve(_calls, settings, arrays, lambda: _prepare(arrays, cache_scale, pad_slot_id, validate))


def _prepare(given: _Arrays, cache_scale, pad_slot_id, validate) -> Prepared[_WriteCall]:
    """Check all arguments but the slots' values."""
    kv_c = dense_rows(check_array("kv_c", given.kv_c, ("T", "Dc")))
    pages = check_pages(given.out, kv_c.shape[1], None, cache_scale)
    check_writable("kv_cache", given.out)
    check_row_dtype("kv_c", kv_c, pages)
    k_pe = dense_rows(_check_rotary(given.k_pe, len(kv_c), pages.width - kv_c.shape[1], kv_c.dtype))
    slots = metadata("slot_mapping", given.slot_mapping, ("<= T",))
    pad_slot = _check_pad_slot(pad_slot_id)
    if len(slots) > len(kv_c):
        raise ValueError(f"slot_mapping: expected at most {len(kv_c)} slots (the rows of kv_c), got {len(slots)}")
    checks = check_flag("validate", validate)
    writing = Writing(
        0, kv_c.strides[0], kv_c.shape[1], 0, k_pe.strides[0], k_pe.shape[-1], CODES[kv_c.dtype], kv_c.itemsize,
        0, pages.page_stride, pages.row_stride, pages.block_size, pages.element,
        num_slots=given.out.shape[0] * given.out.shape[1],
    )  # fmt: skip
    arrays = _Arrays(kv_c, k_pe, given.out, slots)
    apart = extents(ADDRESSES, arrays[: len(ADDRESSES)], outputs=1)
    call = _WriteCall(context_for(), writing.packed(), forms_of(arrays), apart, pages.scale, int(checks), pad_slot)
    return Prepared(call, arrays, given.out)


def _check_rotary(k_pe, num_tokens: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Rotated keys, with an axis for their one head or without."""
    has_head = isinstance(k_pe, np.ndarray) and k_pe.ndim == 3
    return check_array("k_pe", k_pe, (num_tokens, 1, width) if has_head else (num_tokens, width), (dtype,))


def _check_pad_slot(pad_slot_id) -> int:
    pad_slot = check_count("pad_slot_id", pad_slot_id, -(1 << 62))
    if pad_slot >= 0:
        raise ValueError(f"pad_slot_id: expected a negative number, which is no slot, got {pad_slot}")
    return pad_slot


def _check_apart(arrays: _Arrays) -> None:
    """Sources that share no memory with the cache."""
    for name, source in (("kv_c", arrays.kv_c), ("k_pe", arrays.k_pe)):
        if overlap(source, arrays.out):
            raise ValueError(f"{name}: expected memory apart from kv_cache's, got a view of it")


def _explain(arrays: _Arrays, pad_slot: int) -> None:
    """Say what is wrong with the slots of a call that was refused for them."""
    slots, kv_cache = check_integers("slot_mapping", arrays.slot_mapping, ("<= T",)), arrays.out
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    bad = find_bad_slot(slots, num_slots, pad_slot)
    if bad >= 0:
        raise ValueError(
            f"slot_mapping: expected 0 to {num_slots - 1} (kv_cache of shape {kv_cache.shape}) or the padding's "
            f"{pad_slot}, got {slots[bad]} at {bad}"
        )
    used = np.sort(slots[slots != pad_slot])
    twice = used[1:][used[1:] == used[:-1]]
    if len(twice):
        raise ValueError(f"slot_mapping: expected each slot once, got {twice[0]} more than once")
