"""The benchmarks: cases of every operation and format are right at tiny sizes, and a wrong result is never timed."""

import argparse
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import numba_mla
from numba_mla.machine import Yardstick

FOLDER = Path(__file__).parent.parent / "benchmarks"
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
TINY = {
    "decode": [(1, 3, 70), (3, 16, 5)],
    "extend": [(3, 5, 0), (2, 3, 70)],
    "prefill": [(3, (20,)), (2, (1, 9, 4))],
    "bmm": [(2, 1, 130, 140), (1, 3, 40, 257)],
}


@pytest.fixture
def load(monkeypatch):
    """Import a file of benchmarks/ as Python does when it runs one: its folder comes first."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture(autouse=True)
def small(load, monkeypatch):
    """Few copies of a weight, and short measurements."""
    monkeypatch.setattr(load("bmm_cases"), "OUT_OF_CACHE_BYTES", 300_000)
    monkeypatch.setattr(load("measure"), "_MIN_SECONDS", 0.0)


@pytest.fixture
def tiny(load, monkeypatch):
    """Tiny shapes in place of all others."""
    cases = load("cases")
    for op, operation in cases.OPERATIONS.items():
        shapes = dict.fromkeys(operation.shapes, TINY[op])
        monkeypatch.setitem(cases.OPERATIONS, op, operation._replace(shapes=shapes))
    return cases


def chosen(cases, op, **options):
    """The cases of an operation, all formats by default."""
    defaults = {"dtype": cases.FORMATS, "only": "", "isa": None}
    return list(cases.select(op, argparse.Namespace(**defaults | options)))


@pytest.mark.parametrize("op", TINY)
def test_every_format_is_right_at_tiny_sizes(vector_isa, tiny, op):
    found = chosen(tiny, op)
    assert len(found) == len(TINY[op]) * sum(map(len, tiny.OPERATIONS[op].shapes))
    for case in found:
        verdict = case.check()
        assert verdict["same_bits"]
        assert 0 <= verdict["error"] <= 1, case.name
        assert case.beside is None or case.beside.check()["error"] <= 1


@pytest.mark.parametrize("op", TINY)
def test_a_wrong_element_is_found(tiny, op):
    """The reference looks at each output: an element that is off somewhere is an error, wherever it is."""
    for case in chosen(tiny, op, dtype=["bfloat16"]):
        case.call()
        assert case.error() <= 1
        for out in case.outputs:
            flat = out.reshape(-1)
            for place in (0, flat.size // 2, flat.size - 1):
                kept = flat[place]
                flat[place] = float(kept) * 1.5 + 1
                assert case.error() > 1
                flat[place] = kept


def test_what_a_call_does_not_write_is_an_error(tiny):
    case = replace(chosen(tiny, "decode")[0], call=lambda: None)
    assert case.check()["error"] == np.inf


def test_a_wrong_or_varying_result_is_not_timed(load, tiny, capsys):
    measure = load("measure")
    right = chosen(tiny, "extend", dtype=["bfloat16"])[0]
    turns = iter(range(100))

    def vary():
        right.call()
        right.outputs[0][0, 0, 0] = next(turns)

    def must_not_run(*_):
        raise AssertionError("a wrong result was timed")

    off = replace(right, error=lambda: 1.01)
    varying = replace(right, call=vary, error=lambda: 0.5)
    for case in (off, varying, replace(right, beside=off)):
        row = measure.run_case(case, must_not_run, 1)
        assert row["wrong"]
        assert "median_us" not in row
        measure.print_row(row)
        assert "WRONG" in capsys.readouterr().out


def test_an_fp8_case_is_reported_as_a_ratio_to_bfloat16(load, tiny):
    measure = load("measure")
    yardstick = Yardstick()
    yardstick.take_peak()
    for op, stored in (("decode", "fp8_ds_mla"), ("decode", "float8_e5m2"), ("bmm", "fp8_blocks")):
        case = chosen(tiny, op, dtype=[stored])[0]
        assert case.beside.flops == case.flops
        assert case.beside.num_bytes > case.num_bytes
        row = measure.run_case(case, yardstick, 1)
        assert row["beside"]["case"].endswith("bfloat16")
        assert row["beside"]["speed"] == pytest.approx(row["beside"]["median_us"] / row["median_us"])


@pytest.mark.parametrize("as_json", [True, False])
def test_fractions_are_of_the_peak_that_was_found_in_the_end(load, tiny, capsys, as_json):
    measure = load("measure")
    peaks = measure.Peaks()
    case = chosen(tiny, "decode", dtype=["float32"])[0]
    row = measure.run_case(case, peaks[case.isa], 1)
    wrong = {"case": "other", "wrong": True}
    peaks[case.isa].gflops *= 2
    measure.report({"op": "decode", "cases": [row, wrong]}, peaks, as_json)
    printed = capsys.readouterr().out
    found = json.loads(printed)["cases"][0]["fraction"] if as_json else float(printed.splitlines()[-1].split()[-4])
    assert found == pytest.approx(row["gflops"] / peaks[case.isa].gflops, abs=0 if as_json else 5.1e-4)


def test_one_row_reads_its_weight_from_memory(load, tiny):
    """Its copies are read in turn, and hold more together than the caches."""
    bmm_cases = load("bmm_cases")
    one, many = chosen(tiny, "bmm", dtype=["float32"])
    assert one.problem["num_copies"] * one.num_bytes >= bmm_cases.OUT_OF_CACHE_BYTES
    assert one.problem["num_copies"] > 1
    assert many.problem["num_copies"] == 1


def test_only_the_work_that_causality_leaves_is_counted(load):
    attention_cases = load("attention_cases")
    assert attention_cases.prefill_case(3, (4, 2), "float32").flops == 2 * 3 * (10 + 3) * (192 + 128)
    assert attention_cases.extend_case(3, 2, 4, "float32").flops == 2 * 3 * (5 + 6) * (576 + 512)


def test_names_are_unique_and_built_only_if_chosen(load, monkeypatch):
    cases = load("cases")
    for op, (label, _, shapes) in cases.OPERATIONS.items():
        names = [label(*shape, stored) for formats, group in shapes.items() for shape in group for stored in formats]
        assert len(set(names)) == len(names)
        built = []
        operation = cases.OPERATIONS[op]._replace(build=lambda *arguments, built=built: built.append(arguments))
        monkeypatch.setitem(cases.OPERATIONS, op, operation)
        chosen(cases, op, only=names[0])
        assert len(built) == sum(names[0] in name for name in names)


def test_run_prints_every_case_and_the_machine(load, tiny, capsys):
    assert load("run").main(["prefill", "--dtype", "bfloat16", "--rounds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in document["cases"]] == ["H=3 S=20 bfloat16", "H=2 3 requests of 1 to 9 bfloat16"]
    assert document["machine"]["numba"]
    assert document["peaks"][0]["peak_gflops"] > 0
    with pytest.raises(SystemExit) as stopped:
        load("run").main(["prefill", "--only", "no such case"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("op", ["decode", "prefill", "bmm"])
def test_peers_agree_and_those_that_are_absent_are_named(load, tiny, monkeypatch, capsys, op):
    peers = load("peers")
    nobody = peers.Peer("nobody's", "no_such_module", 0.0, None)
    monkeypatch.setitem(peers.PEERS, op, [*(p for p in peers.PEERS[op] if p.module == "torch"), nobody])
    assert peers.main([op, "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("x as fast") == len(TINY[op]) * (len(peers.PEERS[op]) - 1)
    assert "absent: nobody's" in printed


def test_a_peer_that_computes_something_else_disagrees(load, tiny, monkeypatch, capsys):
    peers = load("peers")
    peer = peers.PEERS["prefill"][1]

    def prepare(problem):
        return peer.prepare(problem | {"scale": 2 * problem["scale"]})

    monkeypatch.setitem(peers.PEERS, "prefill", [peer._replace(prepare=prepare)])
    assert peers.main(["prefill", "--rounds", "1", "--only", "S=20"]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_scaling_holds_what_it_measured_to_its_limits(load, monkeypatch, capsys):
    scaling = load("scaling")
    monkeypatch.setattr(scaling, "LENGTHS", (8, 16))
    monkeypatch.setattr(scaling, "THREADS_SHAPE", (2, 3, 8))
    with numba_mla.threads(2):
        code = scaling.main(["--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["missed"])
    assert [list(row["ns_per_token"]) for row in found["lengths"]] == [["8", "16"], ["8", "16"]]
    assert found["threads"]["speedup"]["1"] == 1
    found["threads"]["speedup"] = {2: 1.95}
    found["lengths"], found["tiny"] = [{"flatness": 1.1}], {"median_us": 59}
    assert scaling.missed(found) == []
    found["threads"]["speedup"] = {2: 1.5}
    assert scaling.missed(found) == ["two_threads"]
    monkeypatch.setattr(scaling, "is_right", lambda verdict: False)
    assert scaling.main(["--rounds", "1"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_compare_fails_what_is_wrong_or_more_than_five_percent_slower(load):
    compare = load("compare")
    assert set(compare.OPS) == set(load("cases").OPERATIONS)
    base, wrong = {"case": "x", "median_us": 100.0}, {"case": "x", "wrong": True}
    for ours, expected in ((104.9, "ok"), (105.1, "SLOWER"), (50.0, "ok")):
        assert compare.verdict(base, base | {"median_us": ours}) == expected
        assert expected in compare.line(base, base | {"median_us": ours})
    assert compare.verdict(base, wrong) == "WRONG"
    assert compare.verdict(wrong, base) == "WRONG IN BASE"
    assert compare.best([base, base | {"median_us": 90.0}])["median_us"] == 90.0
    assert compare.best([base, wrong]) == wrong


def test_compare_takes_a_revision_from_git_and_leaves_nothing(load, tmp_path):
    compare = load("compare")

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True).stdout

    git("init")
    for text in ("before", "now"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-m", text)
    with compare.work_tree(tmp_path, "HEAD~1") as tree:
        assert (tree / "file").read_text() == "before"
    assert not tree.exists()
    assert git("worktree", "list").count(b"\n") == 1
    with pytest.raises(compare.RunError, match="nonsense"), compare.work_tree(tmp_path, "nonsense"):
        pass


def test_compare_measures_no_other_package_than_it_is_told_to(load, monkeypatch, tmp_path):
    """A folder without the package would have the installed one measured in its place."""
    compare = load("compare")
    printed = json.dumps({"package": str(tmp_path / "elsewhere" / "numba_mla"), "cases": [{"case": "x"}]})
    monkeypatch.setattr(compare.subprocess, "run", lambda *_, **__: argparse.Namespace(stdout=printed, stderr=""))
    assert compare.run(tmp_path / "elsewhere", tmp_path, ["bmm"]) == {"x": {"case": "x"}}
    with pytest.raises(compare.RunError, match="expected to measure"):
        compare.run(tmp_path, tmp_path, ["bmm"])
    printed = ""
    with pytest.raises(compare.RunError, match="bmm with"):
        compare.run(tmp_path, tmp_path, ["bmm"])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_programs_run_from_anywhere(path, tmp_path):
    found = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"usage: {path.name}")
