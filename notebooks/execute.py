"""Run notebooks at full size and store their outputs: ``python notebooks/execute.py [NAME ...]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
# What a cell's execution leaves behind of the clock of the day.
_TIMES = "execution"


def execute(path: Path) -> float:
    """Run one notebook where it lies, and write it back; the seconds that took."""
    notebook = nbformat.read(path, as_version=4)
    start = perf_counter()
    resources = {"metadata": {"path": FOLDER}}
    # What a cell prints is one output, however it was flushed.
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    seconds = perf_counter() - start
    for cell in notebook.cells:
        cell.metadata.pop(_TIMES, None)
    notebook.metadata["seconds"] = round(seconds, 1)
    nbformat.write(notebook, path)
    return seconds


def main(names: list[str]) -> None:
    """Run the notebooks named, or all."""
    os.environ.pop("NUMBA_MLA_NOTEBOOK_SIZES", None)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            print(f"{path.stem}: {execute(path):.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
