"""Calls and memory by address, for use inside kernels."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_LLVM_TYPES = {types.int64: ir.IntType(64), types.float32: ir.FloatType()}


def _argument_type(numba_type):
    """int64 for every integer, float32 for every real: the only two that generated functions take."""
    return types.float32 if isinstance(numba_type, types.Float) else types.int64


def _call(returns):
    def typer(typingctx, address, arguments):
        wanted = [_argument_type(t) for t in arguments.types]
        signature = returns(types.int64, types.Tuple(wanted))

        def codegen(context, builder, signature, values):
            kinds = [_LLVM_TYPES[t] for t in wanted]
            result = ir.VoidType() if returns == types.void else ir.IntType(64)
            function = builder.inttoptr(values[0], ir.FunctionType(result, kinds).as_pointer())
            value = builder.call(function, cgutils.unpack_tuple(builder, values[1]))
            return context.get_dummy_value() if returns == types.void else value

        return signature, codegen

    return typer


@intrinsic
def call(typingctx, address, arguments):
    """Call the function at an address with a tuple of integers and floats."""
    return _call(types.void)(typingctx, address, arguments)


@intrinsic
def call_int(typingctx, address, arguments):
    """Call the function at an address that returns an integer."""
    return _call(types.int64)(typingctx, address, arguments)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _load(element):
    def typer(typingctx, address):
        def codegen(context, builder, signature, values):
            kind = context.get_data_type(element)
            return builder.load(_pointer(builder, values[0], kind))

        return element(types.int64), codegen

    return typer


def _store(element):
    def typer(typingctx, address, value):
        def codegen(context, builder, signature, values):
            kind = context.get_data_type(element)
            builder.store(values[1], _pointer(builder, values[0], kind))
            return context.get_dummy_value()

        return types.void(types.int64, element), codegen

    return typer


@intrinsic
def load_i64(typingctx, address):
    """The int64 at an address."""
    return _load(types.int64)(typingctx, address)


@intrinsic
def load_i32(typingctx, address):
    """The int32 at an address."""
    return _load(types.int32)(typingctx, address)


@intrinsic
def load_f32(typingctx, address):
    """The float32 at an address."""
    return _load(types.float32)(typingctx, address)


@intrinsic
def store_i64(typingctx, address, value):
    """Write an int64 to an address."""
    return _store(types.int64)(typingctx, address, value)


@intrinsic
def store_i32(typingctx, address, value):
    """Write an int32 to an address."""
    return _store(types.int32)(typingctx, address, value)


@intrinsic
def store_f32(typingctx, address, value):
    """Write a float32 to an address."""
    return _store(types.float32)(typingctx, address, value)


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to the int64 at an address, atomically and in one order for all threads; what it was before."""

    def codegen(context, builder, signature, values):
        pointer = _pointer(builder, values[0], ir.IntType(64))
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen
