"""Which instruction set a call runs on."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import numba_mla
from numba_mla.isa import available_isas, host, permission, select
from numba_mla.isa.host import Host


@pytest.mark.parametrize(
    ("features", "triple", "width"),
    [
        ("", "x86_64-unknown-linux-gnu", 4),
        ("+avx,+avx2,+fma", "x86_64-unknown-linux-gnu", 8),
        ("+avx,+avx512f,-amx-tile", "x86_64-unknown-linux-gnu", 16),
        ("+neon", "aarch64-unknown-linux-gnu", 4),
        ("+neon", "arm64-apple-darwin", 4),
        ("-avx512f,-avx", "x86_64-unknown-linux-gnu", 4),
    ],
)
def test_generic_takes_the_hosts_vectors(features, triple, width):
    record = select(Host(triple, "any", features), forced="generic")
    assert record.name == "generic"
    assert record.vector_width == width


V3 = "+avx,+avx2,+fma"
V4 = V3 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"


@pytest.mark.parametrize(
    ("features", "bfloat16", "float32"),
    [
        ("", "generic", "generic"),
        (V3, "avx2", "avx2"),
        (V3 + ",-avx512f", "avx2", "avx2"),
        (V3 + ",+avx512f", "avx2", "avx2"),  # without the rest of x86-64-v4
        (V4, "avx512f", "avx512f"),
        (V4 + ",+avx512bf16", "avx512bf16", "avx512f"),
        (V4 + ",+avx512bf16,-amx-tile", "avx512bf16", "avx512f"),
        ("+avx512bf16", "generic", "generic"),  # XCR0 bits off
    ],
)
def test_choice_on_fake_hosts(features, bfloat16, float32):
    machine = Host("x86_64-unknown-linux-gnu", "any", features)
    assert select(machine, "bfloat16").name == bfloat16
    assert select(machine, "float32").name == float32
    assert select(machine, "float16").name == float32
    assert select(machine).name == bfloat16
    assert select(machine, "bfloat16", "generic").name == "generic"


AMX = ",+amx-tile,+amx-bf16"


@pytest.mark.parametrize(
    ("features", "tiles", "bfloat16", "float32"),
    [
        (V4 + ",+avx512bf16" + AMX, True, "amx_bf16", "avx512f"),
        (V4 + ",+avx512bf16" + AMX, False, "avx512bf16", "avx512f"),
        (V4 + AMX, False, "avx512f", "avx512f"),
        (V3 + AMX, True, "amx_bf16", "avx2"),
        (V3 + AMX, False, "avx2", "avx2"),
        (AMX[1:], True, "generic", "generic"),  # XCR0 bits off
    ],
)
def test_choice_on_fake_hosts_with_tiles(features, tiles, bfloat16, float32):
    """Tiles count where they were granted, not where the processor lists them; without them nothing else is lost."""
    machine = Host("x86_64-unknown-linux-gnu", "any", features, tiles)
    assert select(machine, "bfloat16").name == bfloat16
    assert select(machine, "float32").name == float32
    assert ("amx_bf16" in available_isas(machine)) == (bfloat16 == "amx_bf16")


@pytest.mark.parametrize(
    ("platform", "max_palette", "granted", "expected"),
    [
        ("linux", 1, True, True),
        ("linux", 0, True, False),  # a virtual machine that lists AMX and has no palette
        ("linux", 1, False, False),  # the system refuses
        ("darwin", 1, True, False),
    ],
)
def test_tiles_need_a_palette_and_a_permission(monkeypatch, platform, max_palette, granted, expected):
    monkeypatch.setattr(permission.sys, "platform", platform)
    monkeypatch.setattr(permission, "_max_palette", lambda: max_palette)
    monkeypatch.setattr(permission, "_request_permission", lambda: granted)
    assert permission.tiles_are_granted.__wrapped__() is expected


@pytest.mark.parametrize("error", [OSError, AttributeError, RuntimeError])
def test_a_question_that_fails_is_a_no(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(permission.sys, "platform", "linux")
    monkeypatch.setattr(permission, "_max_palette", fail)
    assert permission.tiles_are_granted.__wrapped__() is False


def test_only_a_processor_that_lists_tiles_is_asked_for_them(monkeypatch):
    """The AMX bit alone is not enough, and without it the question is not put."""
    for names, granted, expected in (({"amx-tile", "amx-bf16"}, True, True), ({"amx-tile", "amx-bf16"}, False, False),
                                     ({"amx-tile"}, None, False)):  # fmt: skip
        features = SimpleNamespace(flatten=lambda names=names: ",".join(f"+{name}" for name in sorted(names)))
        monkeypatch.setattr(host.llvm, "get_host_cpu_features", lambda features=features: features)
        monkeypatch.setattr(host, "tiles_are_granted", lambda granted=granted: granted or pytest.fail("asked"))
        if granted is False:
            monkeypatch.setattr(host, "tiles_are_granted", lambda: False)
        assert host.detect.__wrapped__().tiles is expected


def test_a_forced_one_leaves_other_types_to_its_companion():
    machine = Host("x86_64-unknown-linux-gnu", "any", V4 + ",+avx512bf16")
    assert select(machine, "bfloat16", "avx512bf16").name == "avx512bf16"
    assert select(machine, "float32", "avx512bf16").name == "avx512f"


def test_every_record_is_named_as_it_is_selected():
    machine = Host("x86_64-unknown-linux-gnu", "any", V4 + ",+avx512bf16")
    for name in available_isas(machine):
        assert select(machine, forced=name).name == name


def test_unknown_name_is_a_clear_error():
    with pytest.raises(numba_mla.IsaUnavailableError, match="isa: expected one that this machine can run"):
        select(Host("x86_64-unknown-linux-gnu", "any", ""), forced="sse9")
    with pytest.raises(numba_mla.IsaUnavailableError, match="sse9"), numba_mla.use_isa("sse9"):
        pass
    with pytest.raises(numba_mla.IsaUnavailableError, match="sse9"):
        numba_mla.pack_weight(np.ones((1, 1, 1), np.float32), isa="sse9")


def test_argument_goes_before_context_and_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_MLA_ISA", "sse9")
    with pytest.raises(numba_mla.IsaUnavailableError, match="NUMBA_MLA_ISA, isa: expected one that this machine"):
        numba_mla.show_config()
    with numba_mla.use_isa("generic"):
        assert numba_mla.show_config()["isa"] == "generic"


def test_generic_is_always_there():
    assert available_isas(Host("riscv64-unknown-linux-gnu", "generic-rv64", "")) == ("generic",)
    assert numba_mla.available_isas()[-1] == "generic"


def test_a_plain_x86_64_host_gets_right_answers_without_wide_vectors():
    """NUMBA_CPU_NAME=x86-64 in a process of its own: another width, within the tolerance."""
    script = """
import numpy as np, numba_mla
from numba_mla.testing.inputs import latent_problem
from numba_mla.testing.tolerance import extend_bounds
assert numba_mla.show_config()["vector_bits"] == 128
problem = latent_problem(np.random.default_rng(0), 5, [300, 40], [9, 1], 16, 64, 16)
assert extend_bounds(**problem).excess(*numba_mla.extend(**problem)) <= 1
"""
    environment = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    import os

    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
