"""Element types as kernels know them, looked up by numpy's: its own name of a type takes a microsecond to make."""

from __future__ import annotations

import numpy as np

from ..checks import FLOAT_DTYPES
from ..kernels.context import ELEMENT_CODES
from ..quant import FLOAT8_DTYPES

NAMES: dict[np.dtype, str] = {dtype: dtype.name for dtype in (*FLOAT_DTYPES, *FLOAT8_DTYPES)}
CODES: dict[np.dtype, int] = {dtype: ELEMENT_CODES[name] for dtype, name in NAMES.items()}
