"""What the laboratory says of inner loops, on instruction sets of this machine and of others."""

import stat

import pytest

import numba_mla
from numba_mla import Tiling, lab
from numba_mla.isa.host import Host
from numba_mla.isa.select import MODULES, available_isas, made_up_host
from numba_mla.lab import inspection, mca

DOTS = {"amx_bf16": "tdpbf16ps", "avx512bf16": "vdpbf16ps", "avx512f": "vfmadd231ps", "avx2": "vfmadd231ps"}


@pytest.fixture
def no_mca(monkeypatch, tmp_path):
    """A PATH without llvm-mca."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder, name, script):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_the_machine_made_up_runs_all_instruction_sets():
    assert available_isas(made_up_host()) == tuple(MODULES)


@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("op", ["decode", "bmm"])
def test_dots_are_there_and_nothing_spills_on_any_machine(no_mca, op, name):
    found = lab.inspect(op, name)
    assert found.isa == name
    assert found.here is (name in numba_mla.available_isas())
    assert found.spills == ()
    for stage in ("score", "value") if op == "decode" else ("weight",):
        routine = found[stage]
        assert routine.mix[DOTS[name]] > 0
        assert f"@{routine.symbol}(" in routine.llvm.splitlines()[0]
        assert routine.loop.splitlines()[-1] in routine.assembly
        assert sum(routine.mix.values()) > routine.mix[DOTS[name]]


def test_flops_of_a_turn_are_those_of_the_block(no_mca):
    """16 steps of 8 x 1 vectors, 32 keys of 8 x 2, of pairs: 2 * 2 * 16 operations each."""
    found = lab.inspect("prefill", "avx512bf16")
    assert found["score"].flops == 16 * 8 * 1 * 64
    assert found["value"].flops == 32 // 2 * 8 * 2 * 64
    assert found["value"].mix["vdpbf16ps"] == 32 // 2 * 8 * 2
    tiles = lab.inspect("prefill", "amx_bf16")
    assert tiles["score"].flops == tiles["value"].flops == 4 * 2 * 16 * 16 * 32
    assert [routine.stage for routine in tiles] == ["score", "softmax", "value", "interleave"]


@pytest.mark.parametrize("name", ["avx512bf16", "avx512f", "avx2"])
def test_a_spilling_tiling_is_reported(no_mca, name):
    found = lab.inspect("decode", name, Tiling(score_block=(12, 3), value_block=(16, 2)))
    assert found["score"].spills
    assert found["value"].symbol == "value_16x2"
    assert found.spills == found["score"].spills + found["value"].spills
    assert found["softmax"].spills == ()
    assert f"{len(found['score'].spills)} spills in its inner loops, such as `" in str(found)
    assert f"| value | `value_16x2` | {sum(found['value'].mix.values())} |" in found._repr_markdown_()


def test_the_one_in_force_is_the_default(no_mca, vector_isa):
    found = lab.inspect("decode")
    assert (found.isa, found.here) == (vector_isa, True)


def test_without_llvm_mca(no_mca):
    found = lab.inspect("decode", "avx2")
    assert all(routine.mca == (None, "llvm-mca is not installed", "") for routine in found)
    assert "no cycles: llvm-mca is not installed" in str(found)


def test_with_llvm_mca(no_mca):
    """A program of its name, of the newest version, that says which processor it was asked for, and on what."""
    install(no_mca, "llvm-mca-14", "exit 9")
    script = 'input=$(while read -r line; do echo "$line"; done)\necho "Total Cycles:      1234\n$@\n$input"'
    install(no_mca, "llvm-mca-19", script)
    found = lab.inspect("decode", "amx_bf16")["score"]
    assert found.mca.cycles == 12.34
    assert found.mca.cpu == made_up_host().cpu == "sapphirerapids"
    assert "-mcpu=sapphirerapids" in found.mca.report
    assert "amx-bf16" in found.mca.report
    assert "tdpbf16ps" in found.mca.report
    assert f"12.3 cycles a turn, {found.flops / 12.34:.1f} flop a cycle" in str(found)


def test_an_old_llvm_mca_is_asked_for_a_processor_that_it_knows(no_mca):
    script = 'case "$*" in *sapphire*) echo no such processor >&2; exit 1;; esac\necho "Total Cycles: 200"'
    install(no_mca, "llvm-mca", script)
    found = lab.inspect("decode", "amx_bf16")["score"]
    assert (found.mca.cycles, found.mca.cpu) == (2.0, "x86-64-v4")


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo what is this >&2; exit 1", "llvm-mca: what is this"), ("exit 3", "llvm-mca: exit code 3")],
)
def test_a_failing_llvm_mca_is_a_reason(no_mca, script, reason):
    install(no_mca, "llvm-mca", script)
    assert f"no cycles: {reason}" in str(lab.inspect("bmm", "avx2"))


def test_a_program_that_does_not_start_is_a_reason(no_mca):
    (no_mca / "llvm-mca").write_bytes(b"\x7fELF no program")
    (no_mca / "llvm-mca").chmod(0o700)
    assert "llvm-mca: [Errno" in lab.inspect("bmm", "avx2")["weight"].mca.reason


def test_straight_code_is_not_asked_about(no_mca):
    install(no_mca, "llvm-mca", "exit 0")
    machine = made_up_host()
    record = MODULES["avx2"].record(machine)
    assert mca.view("", record, machine) == (None, "there is no loop", "")


def test_another_architecture_has_no_assembler_for_ours(no_mca, monkeypatch):
    """LLVM would end the process; what is written without text of the assembler can be read there too."""
    monkeypatch.setattr(inspection, "host", lambda: Host("aarch64-apple-darwin", "apple-m1", "+neon"))
    monkeypatch.setattr(inspection, "available_isas", lambda: ("generic",))
    assert lab.inspect("decode", "amx_bf16")["score"].mix["tdpbf16ps"] == 4
    with pytest.raises(numba_mla.IsaUnavailableError, match="got 'avx512bf16', which needs x86_64"):
        lab.inspect("decode", "avx512bf16")


def test_misuse():
    with pytest.raises(ValueError, match=r"op: expected one of decode, extend, prefill, bmm, got 'attend'"):
        lab.inspect("attend")
    with pytest.raises(numba_mla.IsaUnavailableError, match=r"isa: expected one .*, got 'sse9'"):
        lab.inspect("decode", "sse9")
    with pytest.raises(TypeError, match="isa: expected a name such as 'generic', got int 3"):
        lab.inspect("decode", 3)
    with pytest.raises(KeyError, match="expected one of weight, scaled weight, got 'score'"):
        lab.inspect("bmm", "avx2")["score"]
