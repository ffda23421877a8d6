"""Sweeps: every combination checked before it is timed, in a table that can be kept."""

import json
import sys
import warnings
from collections import Counter

import numpy as np
import pytest

from numba_mla import Tiling, parallel
from numba_mla.lab import Table, progress, register_blocks, sweep, timing, workload
from numba_mla.lab.register_blocks import RegisterBlock

SMALL = {"num_heads": 3, "seq_len": 20, "seconds": 0.005}
TIMES = ("median_us", "best_us", "gflops", "fraction", "gbps")


def test_every_combination_is_a_row():
    seen = []
    table = sweep("decode", {"prefetch_rows": [0, 8], "threads": [1, 2], "seq_len": [20, 9]}, num_heads=3,
                  seconds=0.005, progress=lambda done, note: seen.append(done))  # fmt: skip
    grid = [(rows, threads, length) for rows in (0, 8) for threads in (1, 2) for length in (20, 9)]
    assert [(row["prefetch_rows"], row["threads"], row["seq_len"]) for row in table] == grid
    for row in table:
        assert 0 < row["best_us"] <= row["median_us"]
        assert row["error"] <= 1
        assert row["same_bits"]
        assert row["refused"] is None
        assert row["gflops"] == pytest.approx(2 * 3 * row["seq_len"] * (576 + 512) / row["median_us"] * 1e-3)
        assert row["gbps"] == pytest.approx(2 * row["seq_len"] * 576 / row["median_us"] * 1e-3)
        assert 0 < row["fraction"] < 1.2
    assert seen == sorted(seen)


def test_threads_are_those_of_the_row(monkeypatch):
    used = Counter()
    operation = workload.OPERATIONS["decode"]
    monkeypatch.setitem(
        workload.OPERATIONS, "decode", lambda **a: used.update([parallel.num_threads()]) or operation(**a)
    )
    sweep("decode", {"threads": [1]}, **SMALL)
    assert used[1] >= 7
    assert used.keys() == {1}


def test_what_does_not_fit_is_refused_with_the_reason_alone():
    table = sweep("decode", {"score_block": [(16, 2), (8, 1)]}, isa="generic", **SMALL)
    assert "would spill" in table[0]["refused"]
    assert "tiling:" not in table[0]["refused"]
    assert all(table[0][name] is None for name in (*TIMES, "error", "same_bits"))


@pytest.mark.parametrize("changes_bits", [False, True])
def test_a_wrong_result_is_not_timed(monkeypatch, changes_bits):
    operation, calls = workload.OPERATIONS["decode"], Counter()

    def off(tiling=None, **arguments):
        calls[tiling] += 1
        out, lse = operation(tiling=tiling, **arguments)
        if tiling not in (None, Tiling()):
            out[-1, -1, -1] = 5
        return out, lse

    monkeypatch.setitem(workload.OPERATIONS, "decode", off)
    grid = {"key_tile": [None, 128]} if changes_bits else {"prefetch_rows": [None, 8]}
    right, wrong = sweep("decode", grid, **SMALL)
    assert right["median_us"] > 0
    assert wrong["error"] > 1
    assert not wrong["same_bits"]
    assert all(wrong[name] is None for name in TIMES)
    assert [n for tiling, n in calls.items() if tiling not in (None, Tiling())] == [1]


@pytest.mark.parametrize("op", ["score", "value"])
def test_any_register_block_is_right(vector_isa, op):
    """Those that spill included; each checked against numpy before it is timed."""
    blocks = [(1, 2), (3, 2), (8, 2), (9, 4), (20, 4)]
    grid = {f"{op}_block": blocks, **({"value_unroll": [2, 8]} if op == "value" else {"score_unroll": [1, 16]})}
    for row in sweep(op, grid, seconds=0.001):
        assert 0 < row["error"] <= 1
        assert row["median_us"] > 0
        assert row["refused"] is None


def test_register_blocks_of_interleaved_values():
    table = sweep("value", {"interleave": ["fused", "separate"], "isa": ["generic"]}, seconds=0.001)
    assert [row["refused"] is None for row in table] == [True, False]
    for row in sweep("value", {"interleave": ["fused", "separate"]}, seconds=0.001):
        assert row["refused"] or row["error"] <= 1


@pytest.mark.parametrize("op", ["score", "value"])
def test_a_wrong_product_is_not_timed(monkeypatch, op):
    bounds = register_blocks.bmm_bounds

    def off(*arguments, **options):
        out, bound = bounds(*arguments, **options)
        out[0, -1, -1] += 1
        return out, bound

    monkeypatch.setattr(register_blocks, "bmm_bounds", off)
    (row,) = sweep(op, {f"{op}_block": [(4, 2)]}, seconds=0.001)
    assert row["error"] > 1
    assert row["median_us"] is None


def test_blocks_that_cannot_be():
    rows = sweep("value", {"value_block": [(60, 4), (4, 2)], "value_unroll": [3]}, seconds=0.001)
    assert all("power of two" in row["refused"] for row in rows)
    (row,) = sweep("score", {"score_block": [(64, 4)]}, seconds=0.001)
    assert "at most 128 sums, got 64 x 4" in row["refused"]


def test_tiles_have_no_register_blocks_here(amx_emulation):
    with pytest.raises(ValueError, match="isa: expected one whose products run on vectors, got 'amx_bf16'"):
        RegisterBlock("score", "amx_bf16")


@pytest.mark.parametrize(
    ("op", "grid", "shape", "kind", "message"),
    [
        ("bmm", {}, {}, ValueError, "op: expected one of 'decode'"),
        ("decode", [("lane_group", [1])], {}, TypeError, "grid: expected a dict of lists, got list"),
        ("decode", {"lanes": [1]}, {}, ValueError, "grid: expected names of .* got 'lanes'"),
        ("decode", {"lane_group": 64}, {}, TypeError, "grid: expected a list of values for lane_group, got int 64"),
        ("decode", {"isa": "avx2"}, {}, TypeError, "grid: expected a list of values for isa, got str 'avx2'"),
        ("decode", {"threads": [0]}, {}, ValueError, "threads: expected at least 1"),
        ("decode", {"lane_group": [0]}, {}, ValueError, "lane_group: expected at least 1"),
        ("decode", {"seq_len": [0]}, {}, ValueError, "seq_len: expected at least 1"),
        ("decode", {"isa": ["z80"]}, {}, ValueError, "isa: expected one that this machine can run"),
        ("decode", {}, {"lane_group": 64}, ValueError, "shape: expected names of .* got 'lane_group'"),
        ("decode", {"seq_len": [1]}, {"seq_len": 1}, ValueError, "shape: expected names of .* got 'seq_len'"),
        ("decode", {}, {"seconds": 0}, ValueError, "seconds: expected finite, positive"),
        ("score", {"threads": [1]}, {}, ValueError, "grid: expected names of .* got 'threads'"),
        ("score", {}, {"seq_len": 3}, ValueError, "shape: expected names of isa, got 'seq_len'"),
    ],
)
def test_misuse(monkeypatch, op, grid, shape, kind, message):
    monkeypatch.setattr(timing, "take_turn", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(kind, match=f"^{message}"):
        sweep(op, grid, **shape)


def test_tables(tmp_path, monkeypatch):
    table = Table([{"score_block": (8, 1), "gflops": 12.3456}, {"score_block": (4, 1), "refused": "<spills>"}])
    assert table == [{"score_block": (8, 1), "gflops": 12.3456}, {"score_block": (4, 1), "refused": "<spills>"}]
    assert str(table).splitlines() == [
        "score_block  gflops   refused",
        "     (8, 1)   12.35         -",
        "     (4, 1)       -  <spills>",
    ]
    assert table._repr_html_().count("<tr>") == 3
    assert "<td>&lt;spills&gt;</td>" in table._repr_html_()
    frame = table.to_pandas()
    assert frame.columns.tolist() == ["score_block", "gflops", "refused"]
    assert frame["score_block"].tolist() == [(8, 1), (4, 1)]
    Table([*table, {"n": np.float64(1.5), "m": np.int64(2)}]).save(tmp_path / "table.json")
    kept = json.loads((tmp_path / "table.json").read_text())
    assert kept["rows"][0] == {"score_block": [8, 1], "gflops": 12.3456}
    assert kept["machine"]["cpu"]
    assert kept["machine"]["numba"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas, which is not installed"):
        table.to_pandas()
    assert str(Table()) == ""


def test_a_notebook_without_widgets_gets_no_bar_and_no_warning(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with progress.shown(None) as tell:
            tell(0.5, "under way")
