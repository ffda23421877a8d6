"""llvm-mca's view of a loop, where it is installed: the cycles that a model of the processor takes for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

from ..isa import Isa
from ..isa.host import Host

TURNS = 100
_NEWEST, _OLDEST = 40, 10
_TIMEOUT_S = 60
# A processor that every version knows, with all vectors.
_PLAIN = "x86-64-v4"


class View(NamedTuple):
    """What llvm-mca says of a loop, by its model of a processor; or None and the reason."""

    report: str | None
    reason: str = ""
    cpu: str = ""

    @property
    def cycles(self) -> float | None:
        """Cycles of one turn; None without a report."""
        found = None if self.report is None else re.search(r"Total Cycles:\s+(\d+)", self.report)
        return None if found is None else int(found[1]) / TURNS


def find_mca() -> str | None:
    """The program's path, by its own name or by that of its newest version; None where it is not installed."""
    names = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(_NEWEST, _OLDEST, -1)))
    return next(filter(None, map(shutil.which, names)), None)


def view(loop: str, isa: Isa, machine: Host) -> View:
    """Ask llvm-mca for a loop, as it stands in a listing of a record's functions, over TURNS turns.

    By its model of the machine's processor, or of the one compiled for where it is too old to know that, or of any.
    """
    program = find_mca()
    if program is None:
        return View(None, "llvm-mca is not installed")
    if not loop:
        return View(None, "there is no loop")
    refused = View(None)
    plain = [_PLAIN] if machine.triple.startswith("x86_64") else []
    for cpu in dict.fromkeys((machine.cpu, isa.cpu, *plain)):
        command = [program, f"-mtriple={machine.triple}", f"-mcpu={cpu}", f"-mattr={isa.features}",
                   f"-iterations={TURNS}", "-bottleneck-analysis"]  # fmt: skip
        try:
            done = subprocess.run(command, input=loop, text=True, capture_output=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return View(None, f"llvm-mca: {error}")
        if done.returncode == 0:
            return View(done.stdout, cpu=cpu)
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        refused = View(None, f"llvm-mca: {said}")
    return refused
