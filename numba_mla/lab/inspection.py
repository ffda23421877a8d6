"""``inspect``: the text and the machine code of an operation's inner loops, on any instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..codegen import listing, module
from ..codegen.blocks import dot_name, scaled_name, value_name
from ..codegen.link import assembly
from ..errors import IsaUnavailableError
from ..isa import Isa, Tiling, fit, select
from ..isa.host import Host
from ..isa.select import MODULES, made_up_host
from ..runtime import available_isas, check_tiling, host, select_isa
from .mca import View, view

ATTENTION = ("decode", "extend", "prefill")
OPS = (*ATTENTION, "bmm")
# Instructions of a loop that are shown, the most frequent ones.
_SHOWN = 6


@dataclass(frozen=True)
class Routine:
    """One generated function.

    Parameters
    ----------
    stage : str
        What it does of the operation: "score", "softmax", "value", ...
    symbol : str
        The function's name.
    llvm, assembly : str
        Its LLVM text, and what LLVM made of it.
    loop : str
        The assembly of its inner loop, the one with the most arithmetic.
    mix : dict of str to int
        Instructions of that loop, and how often each stands there; the most frequent first.
    registers : tuple of str
        Vector and tile registers that the loop names.
    spills : tuple of str
        Instructions in any inner loop that move a vector or a tile to or from the stack.
    reloads : tuple of str
        Those that use the stack for addresses and counters.
    flops : int
        Floating point operations of one turn of the loop.
    mca : View
        What llvm-mca says of the loop.
    """

    stage: str
    symbol: str
    llvm: str
    assembly: str
    loop: str
    mix: dict[str, int]
    registers: tuple[str, ...]
    spills: tuple[str, ...]
    reloads: tuple[str, ...]
    flops: int
    mca: View

    def __str__(self) -> str:
        spilled = "no spills"
        if self.spills:
            spilled = f"{len(self.spills)} spills in its inner loops, such as `{self.spills[0]}`"
        shown = ", ".join(f"{count} {name}" for name, count in list(self.mix.items())[:_SHOWN])
        others = sum(list(self.mix.values())[_SHOWN:])
        shown += f" and {others} others" if others else ""
        return (
            f"{self.stage} ({self.symbol}): {spilled}\n"
            f"  a turn: {sum(self.mix.values())} instructions ({shown}), {self.flops} flop, "
            f"{len(self.registers)} vector registers, {len(self.reloads)} addresses kept on the stack\n"
            f"  {self._cycles()}"
        )

    def _cycles(self) -> str:
        cycles = self.mca.cycles
        if cycles is None:
            return f"no cycles: {self.mca.reason}"
        return f"{cycles:.1f} cycles a turn, {self.flops / cycles:.1f} flop a cycle (llvm-mca, {self.mca.cpu})"


@dataclass(frozen=True)
class Inspection:
    """What ``inspect`` found; ``found[stage]`` is one function, iteration gives all.

    Parameters
    ----------
    op, isa, cpu : str
        The operation, the instruction set, and the processor that LLVM compiled for.
    here : bool
        Whether this machine runs it.
    routines : tuple of Routine
        The functions in which the operation spends its time.
    """

    op: str
    isa: str
    cpu: str
    here: bool
    routines: tuple[Routine, ...]

    @property
    def spills(self) -> tuple[str, ...]:
        """The spills of all functions; a tiling is sound if there are none."""
        return tuple(line for routine in self.routines for line in routine.spills)

    def __iter__(self) -> Iterator[Routine]:
        return iter(self.routines)

    def __getitem__(self, stage: str) -> Routine:
        for routine in self.routines:
            if routine.stage == stage:
                return routine
        raise KeyError(f"expected one of {', '.join(routine.stage for routine in self)}, got {stage!r}")

    def __str__(self) -> str:
        where = "which this machine runs" if self.here else "which this machine cannot run"
        return "\n".join([f"{self.op} on {self.isa} (compiled for {self.cpu}), {where}", *map(str, self.routines)])

    def _repr_markdown_(self) -> str:
        """A table, for notebooks."""
        rows = [
            f"| {r.stage} | `{r.symbol}` | {sum(r.mix.values())} | {r.flops} | {len(r.registers)} | {len(r.spills)} |"
            for r in self
        ]
        head = "| stage | function | instructions a turn | flop a turn | vector registers | spills |"
        return "\n".join([f"**{self.op} on {self.isa}**", "", head, "| --- " * 6 + "|", *rows])


def inspect(op: str, isa: str | None = None, tiling: Tiling | None = None) -> Inspection:
    """The inner loops of an operation: LLVM text, assembly, instructions, registers, spills.

    Parameters
    ----------
    op : str
        "decode", "extend", "prefill" or "bmm".
    isa : str, optional
        Any instruction set of the package, whether this machine has it or not; None: the one in force.
    tiling : Tiling, optional
        How attention is tiled, where not as the instruction set has it; register blocks may be any, those that spill
        included.

    Returns
    -------
    Inspection
        By stage. Attention: "score" (S = K Q), "softmax", "value" (O = O alpha + P V) and, where a stage of its own
        does it, "interleave"; bmm: "weight" and, for weights in blocks with a scale each, "scaled weight".

    Raises
    ------
    ValueError
        If ``op`` is not one of these, or the instruction set is unknown or needs the assembler of another architecture.

    Notes
    -----
    Code for another machine is compiled for one made up, which runs every instruction set. Only functions that are
    emitted are looked at; Numba's loops around them call them. Vectors are counted as spilled in inner loops alone.
    llvm-mca's models of processors have every access hit the nearest cache, and old ones know nothing of tiles.

    Examples
    --------
    >>> from numba_mla import lab
    >>> found = lab.inspect("decode", "amx_bf16")
    >>> found["score"].mix["tdpbf16ps"], found["score"].flops, found.spills
    (4, 65536, ())
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if isinstance(isa, str) and isa not in MODULES:
        raise IsaUnavailableError(f"isa: expected one of {', '.join(MODULES)}, got {isa!r}")
    here = not isinstance(isa, str) or isa in available_isas()
    machine = host() if here else made_up_host()
    record = select_isa(isa) if here else select(machine, forced=isa)
    if op in ATTENTION:
        record = fit(record, check_tiling(tiling), one_head=op == "prefill", may_spill=True)
    stages = _attention_stages(record) if op in ATTENTION else _weight_stages(record)
    text = "\n".join(module.build_modules(record, machine.triple))
    _check_assembler(record, text, machine)
    code = _assembly(record, machine.triple)
    known = module.symbols(text)
    routines = [
        _read(stage, symbol, text, code, record, machine) for stage, symbol in stages.items() if symbol in known
    ]
    return Inspection(op, record.name, record.cpu, here, tuple(routines))


def _check_assembler(record: Isa, text: str, machine: Host) -> None:
    """LLVM's assembler is there for this machine's own architecture, and ends the process where it is missed."""
    ours, theirs = (triple.partition("-")[0] for triple in (host().triple, machine.triple))
    if " asm " in text and ours != theirs:
        raise IsaUnavailableError(
            f"isa: expected one whose text LLVM can assemble on {ours}, got {record.name!r}, which needs {theirs}"
        )


def _attention_stages(isa: Isa) -> dict[str, str]:
    """Functions by stage; tiles' scores are in a block of their own, which the loop over keys calls."""
    return {
        "score": "score" if isa.tiles is None else dot_name(*isa.tiling.score_block),
        "softmax": "softmax",
        "value": value_name(*isa.tiling.value_block),
        "interleave": "interleave",
    }


def _weight_stages(isa: Isa) -> dict[str, str]:
    return {"weight": dot_name(*isa.blocks.weight), "scaled weight": scaled_name(*isa.blocks.weight)}


@cache
def _assembly(isa: Isa, triple: str) -> str:
    return assembly(isa, triple)


def _read(stage: str, symbol: str, text: str, code: str, isa: Isa, machine: Host) -> Routine:
    body = listing.function_body(code, symbol)
    loop = listing.inner_loop(body)
    return Routine(
        stage=stage,
        symbol=symbol,
        llvm=module.function_text(text, symbol),
        assembly=body,
        loop=loop,
        mix=listing.instruction_mix(loop),
        registers=listing.registers(loop),
        spills=tuple(listing.spills(body)),
        reloads=tuple(listing.reloads(body)),
        flops=listing.flops(loop),
        mca=view(loop, isa, machine),
    )
