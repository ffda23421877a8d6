"""Functions that stand before others and add up the cycles that these take."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .text import Function

# How to read what counts at a constant rate, for any process: LLVM's own counter of AArch64 is the system's alone.
_READ_CYCLES = "call i64 @llvm.readcyclecounter()"
_READ_AARCH64 = "call i64 @llvm.read_volatile_register.i64(metadata !0)"
_DECLARATIONS = """\
declare i64 @llvm.readcyclecounter()
declare i64 @llvm.read_volatile_register.i64(metadata)
!0 = !{!"cntvct_el0"}"""
NOW = "now"


def build_timers(text: str, addresses: Mapping[str, int], counters: Mapping[str, int], triple: str) -> str:
    """The text of a module with a function of the same name before each of those in ``counters``, and NOW.

    Parameters
    ----------
    text : str
        The module that defines the functions.
    addresses : mapping of str to int
        Where each of them is.
    counters : mapping of str to int
        Addresses of int64, to which the cycles of each are added; by one thread at a time.
    triple : str
        LLVM's target triple.
    """
    clock = _READ_AARCH64 if triple.startswith(("aarch64", "arm64")) else _READ_CYCLES
    functions = [
        _build_timer(header, addresses[header[2]], counters[header[2]], clock)
        for header in re.finditer(r"^define (void|i64) @(\w+)\((.*?)\)", text, flags=re.MULTILINE)
        if header[2] in counters
    ]
    now = Function(NOW, [], returns="i64")
    now.do(f"ret i64 {now.value(clock)}")
    body = "\n\n".join(function.text("nounwind") for function in (*functions, now))
    return f'target triple = "{triple}"\n\n{_DECLARATIONS}\n\n{body}\n'


def _build_timer(header: re.Match, address: int, counter: int, clock: str) -> Function:
    """A function of the same header: the clock, the call, the clock again."""
    returns, name, arguments = header[1], header[2], header[3]
    parameters = [word.partition(" %") for word in arguments.split(", ") if word]
    f = Function(name, [(kind, word) for kind, _, word in parameters], returns)
    start = f.value(clock)
    target = f"call {returns} inttoptr (i64 {address} to ptr)({arguments})"
    result = "" if returns == "void" else f.value(target)
    if not result:
        f.do(target)
    spent = f.value(f"sub i64 {f.value(clock)}, {start}")
    total = f"inttoptr (i64 {counter} to ptr)"
    f.store("i64", f.value(f"add i64 {f.load('i64', total, align=8)}, {spent}"), total, align=8)
    f.do(f"ret {returns} {result}")
    return f
