"""Rows of elements: from one type to another, and from a cache's layout to float32."""

from __future__ import annotations

from ..codegen.native import DS, ROW_FORMATS
from .compile import kernel
from .context import CLEAR, COPY, GRANULE, K_PACK, NARROW, NATIVE_BYTES, TO_NATIVE, WIDEN
from .memory import call

FP8_DS_MLA = ROW_FORMATS.index(DS)


@kernel
def padded_width(context, width):
    """Elements of a row once its last dot steps are filled up with zeros."""
    together = context[K_PACK] * context[GRANULE]
    return -(-width // together) * together


@kernel
def native_row(context, target, source, element, width, ahead):
    """A whole row to the native type, filled up with zeros; ``ahead`` is a row that will be read soon."""
    call(context[TO_NATIVE + element], (target, source, width, ahead))
    size = context[NATIVE_BYTES]
    padding = padded_width(context, width) - width
    if padding > 0:
        call(context[CLEAR], (target + width * size, padding * size))


@kernel
def convert_row(context, target, target_element, source, source_element, width, source_bytes, wide):
    """Copy a row's bits, or convert it through ``wide``, room for as many float32."""
    if target_element == source_element:
        call(context[COPY], (target, source, width * source_bytes))
    else:
        call(context[WIDEN + source_element], (wide, source, width, source))
        call(context[NARROW + target_element], (target, wide, width))
