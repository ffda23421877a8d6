"""Which instruction set a call runs on."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import IsaUnavailableError
from . import generic
from .host import Host
from .record import Isa

# Best first: the name, whether a host has it, and its record.
RECORDS: tuple[tuple[str, Callable[[Host], bool], Callable[[Host], Isa]], ...] = (
    ("generic", lambda host: True, generic.record),
)


def available_isas(host: Host) -> tuple[str, ...]:
    """Names of the instruction sets that a host can run, best first."""
    return tuple(name for name, runs_on, _ in RECORDS if runs_on(host))


def select(host: Host, forced: str | None = None) -> Isa:
    """The best record that a host can run, or the one asked for.

    Raises
    ------
    IsaUnavailableError
        If the name asked for is unknown or the host cannot run it.
    """
    names = available_isas(host)
    wanted = names[0] if forced is None else forced
    for name, _, record in RECORDS:
        if name == wanted and name in names:
            return record(host)
    known = ", ".join(name for name, _, _ in RECORDS)
    raise IsaUnavailableError(
        f"isa: expected one that this machine can run ({', '.join(names)}), got {forced!r} (known: {known})"
    )
