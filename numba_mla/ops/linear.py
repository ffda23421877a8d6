"""``pack_weight``, ``bmm`` and ``absorb_weights``: products with weights that are packed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..checks import (
    FLOAT_DTYPES,
    check_apart,
    check_array,
    check_count,
    check_output,
    check_scale,
    dense_rows,
    describe,
)
from ..isa import Isa
from ..kernels.product import ADDRESSES, Product, product_parallel, product_serial
from ..kernels.validity import DONE, MAY_MEET
from ..memory import aligned_zeros
from ..parallel import launch, num_threads
from ..quant import FLOAT8_DTYPES, BlockScaled, check_block_scales, check_block_size, is_fp8
from ..runtime import context_for, isa_choice, select_isa, workspace
from .elements import CODES, NAMES
from .forms import Calls, Forms, Prepared, extents, forms_of, objects_of, serve

WEIGHT_DTYPES = (*FLOAT_DTYPES, *FLOAT8_DTYPES)
FLOAT32 = np.dtype(np.float32)


class _Arrays(NamedTuple):
    """What a product reads and writes, in the order of ``product.ADDRESSES``; ``out`` is None until it is made."""

    a: Any
    panels: np.ndarray
    block_scales: np.ndarray | None
    out: Any


class _ProductCall(NamedTuple):
    """A checked call: all that does not depend on where arrays lie.

    ``packed`` is the product, without addresses; ``forms`` what the arrays look like; ``apart`` says which of them must
    not meet; ``shape`` and ``dtype`` are those of a result that is made. ``is_zero``: a sum of nothing.
    """

    context: np.ndarray
    packed: np.ndarray
    forms: Forms
    apart: np.ndarray
    scale: float
    shape: tuple[int, int, int]
    dtype: np.dtype
    is_zero: bool

    def complete(self, arrays: _Arrays) -> _Arrays:
        """The arrays, with an output if there is none."""
        a, panels, block_scales, out = arrays
        return arrays if out is not None else _Arrays(a, panels, block_scales, np.empty(self.shape, self.dtype))

    def run(self, arrays: _Arrays) -> int:
        """Run it on the threads in force: DONE, or OTHER_FORM and nothing was done."""
        objects, apart = objects_of(arrays), self.apart
        workers = num_threads()
        memory = workspace.kept
        while True:
            arguments = (self.context, self.packed, self.forms.numbers, apart, self.scale, *objects, memory.address,
                         memory.size, workers)  # fmt: skip
            status = product_serial(*arguments) if workers == 1 else launch(product_parallel, *arguments)
            if status > 0:
                memory = workspace.reserve(status)
            elif status == MAY_MEET:
                check_apart("out", arrays.out, {"a": arrays.a, "w": arrays.panels})
                # Interleaved, but apart.
                apart = apart[:0]
            else:
                if status == DONE and self.is_zero:
                    arrays.out[...] = 0
                return status


_calls: Calls[_ProductCall] = Calls()


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight laid out for one instruction set, as ``pack_weight`` makes it.

    Attributes
    ----------
    panels : ndarray (H, ceil(N / NR), steps, NR, k_pack)
        Columns of w^T side by side, NR at a time, the k_pack elements of a dot step together; of w's dtype. Every
        block of k is filled up with zeros to whole steps.
    shape : tuple of int
        (H, N, K) of the weight.
    scale : float or None
        Factor on the product.
    block_scales : ndarray (H, ceil(N / NR), ceil(K / bk), NR) or None
        float32 factor on each column's elements, for every bk of them.
    block_rows : int
        bk; 0 without block scales.
    isa : str
        The instruction set it is laid out for.
    """

    panels: np.ndarray
    shape: tuple[int, int, int]
    scale: float | None
    block_scales: np.ndarray | None
    block_rows: int
    isa: str

    @property
    def dtype(self) -> np.dtype:
        """Element type of the weight."""
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the panels and of the block scales."""
        return self.panels.nbytes + (0 if self.block_scales is None else self.block_scales.nbytes)


def pack_weight(w, *, scale=None, block_size=None, isa=None):
    """Lay a weight out for ``bmm``, once.

    Parameters
    ----------
    w : ndarray (H, N, K), or BlockScaled
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, any strides; or an fp8 weight with its block
        scales, as ``absorb_weights`` returns it, in place of the next two arguments.
    scale : float, or ndarray (H, ceil(N / bn), ceil(K / bk)), optional
        Factor on the product, finite and positive; None: 1, or what ``bmm`` is given. With ``block_size``, for
        fp8 weights: float32, one for each block.
    block_size : tuple of int, optional
        (bn, bk), rows and columns of a block of ``scale``.
    isa : str, optional
        The instruction set to lay it out for, one of ``available_isas()``.

    Returns
    -------
    PackedWeight
        Of w's dtype; the original is not needed any more.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Block scales are kept as they are: a product multiplies the sum of each block of k by its scale in float32.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> numba_mla.pack_weight(np.ones((2, 3, 4), np.float32)).shape
    (2, 3, 4)
    """
    if isinstance(w, BlockScaled):
        if scale is not None or block_size is not None:
            raise ValueError("scale, block_size: expected None with a BlockScaled weight, which has its own")
        w, scale, block_size = w
    check_array("w", w, ("H", "N", "K"), WEIGHT_DTYPES)
    if block_size is not None and not is_fp8(w.dtype):
        raise ValueError(f"block_size: expected None for {w.dtype} weights, got {block_size!r}")
    # fp8 elements are exact in bfloat16.
    record = select_isa(isa, "bfloat16" if is_fp8(w.dtype) else w.dtype.name)
    heads, columns, k = w.shape
    if block_size is None:
        factor = None if scale is None else check_scale("scale", scale)
        return PackedWeight(_panels(w, record), (heads, columns, k), factor, None, 0, record.name)
    bn, bk = check_block_size(block_size)
    scales = check_block_scales("scale", scale, (heads, -(-columns // bn), -(-k // bk)))
    bk = min(bk, k)
    by_column = scales.repeat(min(bn, columns), axis=1)[:, :columns]
    return PackedWeight(
        _panels(w, record, bk), (heads, columns, k), None, _scale_panels(by_column, record), bk, record.name
    )


def _filled(k: int, record: Isa) -> int:
    """Elements of k, filled up to the steps that a product takes together."""
    together = record.k_pack * record.granule
    return -(-k // together) * together


def _panels_shape(shape: tuple[int, int, int], record: Isa, block_rows: int = 0) -> tuple[int, ...]:
    heads, columns, k = shape
    width = _panel_width(record)
    whole = k // block_rows if block_rows else 0
    filled = whole * _filled(block_rows, record) + _filled(k - whole * block_rows, record)
    return heads, -(-columns // width), filled // record.k_pack, width, record.k_pack


def _panels(w: np.ndarray, record: Isa, block_rows: int = 0) -> np.ndarray:
    """Columns of w^T, some at a time, with the elements of a dot step side by side, blocks of k filled with zeros."""
    _, num_panels, _, width, pack = shape = _panels_shape(w.shape, record, block_rows)
    panels = aligned_zeros(shape, w.dtype)
    k = w.shape[2]
    # Blocks that are whole steps lie as if they were one.
    block = block_rows if block_rows != _filled(block_rows, record) else max(k, 1)
    for first in range(0, k, block):
        step = first // block * _filled(block, record) // pack
        for panel in range(num_panels):
            part = w[:, panel * width : (panel + 1) * width, first : first + block]
            for element in range(pack):
                of_step = part[:, :, element::pack].swapaxes(1, 2)
                panels[:, panel, step : step + of_step.shape[1], : part.shape[1], element] = of_step
    return panels


def _scale_panels(scales: np.ndarray, record: Isa) -> np.ndarray:
    """Scales of columns (H, N, blocks), side by side as the columns of a panel are, padded with zeros."""
    heads, num_panels, _, width, _ = _panels_shape(scales.shape, record)
    panels = aligned_zeros((heads, num_panels, scales.shape[2], width), np.float32)
    for panel in range(num_panels):
        part = scales[:, panel * width : (panel + 1) * width]
        panels[:, panel, :, : part.shape[1]] = part.swapaxes(1, 2)
    return panels


def bmm(a, w, *, scale=None, out=None):
    """Multiply by a packed weight, head by head: ``out[h] = scale * a[h] @ w[h].T``.

    Parameters
    ----------
    a : ndarray (H, M, K)
        float32, float16 or bfloat16; any strides (a strided last axis is copied).
    w : PackedWeight (H, N, K)
        From ``pack_weight``.
    scale : float, optional
        Factor on the product, only for a weight that was packed without one.
    out : ndarray (H, M, N), optional
        Where to write the result: of a's dtype, or float32; any strides.

    Returns
    -------
    ndarray (H, M, N)
        Of a's dtype, or ``out``.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    float32 accumulation over k in order, one rounding to the result's format; with block scales a sum for each
    block of k (and for each 256 elements of a longer one), times its scale as it is added. The same bits for any M,
    any strides and any number of threads.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> w = numba_mla.pack_weight(np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32))
    >>> numba_mla.bmm(np.array([[[1.0, 1.0]]], np.float32), w).tolist()
    [[[3.0, 7.0]]]
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w: expected a PackedWeight (from pack_weight), got {describe(w)}")
    arrays = _Arrays(a, w.panels, w.block_scales, out)
    # Numbers that are equal and of other types are other settings: 1.0, 1 and True.
    settings = w.shape, w.scale, w.block_rows, isa_choice(w.isa), type(scale), scale
    return serve(_calls, settings, arrays, lambda: _prepare(a, w, scale, out)).out


def _prepare(a, w: PackedWeight, scale, out) -> Prepared[_ProductCall]:
    """Check a call's arguments."""
    heads, columns, k = w.shape
    record = _check_layout(w)
    a = dense_rows(check_array("a", a, (heads, "M", k)))
    arithmetic = select_isa(w.isa, NAMES[a.dtype])
    if _panel_width(arithmetic) != w.panels.shape[3]:
        raise ValueError(
            f"a: expected {record.native} with a weight packed for {record.name}, got {describe(a)}, which "
            f"{arithmetic.name} multiplies here, by panels of {_panel_width(arithmetic)} columns instead of "
            f"{w.panels.shape[3]}; cast it, or pack the weight with isa={arithmetic.name!r}"
        )
    if scale is not None and (w.scale is not None or w.block_scales is not None):
        own = "block scales" if w.scale is None else f"scale {w.scale}"
        raise ValueError(f"scale: expected None for a weight that was packed with {own}, got {scale!r}")
    factor = w.scale if scale is None else check_scale("scale", scale)
    shape = (heads, a.shape[1], columns)
    if out is None:
        out = np.empty(shape, a.dtype)
    check_output("out", out, shape, (a.dtype, FLOAT32), {"a": a, "w": w.panels})
    target = out
    if target.strides[2] != target.itemsize and columns > 1:
        target = np.empty(shape, target.dtype)
    block_rows = w.block_rows or max(k, 1)
    product = Product(
        0, a.strides[0], a.strides[1], CODES[a.dtype], a.itemsize,
        0, CODES[w.dtype], w.panels.itemsize, w.panels.shape[4], w.panels.shape[2] * w.panels.shape[4],
        0, block_rows, _filled(block_rows, record),
        0, target.strides[0], target.strides[1], CODES[target.dtype], target.itemsize, num_heads=heads,
        num_rows=a.shape[1], num_columns=columns, k=k,
    )  # fmt: skip
    arrays = _Arrays(a, w.panels, w.block_scales, target)
    call = _ProductCall(context_for(w.isa, NAMES[a.dtype]), product.packed(), forms_of(arrays),
                        extents(ADDRESSES, arrays, outputs=1), 1.0 if factor is None else factor, shape,
                        a.dtype, k == 0)  # fmt: skip
    return Prepared(call, arrays, out)


def _panel_width(record: Isa) -> int:
    """Columns of a panel of packed weights."""
    return record.blocks.weight[1] * record.vector_width


def _check_layout(w: PackedWeight) -> Isa:
    """The record of a weight that lies as this machine's kernels read it: one packed elsewhere need not."""
    record = select_isa(w.isa)
    shape = _panels_shape(w.shape, record, w.block_rows)
    if w.panels.shape != shape or not w.panels.flags.c_contiguous:
        raise ValueError(
            f"w: expected a weight packed for this machine's {w.isa}, dense panels of shape {shape}, "
            f"got {describe(w.panels)}"
        )
    return record


def absorb_weights(kv_b_proj, num_heads, qk_nope_head_dim, v_head_dim):
    """Split a layer's up-projection into the parts that queries and outputs absorb.

    ``kv_b_proj`` holds, head after head, Dn rows of W_UK and Dv rows of W_UV. Then
    ``q_nope . (W_UK c) = (q_nope W_UK) . c`` and ``sum p (W_UV c) = W_UV (sum p c)``:
    ``q_latent = bmm(q_nope, w_uk)`` and ``value = bmm(out, w_uv)``.

    Parameters
    ----------
    kv_b_proj : ndarray (H * (Dn + Dv), Dc), or BlockScaled
        float32, float16 or bfloat16; or an fp8 weight of that shape with its block scales.
    num_heads : int
        H.
    qk_nope_head_dim : int
        Dn.
    v_head_dim : int
        Dv.

    Returns
    -------
    w_uk : ndarray (H, Dc, Dn), or BlockScaled
        A view of kv_b_proj; in fp8, with the scales of its own blocks.
    w_uv : ndarray (H, Dv, Dc), or BlockScaled
        As w_uk.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Exact: nothing is computed. A block that straddles W_UK and W_UV, or two heads, is cut into blocks that do
    not. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> w_uk, w_uv = numba_mla.absorb_weights(np.ones((2 * (3 + 4), 5), np.float32), 2, 3, 4)
    >>> w_uk.shape, w_uv.shape
    ((2, 5, 3), (2, 4, 5))
    """
    heads = check_count("num_heads", num_heads, 1)
    nope = check_count("qk_nope_head_dim", qk_nope_head_dim, 1)
    value = check_count("v_head_dim", v_head_dim, 1)
    shape = (heads * (nope + value), "Dc")
    if not isinstance(kv_b_proj, BlockScaled):
        split = check_array("kv_b_proj", kv_b_proj, shape).reshape(heads, nope + value, kv_b_proj.shape[1])
        return split[:, :nope].swapaxes(1, 2), split[:, nope:]
    weight = check_array("kv_b_proj.weight", kv_b_proj.weight, shape, FLOAT8_DTYPES)
    rows, rank = weight.shape
    bn, bk = check_block_size(kv_b_proj.block_size)
    scales = check_block_scales("kv_b_proj.scale", kv_b_proj.scale, (-(-rows // bn), -(-rank // bk)))
    # The largest blocks of rows that end where W_UK, W_UV, heads and the given blocks do.
    cut = math.gcd(bn, nope, value)
    split = weight.reshape(heads, nope + value, rank)
    by_cut = scales.repeat(min(bn, rows) // cut, axis=0)[: rows // cut].reshape(heads, (nope + value) // cut, -1)
    w_uk = BlockScaled(split[:, :nope].swapaxes(1, 2), by_cut[:, : nope // cut].swapaxes(1, 2), (bk, cut))
    w_uv = BlockScaled(split[:, nope:], by_cut[:, nope // cut :], (cut, bk))
    return w_uk, w_uv
