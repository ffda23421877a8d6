"""Numba loops over the generated functions: one key tile, work items, merging, paging, matrix products.

Kernels see integers: addresses, strides in bytes, counts, and the table of functions (``context``). Only the
generated functions touch elements. So each kernel has one compiled signature, whatever the element type, the
layout and the flags of the caller's arrays, and whatever the instruction set.
"""
