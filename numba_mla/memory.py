"""Arrays that begin on a cache line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LINE = 64


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of zeros whose first element lies on a cache line's boundary.

    numpy aligns to 16 bytes, where every vector of 64 that a kernel loads straddles two lines.

    Examples
    --------
    >>> import numpy as np
    >>> aligned_zeros((3, 5), np.float16).ctypes.data % 64
    0
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
