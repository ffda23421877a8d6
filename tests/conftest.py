"""Fixtures for all tests."""

import numpy as np
import pytest

import numba_mla
from numba_mla.testing.amx.fixture import amx_emulation  # noqa: F401


@pytest.fixture
def rng(request):
    """A generator seeded by the test's own name: no test depends on another's draws."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(params=numba_mla.available_isas())
def isa(request):
    """Every instruction set that this machine runs."""
    with numba_mla.use_isa(request.param):
        yield request.param
