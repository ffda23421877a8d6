"""The stages between the two products, lane by lane down the keys: visibility, softmax, merging of states."""

from __future__ import annotations

from ..isa import Isa
from .text import Function
from .vector import constant, emit_bfloat16s, emit_exp2, multiply_add

# A key that a lane does not see scores MASKED. A lane's maximum starts at NO_MAXIMUM, which is finite, so
# that no difference is ever inf - inf: a masked key gets a probability of exactly 0 whatever the scale, and a
# lane without keys an exact rescaling by 1.
MASKED = float("-inf")
NO_MAXIMUM = -1e29
# Maxima that the softmax keeps under way.
MAXIMA = 4


def build_mask(isa: Isa) -> Function:
    """``S[key, lane] = MASKED`` where ``first + key`` is outside ``[low, high)`` of the lane.

    Arguments of the function: ``s`` with ``lds`` bytes a key; ``limits``, the keys to look at, for each vector of
    lanes; ``lanes``, a multiple of the vector; ``first``, the position of key 0; ``low`` and ``high``, int32 a lane.
    """
    f = Function("mask", [("ptr", "s"), ("i64", "lds"), ("ptr", "limits"), ("i64", "lanes"), ("i64", "first"),
                          ("ptr", "low"), ("ptr", "high")])  # fmt: skip
    width, kind, bits = isa.vector_width, f"<{isa.vector_width} x float>", f"<{isa.vector_width} x i32>"
    first = f.value("trunc i64 %first to i32")
    with f.loop(0, "%lanes", width) as lane:
        at = f.value(f"shl i64 {lane.index}, 2")
        low = f.load(bits, f.offset("%low", at))
        high = f.load(bits, f.offset("%high", at))
        column = f.offset("%s", at)
        with f.loop(_first_unseen(f, isa, first, low, high), _limit(f, isa, lane.index), 1) as key:
            place = f.value(f"add i32 {first}, {f.value(f'trunc i64 {key.index} to i32')}")
            position = f.splat(width, "i32", place)
            pointer = f.offset(column, f.value(f"mul i64 {key.index}, %lds"))
            seen = f.value(
                f"and <{width} x i1> {f.value(f'icmp sge {bits} {position}, {low}')}, "
                f"{f.value(f'icmp slt {bits} {position}, {high}')}"
            )
            score = f.load(kind, pointer)
            f.store(kind, f.value(f"select <{width} x i1> {seen}, {kind} {score}, {kind} {constant(width, MASKED)}"),
                    pointer)  # fmt: skip
    return f


def _first_unseen(f: Function, isa: Isa, first: str, low: str, high: str) -> str:
    """The key of the tile from which on some lane of a vector may not see it: 0 if that begins before it does."""
    of_vector = f"v{isa.vector_width}i32(<{isa.vector_width} x i32>"
    latest = f.value(f"call i32 @llvm.vector.reduce.smax.{of_vector} {low})")
    soonest = f.value(f"call i32 @llvm.vector.reduce.smin.{of_vector} {high})")
    seen = f.value(f"sub i32 {f.value(f'call i32 @llvm.smax.i32(i32 {soonest}, i32 {first})')}, {first}")
    has_begun = f.value(f"icmp sle i32 {latest}, {first}")
    return f.value(f"zext i32 {f.value(f'select i1 {has_begun}, i32 {seen}, i32 0')} to i64")


def _limit(f: Function, isa: Isa, lane: str) -> str:
    """The keys that the vector from a lane on takes, of the function's ``limits``."""
    return f.load("i64", f.offset("%limits", f.value(f"udiv i64 {f.value(f'shl i64 {lane}, 3')}, {isa.vector_width}")))


def build_softmax(isa: Isa) -> Function:
    """One key tile of the online softmax, down the keys, in place.

    ``m' = max(m, S)``, ``P = 2**((S - m') c)``, ``alpha = 2**((m - m') c)``, ``l = l alpha + sum P``; keys from a
    limit to ``padded`` get 0. A NaN score passes the maximum by and makes P, and so l, NaN. P is left as the
    value product takes it: float32 a key, or pairs of keys rounded to 16 bits, in the first half of the rows.

    Arguments of the function: ``s`` with ``lds`` bytes a key; ``limits``, the keys that some lane sees, for each
    vector of lanes; ``padded``; ``lanes``, a multiple of the vector; ``m``, ``l``, ``alpha``, float32 a lane;
    ``c``, scale times log2(e).
    """
    f = Function("softmax", [("ptr", "s"), ("i64", "lds"), ("ptr", "limits"), ("i64", "padded"), ("i64", "lanes"),
                             ("ptr", "m"), ("ptr", "l"), ("ptr", "alpha"), ("float", "c")])  # fmt: skip
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    c = f.splat(width, "float", "%c")
    with f.loop(0, "%lanes", width) as lane:
        at = f.value(f"shl i64 {lane.index}, 2")
        column = f.offset("%s", at)
        before = f.load(kind, f.offset("%m", at))
        keys = _limit(f, isa, lane.index)
        maximum = _emit_maximum(f, isa, column, keys, before)
        total = _emit_probabilities(f, isa, column, keys, maximum, c)
        alpha = _exp2_of_difference(f, isa, before, maximum, c)
        f.store(kind, maximum, f.offset("%m", at))
        f.store(kind, alpha, f.offset("%alpha", at))
        length = f.offset("%l", at)
        f.store(kind, multiply_add(f, width, f.load(kind, length), alpha, total), length)
    return f


def _emit_maximum(f: Function, isa: Isa, column: str, keys: str, before: str) -> str:
    """The largest of one vector of lanes' scores and of the maximum before; NaN is never the larger one.

    Several maxima run side by side, since each waits for the last: which of them meets a score changes nothing.
    """
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"

    def larger(a: str, b: str) -> str:
        return f.value(f"select <{width} x i1> {f.value(f'fcmp ogt {kind} {a}, {b}')}, {kind} {a}, {kind} {b}")

    def score(index: str) -> str:
        return f.load(kind, f.offset(column, f.value(f"mul i64 {index}, %lds")))

    whole = f.value(f"and i64 {keys}, {-MAXIMA}")
    with f.loop(0, whole, MAXIMA, [(kind, before)] * MAXIMA) as key:
        key.following = [
            larger(score(key.index if n == 0 else f.value(f"add i64 {key.index}, {n}")), maximum)
            for n, maximum in enumerate(key.carried)
        ]
    maximum = key.carried[0]
    for other in key.carried[1:]:
        maximum = larger(other, maximum)
    with f.loop(whole, keys, 1, [(kind, maximum)]) as rest:
        rest.following = [larger(score(rest.index), rest.carried[0])]
    return rest.carried[0]


def _emit_probabilities(f: Function, isa: Isa, column: str, keys: str, maximum: str, c: str) -> str:
    """Scores of one vector of lanes to probabilities, in place; their sum, of float32 before any rounding."""
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    zero = constant(width, 0.0)

    def row(index: str) -> str:
        return f.offset(column, f.value(f"mul i64 {index}, %lds"))

    def probability(index: str) -> str:
        return _exp2_of_difference(f, isa, f.load(kind, row(index)), maximum, c)

    whole = f.value(f"and i64 {keys}, {-isa.k_pack}")
    with f.loop(0, whole, isa.k_pack, [(kind, zero)]) as key:
        step, total = [], key.carried[0]
        for n in range(isa.k_pack):
            step.append(probability(key.index if n == 0 else f.value(f"add i64 {key.index}, {n}")))
            total = f.value(f"fadd {kind} {total}, {step[-1]}")
        f.store(kind, _join_step(f, isa, step), row(f.value(f"udiv i64 {key.index}, {isa.k_pack}")))
        key.following = [total]
    # The key that is left over where a step takes two.
    with f.loop(whole, keys, 1, [(kind, key.carried[0])]) as rest:
        p = probability(rest.index)
        rest.following = [f.value(f"fadd {kind} {rest.carried[0]}, {p}")]
        last = _join_step(f, isa, [p] + [zero] * (isa.k_pack - 1))
        f.store(kind, last, row(f.value(f"udiv i64 {rest.index}, {isa.k_pack}")))
    steps = f.value(f"udiv i64 {f.value(f'add i64 {keys}, {isa.k_pack - 1}')}, {isa.k_pack}")
    with f.loop(steps, f.value(f"udiv i64 %padded, {isa.k_pack}"), 1) as padding:
        f.store(kind, zero, row(padding.index))
    return rest.carried[0]


def _join_step(f: Function, isa: Isa, step: list[str]) -> str:
    """Probabilities of the keys of one step in one vector: themselves, or two rounded to the native 16 bits."""
    if isa.k_pack == 1:
        return step[0]
    width = isa.vector_width
    first, second = step
    pairs = emit_bfloat16s(f, isa, first, second, [n + width * key for n in range(width) for key in range(2)])
    return f.value(f"bitcast <{2 * width} x i16> {pairs} to <{width} x float>")


def build_weigh(isa: Isa) -> Function:
    """Merge the softmax states of two disjoint key sets: weights for their outputs, and the state of both.

    ``m = max(ma, mb)``, ``wa = 2**((ma - m) c)``, ``wb = 2**((mb - m) c)``, ``la = la wa + lb wb``, ``ma = m``.
    A side without keys (m = NO_MAXIMUM, l = 0) gets weight 0, the other weight exactly 1.
    """
    f = Function("weigh", [("i64", "lanes"), ("ptr", "ma"), ("ptr", "la"), ("ptr", "mb"), ("ptr", "lb"),
                           ("ptr", "wa"), ("ptr", "wb"), ("float", "c")])  # fmt: skip
    width, kind = isa.vector_width, f"<{isa.vector_width} x float>"
    c = f.splat(width, "float", "%c")
    with f.loop(0, "%lanes", width) as lane:
        at = f.value(f"shl i64 {lane.index}, 2")
        a, b = f.load(kind, f.offset("%ma", at)), f.load(kind, f.offset("%mb", at))
        higher = f.value(f"fcmp ogt {kind} {b}, {a}")
        maximum = f.value(f"select <{width} x i1> {higher}, {kind} {b}, {kind} {a}")
        wa = _exp2_of_difference(f, isa, a, maximum, c)
        wb = _exp2_of_difference(f, isa, b, maximum, c)
        la = f.value(f"fmul {kind} {f.load(kind, f.offset('%la', at))}, {wa}")
        total = multiply_add(f, width, f.load(kind, f.offset("%lb", at)), wb, la)
        for name, value in (("%ma", maximum), ("%la", total), ("%wa", wa), ("%wb", wb)):
            f.store(kind, value, f.offset(name, at))
    return f


def _exp2_of_difference(f: Function, isa: Isa, a: str, b: str, c: str) -> str:
    kind = f"<{isa.vector_width} x float>"
    return emit_exp2(f, isa, f.value(f"fmul {kind} {f.value(f'fsub {kind} {a}, {b}')}, {c}"))
