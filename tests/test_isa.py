"""Which instruction set a call runs on."""

import subprocess
import sys

import numpy as np
import pytest

import numba_mla
from numba_mla.isa import available_isas, select
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
    record = select(Host(triple, "any", features), "generic")
    assert record.name == "generic"
    assert record.vector_width == width


def test_unknown_name_is_a_clear_error():
    with pytest.raises(numba_mla.IsaUnavailableError, match="isa: expected one that this machine can run"):
        select(Host("x86_64-unknown-linux-gnu", "any", ""), "sse9")
    with pytest.raises(numba_mla.IsaUnavailableError, match="sse9"), numba_mla.use_isa("sse9"):
        pass
    with pytest.raises(numba_mla.IsaUnavailableError, match="sse9"):
        numba_mla.pack_weight(np.ones((1, 1, 1), np.float32), isa="sse9")


def test_argument_goes_before_context_and_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_MLA_ISA", "sse9")
    with pytest.raises(numba_mla.IsaUnavailableError):
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
