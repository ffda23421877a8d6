"""Which instruction set a call runs on."""

from __future__ import annotations

from types import ModuleType

from ..errors import IsaUnavailableError
from . import amx_bf16, avx2, avx512bf16, avx512f, generic
from .host import TILE_FEATURES, Host
from .record import Isa

# Best first. Each module says whether it runs on a host, and gives its record for it.
MODULES: dict[str, ModuleType] = {
    "amx_bf16": amx_bf16,
    "avx512bf16": avx512bf16,
    "avx512f": avx512f,
    "avx2": avx2,
    "generic": generic,
}


def available_isas(host: Host) -> tuple[str, ...]:
    """Names of the instruction sets that a host can run, best first."""
    return tuple(name for name, module in MODULES.items() if module.runs_on(host))


def made_up_host() -> Host:
    """A machine that runs every instruction set, whose code can be read where this one would not run it."""
    features = {"avx", "avx512bf16", "avx512vbmi", *avx512f.NEEDED, *TILE_FEATURES}
    return Host("x86_64-unknown-linux-gnu", "sapphirerapids", ",".join(f"+{name}" for name in sorted(features)), True)


def select(host: Host, dtype: str | None = None, forced: str | None = None) -> Isa:
    """The best record that a host can run, or the one asked for; its companion for types that it does not take.

    Parameters
    ----------
    host : Host
        The machine.
    dtype : str, optional
        Element type of the queries or the left operand; None: whatever the record takes.
    forced : str, optional
        An instruction set by name.

    Raises
    ------
    IsaUnavailableError
        If the name asked for is unknown or the host cannot run it.
    """
    names = available_isas(host)
    wanted = names[0] if forced is None else forced
    if wanted not in names:
        raise IsaUnavailableError(
            f"isa: expected one that this machine can run ({', '.join(names)}), got {forced!r} "
            f"(known: {', '.join(MODULES)})"
        )
    record = MODULES[wanted].record(host)
    if dtype is None or dtype in record.dtypes or record.companion is None:
        return record
    return select(host, dtype, record.companion)
