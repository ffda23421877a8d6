"""``numba-mla tune``: what it prints, what it keeps after Ctrl-C, what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import numba_mla
from numba_mla import Tiling, cli
from numba_mla.lab import search

SMALL = ["--num-heads", "3", "--seq-len", "20", "--isa", "generic"]


@pytest.fixture
def run_tune(run_cli):
    """Run ``tune`` in this process; return exit code, stdout and stderr."""
    return lambda *arguments: run_cli("tune", *arguments)


@pytest.fixture
def faster(monkeypatch):
    """A search that finds a tiling, twice as fast as the default."""
    tuned = search.Tuned(Tiling(lane_group=64), cli.Times([2e-3], [2e-3]), cli.Times([1e-3], [1e-3]), 7, False)
    monkeypatch.setattr(cli, "search", lambda workload, **options: tuned)
    return tuned


def test_the_tiling_is_printed_and_saved(run_tune, faster, tmp_path):
    path = tmp_path / "tiling.json"
    exit_code, out, err = run_tune("decode", *SMALL, "--save", path)
    assert (exit_code, err) == (0, "")
    for words in ("num_heads 3", "2,000.0 us", "1,000.0 us", "2.000", "7 tilings", "Tiling(lane_group=64)"):
        assert words in out
    assert f"use it: numba_mla.decode(..., tiling=numba_mla.Tiling.load({str(path)!r}))" in out
    assert Tiling.load(path) == faster.tiling


def test_json(run_tune, faster):
    exit_code, out, _ = run_tune("extend", *SMALL, "--num-new", 4, "--threads", 1, "--json")
    report = json.loads(out)
    assert exit_code == 0
    assert report["workload"]["num_new"] == 4
    assert report["workload"]["threads"] == 1
    assert report["speed"] == 2
    assert report["default"]["fraction"] * report["peak_gflops"] == pytest.approx(report["default"]["gflops"])
    assert report["tiling"] == {"lane_group": 64}


@pytest.mark.parametrize("op", ["decode", "extend", "prefill"])
def test_a_search(run_tune, op):
    exit_code, out, err = run_tune(op, *SMALL, "--budget", 0.2, "--change-bits", "--json")
    report = json.loads(out)
    assert (exit_code, err) == (0, "")
    assert report["num_tried"] > 0
    assert report["best"]["median_us"] <= report["default"]["median_us"]
    assert not report["interrupted"]


def test_what_is_not_faster_is_said_so(run_tune):
    assert "none is faster than the default" in run_tune("decode", *SMALL, "--budget", 0.01)[1]


def test_help(run_tune):
    assert "--change-bits" in run_tune("--help")[1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "op"),
        (["bmm"], "'bmm'"),
        (["decode", "--num-heads", 0], "--num-heads"),
        (["decode", "--seq-len", "long"], "--seq-len"),
        (["decode", "--num-new", 2], "num_new: expected 1 or None in decode, got 2"),
        (["decode", "--dtype", "float64"], "float64"),
        (["decode", "--isa", "z80"], "z80"),
        (["decode", "--threads", 0], "--threads"),
        (["decode", "--budget", 0], "--budget"),
        (["decode", "--budget", "nan"], "--budget"),
        (["decode", "--budget", "inf"], "budget_s"),
        (["decode", "--num-requests", 10**15], "MemoryError"),
        (["decode", "--save", "nowhere/tiling.json"], "--save: expected a file in a folder that exists, got nowhere"),
    ],
)
def test_bad_input_is_refused_in_one_line(run_tune, monkeypatch, arguments, word):
    monkeypatch.setattr(search._Search, "run", lambda self: pytest.fail("it searched"))
    exit_code, out, err = run_tune(*arguments)
    assert (exit_code, out) == (2, "")
    assert err.startswith("numba-mla: ")
    assert err.count("\n") == 1
    assert word in err


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to whole consoles")
def test_ctrl_c_keeps_what_was_found(tmp_path):
    """A tiling that is far faster is found first; the search then goes on until the interrupt."""
    # The handler is set anew, since background jobs inherit an ignored SIGINT.
    code = f"""
import contextlib, pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from numba_mla import cli
from numba_mla.lab.workload import Workload

run = Workload.run
slow = lambda tiling: tiling is None or tiling.lane_group != 16
Workload.run = lambda self, tiling=None: time.sleep(0.002 * slow(tiling)) or run(self, tiling)

@contextlib.contextmanager
def shown(progress):
    yield lambda done, note: note.startswith("value_block") and pathlib.Path({str(tmp_path / "under_way")!r}).touch()

cli.shown = shown
cli.main()
"""
    arguments = ["tune", "decode", *SMALL, "--budget", "100", "--save", str(tmp_path / "tiling.json"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "under_way").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    report = json.loads(out)
    assert report["interrupted"]
    assert report["tiling"]["lane_group"] == 16
    assert report["speed"] > 1.5
    assert Tiling.load(tmp_path / "tiling.json").lane_group == 16


def test_an_interrupt_that_was_lost_ends_the_search(run_tune, monkeypatch):
    """As when it lands in a callback of the compiler: the next step of the search sees that there was one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def lose_an_interrupt(self, *_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return False

    monkeypatch.setattr(search._Search, "_is_right", lose_an_interrupt)
    try:
        exit_code, out, _ = run_tune("decode", *SMALL, "--budget", 50, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert exit_code == 130
    assert json.loads(out)["interrupted"]
    assert json.loads(out)["version"] == numba_mla.__version__
