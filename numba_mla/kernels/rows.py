"""One row from one element type to another."""

from __future__ import annotations

from .compile import kernel
from .context import COPY, NARROW, WIDEN
from .memory import call


@kernel
def convert_row(context, target, target_element, source, source_element, width, source_bytes, wide):
    """Copy a row's bits, or convert it through ``wide``, room for as many float32."""
    if target_element == source_element:
        call(context[COPY], (target, source, width * source_bytes))
    else:
        call(context[WIDEN + source_element], (wide, source, width, source))
        call(context[NARROW + target_element], (target, wide, width))
