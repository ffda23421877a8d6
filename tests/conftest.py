"""Fixtures for all tests."""

import contextlib
import importlib.util
import os
import platform
import sys

import numpy as np
import pytest

import numba_mla
from numba_mla.testing import amx
from numba_mla.testing.amx.fixture import amx_emulation  # noqa: F401

# It imports vLLM, which has an environment of its own; see CONTRIBUTING.md.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm_ops.py"]

# Notebooks, which pytest runs as well, take small sizes then.
os.environ.setdefault("NUMBA_MLA_NOTEBOOK_SIZES", "small")

AMX = "amx_bf16"
RUNS_TILES = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
# Tile instructions are run everywhere that they can be emulated.
ISAS = tuple(name for name in numba_mla.available_isas() if name != AMX)
ALL_ISAS = (*([pytest.param(AMX, marks=pytest.mark.amx)] if RUNS_TILES else []), *ISAS)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's own name: no test depends on another's draws."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(params=ALL_ISAS)
def isa(request):
    """Every instruction set that this machine runs, or emulates."""
    with contextlib.ExitStack() as stack:
        if request.param == AMX:
            stack.enter_context(amx.emulate())
        stack.enter_context(numba_mla.use_isa(request.param))
        yield request.param


@pytest.fixture(params=ISAS)
def vector_isa(request):
    """Every instruction set whose products run on vectors."""
    with numba_mla.use_isa(request.param):
        yield request.param


@pytest.fixture
def run_cli(monkeypatch, capfd):
    """Run the command line in this process; return exit code, stdout and stderr."""
    from numba_mla import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["numba-mla", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capfd.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run
