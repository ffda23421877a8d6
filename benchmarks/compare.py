"""Measure this tree against another revision: ``python benchmarks/compare.py HEAD~3 decode bmm``.

The other revision is checked out into a temporary work tree. This tree's benchmarks run both, each in fresh
processes that take turns and check every result before they time it. The best median of a case counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# run.py's; this process imports neither tree's package.
OPS = ("bmm", "decode", "extend", "prefill")
# How much slower a case may be.
ALLOWED = 1.05


class RunError(Exception):
    """A run that ended without results."""


@contextlib.contextmanager
def work_tree(repository: Path, revision: str) -> Iterator[Path]:
    """A temporary folder with a revision of a repository."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(repository), "worktree"]
        added = subprocess.run(
            [*git, "add", "--quiet", "--detach", str(tree), revision], capture_output=True, text=True
        )
        if added.returncode:
            raise RunError(f"git has no work tree of {revision!r}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run(package: Path, compiled: Path, arguments: list[str]) -> dict[str, dict]:
    """The rows, by case, that this tree's run.py finds with the package in a folder."""
    environment = os.environ | {"PYTHONPATH": str(package), "NUMBA_MLA_CACHE_DIR": str(compiled)}
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments, "--json", "--rounds", "1"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        document = json.loads(found.stdout)
    except json.JSONDecodeError:
        raise RunError(f"{' '.join(arguments)} with {package} failed:\n{found.stderr}") from None
    if Path(document["package"]) != package / "numba_mla":
        raise RunError(f"expected to measure {package / 'numba_mla'}, measured {document['package']}")
    return {row["case"]: row for row in document["cases"]}


def best(rows: list[dict]) -> dict:
    """The row of the best median; a wrong one before all others."""
    return min(rows, key=lambda row: (not row.get("wrong", False), row.get("median_us", 0.0)))


def verdict(base: dict, ours: dict) -> str:
    """What a case comes to: "ok", "SLOWER", "WRONG" or, where the other revision is, "WRONG IN BASE"."""
    if ours.get("wrong"):
        return "WRONG"
    if base.get("wrong"):
        return "WRONG IN BASE"
    return "SLOWER" if ours["median_us"] > ALLOWED * base["median_us"] else "ok"


def line(base: dict, ours: dict) -> str:
    """One line of the table."""
    found = verdict(base, ours)
    if "WRONG" in found:
        return f"{ours['case']:38} {found}"
    before, now = base["median_us"], ours["median_us"]
    return f"{ours['case']:38} {before:9.1f} -> {now:9.1f} us  {now / before:5.3f} of the time  {found}"


def compare(op: str, trees: list[tuple[Path, Path]], arguments: list[str], rounds: int) -> list[str]:
    """Measure an operation with each (package, compiled code) in turns, print; the verdicts."""
    found = [[run(*tree, [op, *arguments]) for tree in trees] for _ in range(rounds)]
    verdicts = []
    for case in found[0][0]:
        base, ours = (best([turn[side][case] for turn in found]) for side in (0, 1))
        print(line(base, ours), flush=True)
        verdicts.append(verdict(base, ours))
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    """Measure both in turns, print; 1 if a case is wrong or more than 5 % slower, 2 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a git revision")
    parser.add_argument("op", nargs="*", help=f"of {', '.join(OPS)} (all by default)")
    parser.add_argument("--dtype", action="append", help="as run.py's (bfloat16 by default)")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each tree")
    options = parser.parse_intermixed_args(arguments)
    passed_on = [f"--only={options.only}", *(f"--dtype={name}" for name in options.dtype or ["bfloat16"])]
    verdicts = []
    try:
        with work_tree(ROOT, options.base) as base, tempfile.TemporaryDirectory() as compiled:
            trees = [(base, Path(compiled) / "base"), (ROOT, Path(compiled) / "this")]
            for op in options.op or OPS:
                verdicts += compare(op, trees, passed_on, options.rounds)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(found != "ok" for found in verdicts))


if __name__ == "__main__":
    sys.exit(main())
