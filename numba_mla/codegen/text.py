"""A small writer of LLVM text: functions, values in SSA form, counted loops with carried values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Loop:
    """A counted loop being written: its index, the carried values of this turn, and those of the next."""

    index: str
    carried: list[str]
    following: list[str] = field(default_factory=list)


class Function:
    """One LLVM function being written, line by line.

    Parameters
    ----------
    name : str
        Its symbol.
    parameters : sequence of (type, name)
        LLVM types (``ptr``, ``i64``, ``float``) and names, without the percent sign.
    returns : str
        The LLVM return type.
    """

    def __init__(self, name: str, parameters: Sequence[tuple[str, str]], returns: str = "void") -> None:
        self.name = name
        self.header = f"define {returns} @{name}({', '.join(f'{kind} %{word}' for kind, word in parameters)})"
        self.lines: list[str] = ["entry:"]
        self.block = "entry"
        self.count = 0

    def value(self, expression: str) -> str:
        """Write ``%n = expression`` and return ``%n``."""
        self.count += 1
        name = f"%v{self.count}"
        self.lines.append(f"  {name} = {expression}")
        return name

    def do(self, statement: str) -> None:
        """Write a statement without a value."""
        self.lines.append(f"  {statement}")

    def operation(self, text: str, **operands: str | int) -> str:
        """Write a template of lines, with its operands, and return the name of its ``{result}``."""
        self.count += 1
        name = f"%v{self.count}"
        self.lines.extend(text.format(result=name, **operands).splitlines())
        return name

    def label(self, name: str) -> None:
        """Start a basic block."""
        self.lines.append(f"{name}:")
        self.block = name

    def offset(self, pointer: str, num_bytes: str | int) -> str:
        """The pointer that many bytes further."""
        if num_bytes == 0:
            return pointer
        return self.value(f"getelementptr i8, ptr {pointer}, i64 {num_bytes}")

    def load(self, kind: str, pointer: str, align: int = 1) -> str:
        """Load a value; unaligned unless told otherwise."""
        return self.value(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int = 1) -> None:
        """Store a value; unaligned unless told otherwise."""
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def splat(self, width: int, kind: str, value: str) -> str:
        """A vector whose every lane is the given scalar."""
        vector = f"<{width} x {kind}>"
        first = self.value(f"insertelement {vector} poison, {kind} {value}, i64 0")
        return self.value(f"shufflevector {vector} {first}, {vector} poison, <{width} x i32> zeroinitializer")

    @contextmanager
    def loop(
        self, start: str | int, stop: str | int, step: int, carried: Sequence[tuple[str, str]] = ()
    ) -> Iterator[Loop]:
        """Write ``for index in range(start, stop, step)``; the carried values' last state is in ``carried``.

        The body must leave the next turn's values in ``following``. After the block, ``carried`` still names
        the loop head's values, which then hold the final ones.
        """
        self.count += 1
        tag = self.count
        before, head, body, after = self.block, f"head{tag}", f"body{tag}", f"after{tag}"
        self.do(f"br label %{head}")
        self.label(head)
        phi_line = len(self.lines)
        loop = Loop(f"%i{tag}", [f"%c{tag}_{n}" for n in range(len(carried))])
        more = self.value(f"icmp slt i64 {loop.index}, {stop}")
        self.do(f"br i1 {more}, label %{body}, label %{after}")
        self.label(body)
        yield loop
        if len(loop.following) != len(carried):
            raise AssertionError(f"loop carries {len(carried)} values, its body leaves {len(loop.following)}")
        self.do(f"%n{tag} = add nsw i64 {loop.index}, {step}")
        latch = self.block
        self.do(f"br label %{head}")
        phis = [f"  {loop.index} = phi i64 [ {start}, %{before} ], [ %n{tag}, %{latch} ]"]
        for (kind, first), name, following in zip(carried, loop.carried, loop.following, strict=True):
            phis.append(f"  {name} = phi {kind} [ {first}, %{before} ], [ {following}, %{latch} ]")
        self.lines[phi_line:phi_line] = phis
        self.label(after)

    def branch(self, condition: str, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Write ``if condition: yes() else: no()``; neither leaves a value behind."""
        self.count += 1
        tag = self.count
        self.do(f"br i1 {condition}, label %yes{tag}, label %no{tag}")
        for name, write in ((f"yes{tag}", yes), (f"no{tag}", no)):
            self.label(name)
            write()
            self.do(f"br label %both{tag}")
        self.label(f"both{tag}")

    def text(self, attributes: str) -> str:
        """The finished function; a missing final return is written."""
        if not self.lines[-1].lstrip().startswith("ret"):
            self.do("ret void")
        return "\n".join([f"{self.header} {attributes} {{", *self.lines, "}"])
