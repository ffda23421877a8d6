"""Fixtures for all tests."""

import numpy as np
import pytest

import numba_mla


@pytest.fixture
def rng(request):
    """A generator seeded by the test's own name: no test depends on another's draws."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(params=numba_mla.available_isas())
def isa(request):
    """Every instruction set that this machine runs."""
    with numba_mla.use_isa(request.param):
        yield request.param
