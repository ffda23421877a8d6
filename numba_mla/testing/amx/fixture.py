"""The emulator as a pytest fixture: ``from numba_mla.testing.amx.fixture import amx_emulation``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .emulation import emulate


@pytest.fixture
def amx_emulation() -> Iterator[str]:
    """AMX tile instructions run during the test: ``"hardware"`` or ``"emulator"`` says how."""
    with emulate() as how:
        yield how
