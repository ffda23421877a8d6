"""Where a call's time goes: stages that run take some, others none, and the results stay what they are."""

import ctypes
import re

import llvmlite.binding as llvm
import numpy as np
import pytest
from test_codegen import ARM, AVX2

import numba_mla
from numba_mla import lab, runtime
from numba_mla.codegen import link, module, timers
from numba_mla.isa import select
from numba_mla.kernels.context import CONTEXT_SIZE
from numba_mla.lab.breakdown import _STAGE_OF, PV, QK, REST, STAGES
from numba_mla.lab.timers import Timers
from numba_mla.testing.inputs import latent_problem

TILE_STAGES = {"P transposing", "V interleave"}


@pytest.fixture
def table_of_timers(isa):
    record = runtime.select_isa(None, "bfloat16")
    return Timers(record, runtime.host().triple)


def stages_that_ran(found):
    return {row.stage for row in found.rows if row.seconds > 0}


def expected_stages(isa, *others):
    """What runs in any call, and by the products of the instruction set."""
    tiles = TILE_STAGES if isa == "amx_bf16" else set()
    return {"queries", "rows", QK, "softmax", PV, "writing", REST} | tiles | set(others)


def test_a_call_of_one_split(isa):
    """Every key is seen and there is nothing to merge."""
    found = lab.breakdown("decode", num_heads=4, seq_len=40, block_size=16, repeats=2)
    assert (found.op, found.isa) == ("decode", runtime.select_isa(None, "bfloat16").name)
    assert stages_that_ran(found) == expected_stages(isa)
    assert sum(row.share for row in found.rows) == pytest.approx(1, abs=1e-12)
    assert all(row.share >= 0 for row in found.rows)
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-12)


def test_two_splits_are_merged(vector_isa):
    found = lab.breakdown("decode", num_heads=4, seq_len=1025, repeats=1)
    assert stages_that_ran(found) == expected_stages(vector_isa, "merge")


def test_causal_queries_are_masked(vector_isa):
    """Each token of a chunk sees other keys."""
    found = lab.breakdown("extend", num_heads=2, seq_len=40, num_new=9, repeats=1)
    assert stages_that_ran(found) == expected_stages(vector_isa, "mask")
    assert lab.breakdown("prefill", num_heads=2, seq_len=40, repeats=1)["mask"].seconds > 0


def test_speeds_are_work_over_time(vector_isa):
    """5 heads, 3 requests of 7 queries that see 14 to 20 keys: 2 operations a column."""
    found = lab.breakdown("extend", num_requests=3, num_heads=5, seq_len=20, num_new=7, dtype="float32", repeats=1)
    seen = 5 * 3 * sum(range(14, 21))
    assert found[QK].gflops * found[QK].seconds * 1e9 == pytest.approx(2 * seen * 576)
    assert found[PV].gflops * found[PV].seconds * 1e9 == pytest.approx(2 * seen * 512)
    assert {row.stage for row in found.rows if row.gflops is not None} == {QK, PV}
    prefill = lab.breakdown("prefill", num_heads=2, seq_len=9, repeats=1)
    assert prefill[QK].gflops * prefill[QK].seconds * 1e9 == pytest.approx(2 * 2 * 45 * 192)
    assert prefill[PV].gflops * prefill[PV].seconds * 1e9 == pytest.approx(2 * 2 * 45 * 128)


def test_the_products_dominate_where_there_are_many_heads():
    """On whole key tiles all else is a few percent; a half leaves room for a machine that is busy."""
    found = lab.breakdown("decode", num_heads=128, seq_len=1024, repeats=3)
    assert found[QK].share + found[PV].share > 0.5


def test_only_calls_in_the_block_are_timed_and_all_have_the_same_bits(rng, table_of_timers):
    """One form of call, before, inside and after: a call that is known keeps the table that it was checked with."""
    problem = latent_problem(rng, 3, [1030, 7], [5, 2], 16, 64, 16, dtype="bfloat16")
    with numba_mla.threads(1):
        before = numba_mla.extend(**problem)
        assert not any(table_of_timers.cycles().values())
        with table_of_timers.in_use():
            inside = [numba_mla.extend(**problem) for _ in range(2)]
        spent = table_of_timers.cycles()
        after = numba_mla.extend(**problem)
    assert spent["score"] > 0
    assert table_of_timers.cycles() == spent
    for result in (*inside, after):
        for x, y in zip(result, before, strict=True):
            assert x.tobytes() == y.tobytes()
    table_of_timers.reset()
    assert not any(table_of_timers.cycles().values())


def test_every_function_of_the_table_but_for_tiles_shapes_is_timed(table_of_timers, isa):
    """Sizes and the functions that are not timed stay what they are."""
    record = runtime.select_isa(None, "bfloat16")
    plain = runtime.context_for(None, "bfloat16")
    with table_of_timers.in_use():
        timed = runtime.context_for("generic")
    assert len(timed) == CONTEXT_SIZE
    names = {place: name for name, place in link.link(record, runtime.host().triple).items()}
    changed = {names[place] for place in plain[timed != plain].tolist()}
    kept = {names[place] for place in plain[timed == plain].tolist() if place in names}
    assert changed == set(table_of_timers.cycles())
    assert kept == ({"configure_tiles", "release_tiles"} if record.tiles is not None else set())


def test_no_function_has_two_stages():
    assert len(_STAGE_OF) == sum(map(len, STAGES.values()))


def test_results_and_arguments_pass_through_a_timer():
    """Integers, floats and a result, by a function that needs them all; its cycles are counted once a call."""
    code = """
define i64 @both(i64 %a, float %b) {
  %whole = fptosi float %b to i64
  %sum = add i64 %a, %whole
  ret i64 %sum
}
define void @other(ptr %a) {
  ret void
}
"""
    record, triple = select(runtime.host(), forced="generic"), runtime.host().triple

    def load(text):
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), link.target_machine(record, triple))
        engine.finalize_object()
        return engine

    inner, counter = load(code), np.zeros(2, np.int64)
    addresses, counters = {"both": inner.get_function_address("both")}, {"both": counter.ctypes.data}
    text = timers.build_timers(code, addresses, counters, triple)
    assert module.symbols(text) == ("both", timers.NOW)
    outer = load(text)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_float)(outer.get_function_address("both"))
    now = ctypes.CFUNCTYPE(ctypes.c_int64)(outer.get_function_address(timers.NOW))
    start = now()
    assert call(40, 2.5) == 42
    once = int(counter[0])
    assert call(-1, -7.0) == -8
    assert 0 < once < counter[0] <= now() - start
    assert counter[1] == 0


@pytest.mark.parametrize(
    ("machine", "clock"), [(AVX2, r"\brdtsc\b"), (ARM, r"(?i)\bcntvct_el0\b")], ids=["x86-64", "aarch64"]
)
def test_the_clock_is_one_that_any_process_may_read(machine, clock):
    record = select(machine, forced="generic")
    text = timers.build_timers(
        module.build_modules(record, machine.triple)[0], {"score": 64}, {"score": 128}, machine.triple
    )
    code = link.target_machine(record, machine.triple).emit_assembly(llvm.parse_assembly(text))
    assert len(re.findall(clock, code)) == 3


def test_it_reads_as_a_table():
    found = lab.breakdown("decode", num_heads=2, seq_len=8, isa="generic", repeats=1)
    head, *lines = str(found).splitlines()
    assert head.startswith("decode on generic, one thread: ")
    assert [line.split("  ")[0].strip() for line in lines] == [row.stage for row in found.rows if row.seconds > 0]
    assert re.fullmatch(r"QK +[\d.]+ us +[\d.]+% +[\d.]+ GFLOP/s", next(line for line in lines if "QK" in line))
    assert found.overhead == found.seconds / found.plain_seconds - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "bmm"}, "op: expected one of 'decode', 'extend', 'prefill', got 'bmm'"),
        ({"num_heads": 0}, "num_heads: expected"),
        ({"repeats": 0}, "repeats: expected"),
        ({"dtype": "float8_e4m3fn"}, "dtype: expected one of 'float32', 'float16', 'bfloat16', got 'float8_e4m3fn'"),
        ({"num_new": 3}, "num_new: expected 1 or None in decode, got 3"),
        ({"op": "extend", "num_new": 9, "seq_len": 8}, "num_new: expected 1 to seq_len = 8, got 9"),
        ({"isa": "sse9"}, "isa: expected one that this machine can run"),
    ],
)
def test_misuse(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lab.breakdown(**{"op": "decode"} | arguments)
    with pytest.raises(KeyError, match="expected one of queries, rows, QK"):
        lab.breakdown("decode", num_heads=1, seq_len=1, repeats=1)["scores"]
