"""Workloads: their inputs, their work, and what their check finds."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest

from numba_mla import Tiling
from numba_mla.lab import Workload, workload
from numba_mla.runtime import select_isa
from numba_mla.testing.tolerance import extend_bounds, prefill_bounds

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = [
    Workload("decode", num_requests=2, num_heads=3, seq_len=70, block_size=16),
    Workload("extend", num_requests=2, num_heads=3, seq_len=70, num_new=5),
    Workload("prefill", num_requests=2, num_heads=2, seq_len=40),
]


def remade(tiny, **changes):
    """The same workload on the instruction set in force, or with other arguments."""
    return dataclasses.replace(tiny, **{"isa": None, **changes})


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.op)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_are_right_and_tilings_keep_their_bits(isa, tiny, dtype):
    made = remade(tiny, dtype=dtype)
    assert made.checked == 1
    check = made.check()
    assert 0 < check.error <= 1
    assert check.same_bits
    assert made.check(Tiling(lane_group=32, prefetch_rows=0)) == check
    changed = made.check(Tiling(key_tile=32, kv_split=32))
    assert 0 < changed.error <= 1
    assert changed.is_right(Tiling(key_tile=32, kv_split=32))


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.op)
def test_a_wrong_element_is_found(monkeypatch, tiny):
    """In the default result by its error; in another tiling's by its bits, however small the error."""
    made, operation = remade(tiny), workload.OPERATIONS[tiny.op]
    spoil = {"place": 0, "factor": 1.5}

    def off(**arguments):
        out, lse = operation(**arguments)
        flat = out.reshape(-1)
        flat[spoil["place"]] = np.float32(flat[spoil["place"]]) * spoil["factor"]
        return out, lse

    monkeypatch.setitem(workload.OPERATIONS, tiny.op, off)
    size = operation(**made.problem)[0].size
    for spoil["place"] in (0, size // 2, size - 1):
        assert remade(tiny).check().error > 1
    monkeypatch.setitem(workload.OPERATIONS, tiny.op, operation)
    assert made.check().same_bits
    monkeypatch.setitem(workload.OPERATIONS, tiny.op, off)
    spoil["factor"] = 1 + 2**-7
    check = made.check(Tiling(lane_group=32))
    assert not check.same_bits
    assert check.is_right(Tiling(key_tile=128)) == (check.error <= 1)
    assert not check.is_right(Tiling(lane_group=32))


def test_what_a_call_does_not_write_is_an_error(monkeypatch):
    monkeypatch.setitem(workload.OPERATIONS, "decode", lambda **arguments: (arguments["out"], arguments["lse"]))
    assert remade(TINY[0]).check().error == np.inf


@pytest.mark.parametrize(
    ("tiny", "scores", "tokens"),
    [
        (Workload("decode", num_requests=5, num_heads=2, seq_len=10), 60, [0, 2, 4]),
        (Workload("decode", num_requests=5, num_heads=2, seq_len=10), 1, [0]),
        (Workload("extend", num_heads=2, seq_len=50, num_new=20), 600, [0, 1, 9, 10, 18, 19]),
        (Workload("prefill", num_heads=2, seq_len=20), 240, [0, 1, 9, 10, 18, 19]),
        (Workload("prefill", num_requests=3, num_heads=2, seq_len=9), 40, [0, 4, 8, 18, 22, 26]),
    ],
    ids=lambda x: x.op if isinstance(x, Workload) else "",
)
def test_of_large_results_a_sample_is_compared(monkeypatch, tiny, scores, tokens):
    """Requests spread evenly, of each its first, middle and last tokens, against the reference of the whole."""
    monkeypatch.setattr(workload, "_CHECKED_SCORES", scores)
    made = remade(tiny)
    problem, rounding = dict(made.problem), select_isa(None, "bfloat16").p_rounding
    if tiny.op == "decode":
        problem["query_start_loc"] = np.arange(tiny.num_requests + 1)
    whole = (prefill_bounds if tiny.op == "prefill" else extend_bounds)(**problem, p_rounding=rounding)
    assert made._sampled_tokens.tolist() == tokens
    assert made.checked == len(tokens) / len(problem["q"])
    np.testing.assert_allclose(made._bounds.out, whole.out[tokens], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(made._bounds.lse_bound, whole.lse_bound[tokens], rtol=1e-12)
    assert 0 < made.check().error <= 1


def test_work_is_what_the_benchmarks_count(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    cases = importlib.import_module("attention_cases")
    pairs = [
        (cases.decode_case(2, 3, 70, "bfloat16"), ("decode", 70, "bfloat16", {"num_requests": 2})),
        (cases.extend_case(3, 5, 65, "float32"), ("extend", 70, "float32", {"num_new": 5})),
        (cases.prefill_case(3, (9, 9), "float16"), ("prefill", 9, "float16", {"num_requests": 2})),
    ]
    for case, (op, seq_len, dtype, rest) in pairs:
        made = Workload(op, num_heads=3, seq_len=seq_len, dtype=dtype, **rest)
        assert (made.flops, made.num_bytes, made.isa) == (case.flops, case.num_bytes, case.isa)
        assert all(np.array_equal(x, case.problem[name]) for name, x in made.problem.items())


def test_a_workload_is_a_value():
    made = Workload("extend", seq_len=40)
    assert made.num_new == 40
    assert made == Workload("extend", seq_len=40, num_new=40, isa=made.isa)
    assert hash(made) != hash(Workload("extend", seq_len=40, seed=1))
    assert made.problem["kv_cache"].ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"op": "bmm"}, ValueError, "op: expected one of 'decode', 'extend', 'prefill', got 'bmm'"),
        ({"num_heads": 0}, ValueError, "num_heads: expected at least 1, got 0"),
        ({"num_requests": 2.0}, TypeError, "num_requests: expected an integer, got float 2.0"),
        ({"seq_len": True}, TypeError, "seq_len: expected an integer"),
        ({"block_size": -1}, ValueError, "block_size: expected at least 1"),
        ({"seed": -1}, ValueError, "seed: expected at least 0"),
        ({"dtype": "float64"}, ValueError, "dtype: expected one of 'float32'.* got 'float64'"),
        ({"isa": "z80"}, ValueError, "isa: expected one that this machine can run"),
        ({"num_new": 2}, ValueError, "num_new: expected 1 or None in decode, got 2"),
        ({"op": "prefill", "num_new": 2}, ValueError, "num_new: expected 4096 or None in prefill, got 2"),
        ({"op": "extend", "seq_len": 9, "num_new": 10}, ValueError, "num_new: expected 1 to seq_len = 9, got 10"),
    ],
)
def test_misuse(arguments, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        Workload(**{"op": "decode", **arguments})


def test_a_tiling_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tiling: expected one that fits generic"):
        Workload("decode", isa="generic").candidate(Tiling(lane_group=33))


def test_the_first_check_is_of_the_tiling_s_own_result():
    made = Workload("decode", num_heads=3, seq_len=300, isa="generic")
    assert made.check(Tiling(key_tile=64)).same_bits is False
    assert made.check().same_bits
