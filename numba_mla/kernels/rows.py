"""Rows of elements: from one type to another, and from a cache's layout to float32."""

from __future__ import annotations

from ..codegen.native import (
    DS,
    DS_BLOCK,
    DS_LATENT,
    DS_ROTARY,
    DS_ROTARY_AT,
    DS_SCALES_AT,
    ROW_FORMATS,
)
from .compile import kernel
from .context import CLEAR, COPY, ELEMENT_CODES, GRANULE, K_PACK, NARROW, NATIVE_BYTES, SCALE, TO_NATIVE, WIDEN
from .memory import call, load_f32

_E4M3FN = ELEMENT_CODES["float8_e4m3fn"]
_BFLOAT16 = ELEMENT_CODES["bfloat16"]
FP8_DS_MLA = ROW_FORMATS.index(DS)


@kernel
def widen_row(context, target, source, element, width, ahead):
    """A whole row to float32; ``ahead`` is a row that will be read soon."""
    if element != FP8_DS_MLA:
        call(context[WIDEN + element], (target, source, width, ahead))
        return
    for block in range(DS_LATENT // DS_BLOCK):
        at = block * DS_BLOCK
        here = target + 4 * at
        call(context[WIDEN + _E4M3FN], (here, source + at, DS_BLOCK, ahead + at))
        call(context[SCALE], (here, DS_BLOCK, load_f32(source + DS_SCALES_AT + 4 * block)))
    call(
        context[WIDEN + _BFLOAT16],
        (target + 4 * DS_LATENT, source + DS_ROTARY_AT, DS_ROTARY, ahead + DS_ROTARY_AT),
    )


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
