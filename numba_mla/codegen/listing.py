"""Reading assembly: a function's inner loops, what they are made of, and what they spill.

Pure functions on the listings that LLVM writes: x86-64 in AT&T's syntax, and AArch64.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

# A label of a block inside a function, any other label, and a jump to a block.
_LABEL = re.compile(r"(\.?LBB\w+):")
_END = re.compile(r"(?!\.?LBB)[\w.$]+:")
_JUMP = re.compile(r"\s+(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s.*?(\.?LBB\w+)$")
# What no block goes on after.
_LEAVES = re.compile(r"\s+(?:jmp|ret|b\s|ud2|brk)")
_INSTRUCTION = re.compile(r"\s+([a-z]\w*(?:\.\w+)?)(?:\s|$)")
# What a function may keep its stack's address in, once it was copied there.
_FRAME = re.compile(r"\s(?:movq\s+%rsp, (%rbp|%rbx)|(?:mov|add)\s+(x29|x19), sp(?:,.*)?)$", flags=re.MULTILINE)
_REGISTER = re.compile(r"%(?P<x86>[xyz]mm|tmm)(?P<n>\d+)|(?<![\w.%])(?P<arm>[vqds])(?P<m>\d+)\b")
_LANES = {"x": 4, "y": 8, "z": 16}
# Floating point operations for each float32 lane of the registers; of two tiles, all of them.
_FLOPS_A_LANE = (
    (re.compile(r"vdpbf16ps"), 4),
    (re.compile(r"vfn?m(add|sub)\d*ps|fml[as]"), 2),
    (re.compile(r"v?(mul|add|sub)ps|f(mul|add|sub)"), 1),
)
_TILE_DOT = "tdpbf16ps"
_FLOPS_OF_TILES = 2 * 16 * 16 * 32


def function_body(code: str, symbol: str) -> str:
    """The lines of one function of a listing, after its label.

    Parameters
    ----------
    code : str
        A module's assembly.
    symbol : str
        The function's name.

    Raises
    ------
    ValueError
        If the listing has no such function.

    Examples
    --------
    >>> print(function_body("f:\\n\\tretq\\n.Lfunc_end0:\\ng:\\n\\tnop\\n", "f"))
        retq
    """
    lines = code.splitlines()
    starts = [i for i, line in enumerate(lines) if re.fullmatch(rf"_?{re.escape(symbol)}:.*", line)]
    if not starts:
        raise ValueError(f"symbol: expected a function of the listing, got {symbol!r}")
    body = itertools.takewhile(lambda line: not _END.match(line), lines[starts[0] + 1 :])
    return "\n".join(body).expandtabs(4)


def inner_loops(body: str) -> list[str]:
    """The loops of a function that hold no other loop: those with the most arithmetic, then the longest, first.

    Parameters
    ----------
    body : str
        A function, as ``function_body`` gives it.

    Returns
    -------
    list of str
        The blocks of each loop, in the order of the listing.

    Notes
    -----
    Natural loops: all that reaches a jump back without passing the block that it goes to. (Not every jump back is one
    of a loop: LLVM lays rare blocks out at a function's end.) Source: Aho, Lam, Sethi and Ullman, Compilers, 9.6.

    Examples
    --------
    >>> inner_loops(".LBB0_1:\\n  nop\\n.LBB0_2:\\n  jl .LBB0_2\\n  jl .LBB0_1")
    ['.LBB0_2:\\n  jl .LBB0_2']
    """
    blocks = _split_blocks(body)
    successors = _successors(blocks)
    loops: dict[int, set[int]] = {}
    for latch, header in _edges_back(successors):
        loops.setdefault(header, {header}).update(_reaching(latch, header, successors))
    inner = [members for header, members in loops.items() if not members & (loops.keys() - {header})]
    texts = ["\n".join(line for block in sorted(members) for line in blocks[block]) for members in inner]
    return sorted(texts, key=lambda text: (flops(text), len(instructions(text))), reverse=True)


def _split_blocks(body: str) -> list[list[str]]:
    """Lines from a label, or from after a jump, to the next."""
    blocks: list[list[str]] = [[]]
    for line in body.splitlines():
        if _LABEL.match(line) and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
        if _JUMP.match(line):
            blocks.append([])
    return blocks


def _successors(blocks: list[list[str]]) -> list[list[int]]:
    """Where each block may go on."""
    places = {found[1]: i for i, block in enumerate(blocks) if block and (found := _LABEL.match(block[0]))}
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        jump = _JUMP.match(last)
        following = [places[jump[1]]] if jump and jump[1] in places else []
        if i + 1 < len(blocks) and not _LEAVES.match(last):
            following.append(i + 1)
        successors.append(following)
    return successors


def _edges_back(successors: list[list[int]]) -> list[tuple[int, int]]:
    """The edges, found in depth from the entry, that lead to a block on the way there."""
    found = []
    way, seen = [(0, iter(successors[0]))], {0}
    while way:
        block, rest = way[-1]
        following = next(rest, None)
        if following is None:
            way.pop()
        elif following not in seen:
            seen.add(following)
            way.append((following, iter(successors[following])))
        elif following in [on for on, _ in way]:
            found.append((block, following))
    return found


def _reaching(latch: int, header: int, successors: list[list[int]]) -> set[int]:
    """The blocks that reach ``latch`` without passing ``header``, which are a loop with it."""
    members, ahead = {header}, [latch]
    while ahead:
        block = ahead.pop()
        if block not in members:
            members.add(block)
            ahead += [before for before, following in enumerate(successors) if block in following]
    return members


def inner_loop(body: str) -> str:
    """The inner loop with the most arithmetic, where a block of products spends its time; "" if there is none."""
    return next(iter(inner_loops(body)), "")


def instructions(text: str) -> list[str]:
    """The lines of a listing that are instructions: no labels, no directives, no comments."""
    return [line for line in text.splitlines() if _INSTRUCTION.match(line)]


def mnemonic(line: str) -> str:
    """The name of an instruction."""
    return line.split(maxsplit=1)[0]


def instruction_mix(text: str) -> dict[str, int]:
    """How often each instruction stands in a listing, the most frequent first.

    Examples
    --------
    >>> instruction_mix("  nop\\n  addq %rax, %rbx\\n  nop")
    {'nop': 2, 'addq': 1}
    """
    return dict(Counter(mnemonic(line) for line in instructions(text)).most_common())


def registers(text: str) -> tuple[str, ...]:
    """The vector and tile registers that a listing names, each by its widest name, in order.

    Examples
    --------
    >>> registers("  vmovaps %ymm1, %ymm0\\n  vmovaps %zmm1, %zmm10")
    ('ymm0', 'zmm1', 'zmm10')
    """
    widest: dict[tuple[bool, int], str] = {}
    for line in instructions(text):
        for kind, number in _named(line):
            place = kind == "tmm", number
            widest[place] = max(widest.get(place, ""), kind)
    return tuple(f"{kind}{number}" for (_, number), kind in sorted(widest.items()))


def _named(line: str) -> list[tuple[str, int]]:
    """Kinds and numbers of the vector and tile registers of one instruction."""
    found = _REGISTER.finditer(line)
    if "%" in line:
        return [(m["x86"], int(m["n"])) for m in found if m["x86"]]
    return [(m["arm"], int(m["m"])) for m in found if m["arm"]]


def frame_registers(body: str) -> tuple[str, ...]:
    """The registers that hold an address of a function's stack: the stack pointer, and copies of it.

    A frame pointer counts where the function makes it one; most functions use that register for anything.

    Examples
    --------
    >>> frame_registers("  movq %rsp, %rbp"), frame_registers("  addq $64, %rbp")
    (('%rsp', 'sp', '%rbp'), ('%rsp', 'sp'))
    """
    copies = {name for pair in _FRAME.findall(body) for name in pair if name}
    return ("%rsp", "sp", *sorted(copies))


def _stack_references(body: str) -> list[tuple[str, bool]]:
    """Instructions of the inner loops that read or write a slot of the stack, and whether a vector or a tile is there.

    A slot has a fixed place; what is reached by an index is an array. Tiles alone always have one: their stride.
    """
    frame = "|".join(re.escape(name) for name in frame_registers(body))
    slot = re.compile(rf"\((?:{frame})\)|\[(?:{frame})(?:, #-?\w+)?\]")
    tile_slot = re.compile(rf"\((?:{frame}),[^)]*\)")
    found = []
    for line in (line for loop in inner_loops(body) for line in instructions(loop)):
        named = _named(line)
        if slot.search(line) or (tile_slot.search(line) and any(kind == "tmm" for kind, _ in named)):
            found.append((line.strip(), bool(named)))
    return found


def spills(body: str) -> list[str]:
    """The instructions in a function's inner loops that move a vector or a tile to or from the stack.

    Such a loop has more values under way than there are registers. An operand that an instruction takes from a
    slot, broadcast or not, counts; addresses and counters do not, see ``reloads``.

    Parameters
    ----------
    body : str
        A function, as ``function_body`` gives it.

    Returns
    -------
    list of str

    Examples
    --------
    >>> loop = ".LBB0_1:\\n  vmulps 8(%rsp){1to16}, %zmm1, %zmm0\\n  movq 16(%rsp), %rax\\n  jne .LBB0_1"
    >>> spills(loop), reloads(loop)
    (['vmulps 8(%rsp){1to16}, %zmm1, %zmm0'], ['movq 16(%rsp), %rax'])
    """
    return [line for line, vector in _stack_references(body) if vector]


def reloads(body: str) -> list[str]:
    """The instructions in a function's inner loops that use the stack for an address or a counter: of little cost."""
    return [line for line, vector in _stack_references(body) if not vector]


def flops(text: str) -> int:
    """Floating point operations of one turn of a loop, on float32 lanes or on pairs of bfloat16.

    Examples
    --------
    >>> flops("  vdpbf16ps %zmm0, %zmm1, %zmm2\\n  vfmadd231ps %ymm0, %ymm1, %ymm2")
    80
    """
    total = 0
    for line in instructions(text):
        name = mnemonic(line)
        if name == _TILE_DOT:
            total += _FLOPS_OF_TILES
            continue
        a_lane = next((n for pattern, n in _FLOPS_A_LANE if pattern.fullmatch(name)), 0)
        if a_lane:
            total += a_lane * max((_LANES.get(kind[0], 4) for kind, _ in _named(line)), default=1)
    return total
