"""What Numba's language lacks for a signal handler: plain memory, system calls and the vector unit's settings.

Everything is an int64: addresses, sizes and values. Nothing here allocates, raises or sets ``errno``.
"""

# Numba types what these intrinsics are given, and checks their calls.
# mypy: ignore-errors
from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Inline assembly is parsed when machine code is made.
llvm.initialize_native_asmparser()

LANES = 16  # 32-bit elements in a full tile row

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_CLOBBERS = "~{memory},~{dirflag},~{fpsr},~{flags}"


def _load(bits, extend):
    """A typer of ``load(address)``: an integer of some bits, widened to int64."""

    def typer(typingctx, address):
        def codegen(context, builder, signature, values):
            value = builder.load(builder.inttoptr(values[0], ir.IntType(bits).as_pointer()), align=1)
            return value if bits == 64 else getattr(builder, extend)(value, _I64)

        return types.int64(types.int64), codegen

    return typer


def _store(bits):
    """A typer of ``store(address, value)``: the low bits of a value."""

    def typer(typingctx, address, value):
        def codegen(context, builder, signature, values):
            kind = ir.IntType(bits)
            value = values[1] if bits == 64 else builder.trunc(values[1], kind)
            builder.store(value, builder.inttoptr(values[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return typer


@intrinsic
def load_u8(typingctx, address):
    """The unsigned byte at an address."""
    return _load(8, "zext")(typingctx, address)


@intrinsic
def load_i8(typingctx, address):
    """The signed byte at an address."""
    return _load(8, "sext")(typingctx, address)


@intrinsic
def load_u16(typingctx, address):
    """The unsigned 16-bit word at an address."""
    return _load(16, "zext")(typingctx, address)


@intrinsic
def load_i32(typingctx, address):
    """The signed 32-bit word at an address."""
    return _load(32, "sext")(typingctx, address)


@intrinsic
def load_i64(typingctx, address):
    """The 64-bit word at an address."""
    return _load(64, "sext")(typingctx, address)


@intrinsic
def store_u8(typingctx, address, value):
    """Write the low byte of a value."""
    return _store(8)(typingctx, address, value)


@intrinsic
def store_i64(typingctx, address, value):
    """Write 64 bits."""
    return _store(64)(typingctx, address, value)


@intrinsic
def zero_bytes(typingctx, address, size_bytes):
    """Zero some bytes."""

    def codegen(context, builder, signature, values):
        cgutils.memset(builder, builder.inttoptr(values[0], _I8.as_pointer()), values[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def copy_bytes(typingctx, target, source, size_bytes):
    """Copy some bytes to where they do not overlap."""

    def codegen(context, builder, signature, values):
        target, source = (builder.inttoptr(value, _I8.as_pointer()) for value in values[:2])
        cgutils.raw_memcpy(builder, target, source, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def exchange_if(typingctx, address, expected, new):
    """Write ``new`` where ``expected`` stands, atomically; 1 if it did, else 0."""

    def codegen(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], _I64.as_pointer())
        pair = builder.cmpxchg(pointer, values[1], values[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def system_call(typingctx, number, first, second, third, fourth):
    """Linux's own answer to a system call: the C library's wrapper would write ``errno``."""

    def codegen(context, builder, signature, values):
        function = ir.FunctionType(_I64, [_I64] * 5)
        registers = "={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11}"
        return builder.asm(function, "syscall", f"{registers},{_CLOBBERS}", values, True)

    return types.int64(*[types.int64] * 5), codegen


def _touch(text):
    """A typer of an instruction that takes one address in a register."""

    def typer(typingctx, address):
        def codegen(context, builder, signature, values):
            builder.asm(ir.FunctionType(ir.VoidType(), [_I64]), text, f"r,~{{rax}},{_CLOBBERS}", values, True)
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return typer


@intrinsic
def set_mxcsr(typingctx, address):
    """Load the vector unit's settings from an address: arithmetic on what is read from memory later obeys them."""
    return _touch("ldmxcsr ($0)")(typingctx, address)


@intrinsic
def read_for_real(typingctx, address):
    """Read an address with an instruction that the compiler cannot drop, for the sake of its fault."""
    return _touch("movq ($0), %rax")(typingctx, address)


def _row(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _bfloat16_pair(builder, words):
    """The even (low) and odd (high) bfloat16 of 32-bit words, as float32 vectors."""
    sixteen = ir.Constant(_WORDS, [16] * LANES)
    high = ir.Constant(_WORDS, [0xFFFF0000] * LANES)
    return builder.bitcast(builder.shl(words, sixteen), _FLOATS), builder.bitcast(builder.and_(words, high), _FLOATS)


@intrinsic
def accumulate_pairs(typingctx, even, odd, pair, row):
    """even += pair's even value * row's even values, odd likewise: fused multiply-adds on 16 lanes.

    ``even`` and ``odd`` are addresses of 16 float32, ``pair`` of two bfloat16, ``row`` of 16 times two.
    """

    def codegen(context, builder, signature, values):
        zeros = ir.Constant(_WORDS, [0] * LANES)
        word = builder.load(builder.inttoptr(values[2], ir.IntType(32).as_pointer()), align=1)
        first = builder.insert_element(zeros, word, ir.IntType(32)(0))
        left = _bfloat16_pair(builder, builder.shuffle_vector(first, zeros, zeros))
        right = _bfloat16_pair(builder, builder.load(_row(builder, values[3], _WORDS), align=1))
        function = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{LANES}f32")
        for which in range(2):
            pointer = _row(builder, values[which], _FLOATS)
            total = builder.load(pointer, align=1)
            builder.store(builder.call(fma, [left[which], right[which], total]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def add_rows(typingctx, target, even, odd):
    """target += even + odd, on 16 float32."""

    def codegen(context, builder, signature, values):
        pointers = [_row(builder, value, _FLOATS) for value in values]
        target, even, odd = (builder.load(pointer, align=1) for pointer in pointers)
        builder.store(builder.fadd(target, builder.fadd(even, odd)), pointers[0], align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
