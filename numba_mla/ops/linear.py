"""``pack_weight``, ``bmm`` and ``absorb_weights``: products with weights that are packed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..checks import (
    FLOAT_DTYPES,
    address,
    check_array,
    check_count,
    check_output,
    check_scale,
    dense_rows,
    describe,
)
from ..kernels.context import ELEMENT_CODES
from ..kernels.product import Product, count_items, product_parallel, product_serial, workspace_bytes
from ..runtime import context_for, select_isa, workspace
from ..threads import launching, num_threads

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight laid out for one instruction set, as ``pack_weight`` makes it.

    Attributes
    ----------
    panels : ndarray (H, ceil(N / NR), K, NR)
        Columns of w^T side by side, NR at a time, padded with zeros; of w's dtype.
    shape : tuple of int
        (H, N, K) of the weight.
    scale : float or None
        Factor on the product.
    isa : str
        The instruction set it is laid out for.
    """

    panels: np.ndarray
    shape: tuple[int, int, int]
    scale: float | None
    isa: str

    @property
    def dtype(self) -> np.dtype:
        """Element type of the weight."""
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.nbytes


def pack_weight(w, *, scale=None, block_size=None, isa=None):
    """Lay a weight out for ``bmm``, once.

    Parameters
    ----------
    w : ndarray (H, N, K)
        float32, float16 or bfloat16, any strides. fp8 weights are not in this version.
    scale : float, optional
        Factor on the product, finite and positive; None: 1, or what ``bmm`` is given.
    block_size : None
        For fp8 weights with a scale for each block: not in this version.
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

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> numba_mla.pack_weight(np.ones((2, 3, 4), np.float32)).shape
    (2, 3, 4)
    """
    check_array("w", w, ("H", "N", "K"))
    if block_size is not None:
        raise ValueError(f"block_size: expected None for {w.dtype} weights, got {block_size!r}")
    factor = None if scale is None else check_scale("scale", scale)
    record = select_isa(isa)
    heads, columns, k = w.shape
    width = record.weight_block[1] * record.vector_width
    num_panels = -(-columns // width)
    panels = np.zeros((heads, num_panels, k, width), w.dtype)
    for panel in range(num_panels):
        part = w[:, panel * width : (panel + 1) * width]
        panels[:, panel, :, : part.shape[1]] = part.swapaxes(1, 2)
    return PackedWeight(panels, (heads, columns, k), factor, record.name)


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
    float32 accumulation over k in order, one rounding to the result's format; the same bits for any M, any
    strides and any number of threads.

    Examples
    --------
    >>> import numpy as np, numba_mla
    >>> w = numba_mla.pack_weight(np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32))
    >>> numba_mla.bmm(np.array([[[1.0, 1.0]]], np.float32), w).tolist()
    [[[3.0, 7.0]]]
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w: expected a PackedWeight (from pack_weight), got {describe(w)}")
    heads, columns, k = w.shape
    a = dense_rows(check_array("a", a, (heads, "M", k)))
    if scale is not None and w.scale is not None:
        raise ValueError(f"scale: expected None for a weight that was packed with scale {w.scale}, got {scale!r}")
    factor = w.scale if scale is None else check_scale("scale", scale)
    shape = (heads, a.shape[1], columns)
    if out is None:
        out = np.empty(shape, a.dtype)
    target = check_output("out", out, shape, (a.dtype, FLOAT32), {"a": a})
    if target.strides[2] != target.itemsize and columns > 1:
        target = np.empty(shape, target.dtype)
    product = Product(
        address(a), a.strides[0], a.strides[1], ELEMENT_CODES[a.dtype.name], a.itemsize,
        address(w.panels), ELEMENT_CODES[w.dtype.name], w.panels.itemsize,
        address(target), target.strides[0], target.strides[1], ELEMENT_CODES[target.dtype.name], target.itemsize,
        num_heads=heads, num_rows=a.shape[1], num_columns=columns, k=k, scaled=int(factor is not None),
    )  # fmt: skip
    if target.size and k:
        _run(product, 1.0 if factor is None else factor, w.isa)
    else:
        target[...] = 0
    if target is not out:
        out[...] = target
    return out


def _run(product: Product, scale: float, isa: str) -> None:
    context = context_for(isa)
    packed = product.packed()
    num_items = count_items(context, packed)
    workers = min(num_threads(), num_items)
    memory = workspace.reserve(workspace_bytes(context, workers))
    arguments = (context, packed, scale, num_items, np.zeros(1, np.int64), memory, workers)
    if workers == 1:
        product_serial(*arguments)
        return
    with launching():
        product_parallel(*arguments)


def absorb_weights(kv_b_proj, num_heads, qk_nope_head_dim, v_head_dim):
    """Split a layer's up-projection into the parts that queries and outputs absorb.

    ``kv_b_proj`` holds, head after head, Dn rows of W_UK and Dv rows of W_UV. Then
    ``q_nope . (W_UK c) = (q_nope W_UK) . c`` and ``sum p (W_UV c) = W_UV (sum p c)``:
    ``q_latent = bmm(q_nope, w_uk)`` and ``value = bmm(out, w_uv)``.

    Parameters
    ----------
    kv_b_proj : ndarray (H * (Dn + Dv), Dc)
        float32, float16 or bfloat16. fp8 weights are not in this version.
    num_heads : int
        H.
    qk_nope_head_dim : int
        Dn.
    v_head_dim : int
        Dv.

    Returns
    -------
    w_uk : ndarray (H, Dc, Dn)
        A view of kv_b_proj.
    w_uv : ndarray (H, Dv, Dc)
        A view of kv_b_proj.

    Raises
    ------
    TypeError, ValueError
        An argument other than the above; the message names it.

    Notes
    -----
    Exact: nothing is computed. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2.

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
    check_array("kv_b_proj", kv_b_proj, (heads * (nope + value), "Dc"), FLOAT_DTYPES)
    split = kv_b_proj.reshape(heads, nope + value, kv_b_proj.shape[1])
    return split[:, :nope].swapaxes(1, 2), split[:, nope:]
