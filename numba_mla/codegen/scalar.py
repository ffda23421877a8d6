"""Conversions and 2**x of single numbers, for others' code to link in: the vectors' own text, at a width of one."""

from __future__ import annotations

import re

from .store import content_hash
from .text import Function
from .vector import CASTS, ElementFormat, constant, emit_exp2_of_bits

# What larger numbers are taken for: 2**128 is infinite, and so is whatever rounds to it times a fraction.
EXP2_CEILING = 128.0


def _build_widen(element: ElementFormat) -> Function:
    f = Function(f"widen_{element.name}", [(element.llvm, "x")], returns="float")
    f.do(f"ret float {element.emit_widen(f, 1, '%x')}")
    return f


def _build_narrow(element: ElementFormat) -> Function:
    f = Function(f"narrow_{element.name}", [("float", "x")], returns=element.llvm)
    f.do(f"ret {element.llvm} {element.emit_narrow(f, 1, '%x')}")
    return f


def _build_exp2() -> Function:
    f = Function("exp2", [("float", "x")], returns="float")
    large = f.value(f"fcmp ogt float %x, {constant(1, EXP2_CEILING)}")
    x = f.value(f"select i1 {large}, float {constant(1, EXP2_CEILING)}, float %x")
    f.do(f"ret float {emit_exp2_of_bits(f, 1, x)}")
    return f


def _as_scalars(text: str) -> str:
    """Vectors of one as plain numbers: LLVM makes vectors of loops over these, not of loops over vectors."""
    text = re.sub(r"<1 x (\w+)>", r"\1", text)
    return re.sub(r"<(?:float|i\d+) (\S+)>", r"\1", text).replace(".v1f32", ".f32")


def build_scalars() -> tuple[str, str]:
    """The module's text, and what its symbols begin with: of another text they are other symbols."""
    functions = [build(element) for element in CASTS for build in (_build_widen, _build_narrow)]
    body = _as_scalars("\n\n".join(f.text("alwaysinline nounwind") for f in [*functions, _build_exp2()]))
    prefix = f"numba_mla_{content_hash(body)}_"
    body = re.sub(r"^(define \w+ @)", rf"\g<1>{prefix}", body, flags=re.MULTILINE)
    return f"declare float @llvm.fmuladd.f32(float, float, float)\n\n{body}\n", prefix
