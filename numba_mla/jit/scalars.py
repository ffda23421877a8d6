"""bfloat16 and fp8 as Numba's scalar types, so that arrays of them can be indexed in compiled code; 2**x.

An element that is read takes part in arithmetic as float32; a number that is written is rounded to it. Importing this
module tells Numba of the types, once in a process.
"""

from __future__ import annotations

import operator
from functools import cache

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.imputils import lower_constant
from numba.core.typeconv import Conversion
from numba.extending import (
    NativeValue,
    box,
    intrinsic,
    lower_builtin,
    lower_cast,
    models,
    overload,
    register_model,
    unbox,
)
from numba.np import numpy_support, ufunc_db

from ..codegen.scalar import build_scalars


class SmallFloat(types.Float):
    """A scalar type of ml_dtypes, in memory its bits.

    Parameters
    ----------
    name : str
        ml_dtypes' own.
    """

    def __init__(self, name: str) -> None:
        # Not Float's: that takes the bits from names like float32.
        types.Type.__init__(self, name)
        self.bitwidth = 8 * self.scalar(0).dtype.itemsize

    @property
    def scalar(self) -> type:
        """The type in Python."""
        return getattr(ml_dtypes, self.name)

    def cast_python_value(self, value):
        return self.scalar(value)

    def can_convert_to(self, typingctx, other):
        """Arithmetic finds float32 the nearest."""
        return {types.float32: Conversion.promote, types.float64: Conversion.safe}.get(other)

    def can_convert_from(self, typingctx, other):
        return Conversion.unsafe if isinstance(other, (types.Float, types.Integer, types.Boolean)) else None

    def unify(self, typingctx, other):
        """A variable that holds this or something else holds what float32 and that would be."""
        return typingctx.unify_pairs(types.float32, types.float32 if isinstance(other, SmallFloat) else other)


bfloat16, float8_e4m3fn, float8_e5m2 = (SmallFloat(name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
SMALL_FLOATS = (bfloat16, float8_e4m3fn, float8_e5m2)
_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OPERATORS = (
    *(getattr(operator, prefix + name) for name in _NAMES for prefix in ("", "i")),
    *(getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")),
    min,
    max,
)
numpy_support.FROM_DTYPE.update({np.dtype(kind.scalar): kind for kind in SMALL_FLOATS})


@register_model(SmallFloat)
class _BitsModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.IntType(kind.bitwidth))


@cache
def _library(codegen):
    library = codegen.create_library("numba_mla.jit.scalars")
    library.add_llvm_module(llvm.parse_assembly(build_scalars()[0]))
    return library


def _call(context, builder, name, returns, value):
    """Call one of the generated functions of a single number."""
    context.active_code_library.add_linking_library(_library(context.codegen()))
    kind = ir.FunctionType(returns, [value.type])
    function = cgutils.get_or_insert_function(builder.module, kind, build_scalars()[1] + name)
    return builder.call(function, [value])


def _widen(context, builder, kind, bits):
    return _call(context, builder, f"widen_{kind.name}", ir.FloatType(), bits)


def _narrow(context, builder, kind, value, source):
    """As ml_dtypes does it: whatever the number is, it goes by way of float32."""
    single = context.cast(builder, value, source, types.float32)
    return _call(context, builder, f"narrow_{kind.name}", ir.IntType(kind.bitwidth), single)


@lower_cast(SmallFloat, types.Float)
@lower_cast(SmallFloat, types.Integer)
@lower_cast(SmallFloat, types.Complex)
def _from_small(context, builder, source, target, bits):
    return context.cast(builder, _widen(context, builder, source, bits), types.float32, target)


@lower_cast(SmallFloat, types.Boolean)
def _to_boolean(context, builder, source, target, bits):
    return context.is_true(builder, types.float32, _widen(context, builder, source, bits))


@lower_builtin(bool, SmallFloat)
def _bool(context, builder, signature, values):
    return _to_boolean(context, builder, signature.args[0], types.boolean, values[0])


@lower_cast(types.Float, SmallFloat)
@lower_cast(types.Integer, SmallFloat)
@lower_cast(types.Boolean, SmallFloat)
def _to_small(context, builder, source, target, value):
    return _narrow(context, builder, target, value, source)


@lower_cast(types.IntegerLiteral, SmallFloat)
@lower_cast(types.BooleanLiteral, SmallFloat)
def _literal_to_small(context, builder, source, target, value):
    plain = context.cast(builder, value, source, source.literal_type)
    return _narrow(context, builder, target, plain, source.literal_type)


@lower_cast(SmallFloat, SmallFloat)
def _between(context, builder, source, target, bits):
    if source == target:
        return bits
    return _narrow(context, builder, target, _widen(context, builder, source, bits), types.float32)


@overload(float)
def _float(x):
    def single(x):
        return np.float32(x)

    return single if isinstance(x, SmallFloat) else None


def _promote_one(operation):
    """An operation on one of these numbers is that on float32."""

    @overload(operation, target="cpu")
    def promoted(x):
        return (lambda x: operation(np.float32(x))) if isinstance(x, SmallFloat) else None


def _promote_two(operation):
    """An operation with one of these numbers on either side is that with float32."""

    @overload(operation, target="cpu")
    def promoted(a, b):
        small = isinstance(a, SmallFloat), isinstance(b, SmallFloat)
        return {
            (True, True): lambda a, b: operation(np.float32(a), np.float32(b)),
            (True, False): lambda a, b: operation(np.float32(a), b),
            (False, True): lambda a, b: operation(a, np.float32(b)),
        }.get(small)


# By itself Numba looks for a numpy function's loop first, by numpy's letter for the type, and fails: what names this
# target goes before that.
for _operation in (*_OPERATORS, *(ufunc for ufunc in ufunc_db.get_ufuncs() if ufunc.nin == 2)):
    _promote_two(_operation)
for _operation in (ufunc for ufunc in ufunc_db.get_ufuncs() if ufunc.nin == 1):
    _promote_one(_operation)


@lower_constant(SmallFloat)
def _constant(context, builder, kind, value):
    bits = value.view(f"u{kind.bitwidth // 8}")
    return ir.Constant(ir.IntType(kind.bitwidth), int(bits))


@unbox(SmallFloat)
def _unbox(kind, number, c):
    value = c.pyapi.float_as_double(number)
    bits = _narrow(c.context, c.builder, kind, value, types.float64)
    return NativeValue(bits, is_error=c.pyapi.c_api_error())


@box(SmallFloat)
def _box(kind, bits, c):
    value = c.pyapi.float_from_double(c.context.cast(c.builder, bits, kind, types.float64))
    scalar = c.pyapi.unserialize(c.pyapi.serialize_object(kind.scalar))
    number = c.pyapi.call_function_objargs(scalar, (value,))
    c.pyapi.decref(value)
    c.pyapi.decref(scalar)
    return number


@intrinsic
def _exp2(typingctx, x):
    def codegen(context, builder, signature, values):
        return _call(context, builder, "exp2", ir.FloatType(), values[0])

    return types.float32(types.float32), codegen


@njit(nogil=True)
def exp2(x):
    """2**x, as the softmax has it: in float32, to 1.3 units in the last place.

    Parameters
    ----------
    x : number
        Taken as float32.

    Returns
    -------
    float32
        0 below -127 (a subnormal result may be flushed before that), infinite from 127.5 on, NaN for NaN.

    Notes
    -----
    A polynomial of degree 6, without a call: LLVM makes vectors of loops over it.

    Examples
    --------
    >>> from numba_mla import jit
    >>> jit.exp2(0.0), jit.exp2(-3.0)
    (1.0, 0.125)
    """
    return _exp2(np.float32(x))
