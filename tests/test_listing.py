"""Reading assembly: loops, registers and spills of listings written by hand, and of what LLVM writes."""

import pytest
from test_codegen import ARM, AVX2, SAPPHIRE

from numba_mla.codegen import blocks, link, listing
from numba_mla.isa import Tiling, fit, select

NESTED = """\
    movq %rdx, %rcx
    cmpq $0, %rax
    jne .LBB0_6
.LBB0_1:
    xorl %eax, %eax
    .p2align 4
.LBB0_2:
    #APP
    vdpbf16ps (%rdi){1to16}, %zmm3, %zmm0
    #NO_APP
    addq $4, %rax
    jl .LBB0_2
.LBB0_3:
    incq %rcx
    jl .LBB0_1
    retq
.LBB0_6:
    movq %rsi, %rdx
    jmp .LBB0_1
"""


def test_a_function_ends_where_the_next_begins():
    code = "first:\n.LBB0_1:\n\tnop\n.Lfunc_end0:\nsecond:\n\tretq\nthird:\n\tud2\n"
    assert listing.function_body(code, "first") == ".LBB0_1:\n    nop"
    assert listing.function_body(code, "second") == "    retq"
    assert listing.function_body("_macos:\n\tret\n", "macos") == "    ret"
    with pytest.raises(ValueError, match="symbol: expected a function of the listing, got 'sec'"):
        listing.function_body(code, "sec")


def test_inner_loops_hold_no_other_and_rare_blocks_are_none():
    """The block at the end jumps back too, into the outer loop, but nothing leads from there to it."""
    (loop,) = listing.inner_loops(NESTED)
    assert loop.startswith(".LBB0_2:")
    assert listing.instruction_mix(loop) == {"vdpbf16ps": 1, "addq": 1, "jl": 1}
    assert listing.registers(loop) == ("zmm0", "zmm3")
    assert listing.flops(loop) == 2 * 2 * 16


def test_a_loop_of_several_blocks_is_one():
    """One laid out apart, as rare ones are, is part of it; what comes in between is not."""
    body = """\
.LBB0_1:
    testq %rax, %rax
    je .LBB0_4
.LBB0_2:
    addq $1, %rax
    jne .LBB0_1
    retq
.LBB0_4:
    vmovups %ymm7, 32(%rsp)
    jmp .LBB0_2
"""
    (loop,) = listing.inner_loops(body)
    assert "retq" not in loop
    assert listing.spills(body) == ["vmovups %ymm7, 32(%rsp)"]


def test_straight_code_has_no_loop():
    assert listing.inner_loops("    nop\n    retq") == []
    assert listing.inner_loop("    vmovups (%rsp), %zmm0\n    retq") == ""
    assert listing.spills("    vmovups (%rsp), %zmm0\n    retq") == []


def body_of(*lines, before=""):
    """A function of one loop."""
    return "\n".join([before, ".LBB0_1:", *(f"    {line}" for line in lines), "    jne .LBB0_1", "    retq"])


SPILLS = [
    "vmovaps 64(%rsp), %xmm3",
    "vmovups %ymm15, -128(%rsp)",
    "vmovups %zmm31, (%rsp)",
    "vfmadd231ps 12(%rsp){1to16}, %zmm1, %zmm2",
    "vbroadcastss 4(%rsp), %ymm8",
    "movaps %xmm0, 16(%rsp)",
    "tilestored %tmm3, 1024(%rsp,%rax)",
    "tileloadd -1024(%rsp,%r12), %tmm0",
]
NO_SPILLS = [
    "vmovups 64(%rdi), %zmm1",
    "vmovups (%rax,%rbp), %zmm1",
    "vmovups 64(%rbp), %zmm1",  # which here holds any address
    "vmovups 64(%rsp,%rax), %zmm1",  # an array
    "tileloadd (%rdx,%rcx), %tmm1",
    "movq 8(%rax), %rsp",
]
SCALARS = ["movq -48(%rsp), %r15", "addq 8(%rsp), %rax", "cmpq $0, 56(%rsp)"]


@pytest.mark.parametrize("line", SPILLS)
def test_a_vector_or_tile_on_the_stack_is_a_spill(line):
    assert listing.spills(body_of("nop", line)) == [line]
    assert listing.reloads(body_of(line)) == []


@pytest.mark.parametrize("line", NO_SPILLS)
def test_operands_and_arrays_are_none(line):
    assert listing.spills(body_of(line)) == listing.reloads(body_of(line)) == []


@pytest.mark.parametrize("line", SCALARS)
def test_addresses_and_counters_are_told_apart(line):
    assert listing.spills(body_of(line)) == []
    assert listing.reloads(body_of(line)) == [line]


def test_a_frame_pointer_counts_where_the_function_makes_it_one():
    spill = "vmovaps -192(%rbp), %zmm4"
    aligned = "    pushq %rbp\n    movq %rsp, %rbp\n    andq $-64, %rsp"
    assert listing.spills(body_of(spill, before=aligned)) == [spill]
    assert listing.spills(body_of(spill, before="    pushq %rbp\n    movq %rdi, %rbp")) == []
    arm = "ldr q1, [x29, #-32]"
    assert listing.spills(body_of(arm, before="    mov x29, sp").replace("jne", "b.ne")) == [arm]
    assert listing.spills(body_of(arm).replace("jne", "b.ne")) == []


def test_aarch64():
    body = """\
    stp d9, d8, [sp, #-16]!
.LBB0_1:
    ldp q24, q25, [x15]
    ld1r { v29.4s }, [x14], x12
    fmla v17.4s, v25.4s, v30.s[0]
    str q17, [sp, #32]
    ldr x9, [sp]
    cmp x9, x3
    b.lt .LBB0_1
    ret
"""
    assert listing.spills(body) == ["str q17, [sp, #32]"]
    assert listing.reloads(body) == ["ldr x9, [sp]"]
    loop = listing.inner_loop(body)
    assert listing.registers(loop) == ("v17", "q24", "v25", "v29", "v30")
    assert listing.flops(loop) == 2 * 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tdpbf16ps %tmm6, %tmm4, %tmm0", 2 * 16 * 16 * 32),
        ("vfmadd213ps (%rax){1to8}, %ymm1, %ymm2", 16),
        ("mulps %xmm1, %xmm2", 4),
        ("vaddps %zmm1, %zmm2, %zmm3", 16),
        ("vmovups (%rax), %zmm1", 0),
    ],
)
def test_flops(line, expected):
    assert listing.flops(f"    {line}\n    {line}") == 2 * expected


@pytest.mark.parametrize(
    ("machine", "name", "score", "value"),
    [
        (SAPPHIRE, "avx512bf16", (12, 3), (16, 2)),
        (SAPPHIRE, "avx512f", (12, 3), (16, 2)),
        (AVX2, "avx2", (8, 3), (8, 2)),
        (ARM, "generic", (8, 6), (8, 5)),
    ],
    ids=lambda x: x.cpu if hasattr(x, "cpu") else str(x).replace(", ", "x"),
)
def test_blocks_that_are_too_large_spill(machine, name, score, value):
    """More sums than registers: LLVM must spill, whatever it is told; the blocks as they are do not."""
    record = select(machine, forced=name)
    too_large = fit(record, Tiling(score_block=score, value_block=value), may_spill=True)
    for shaped, spilling in ((record, False), (too_large, True)):
        code = link.assembly(shaped, machine.triple)
        for symbol in ("score", blocks.value_name(*shaped.tiling.value_block)):
            assert bool(listing.spills(listing.function_body(code, symbol))) is spilling, symbol
