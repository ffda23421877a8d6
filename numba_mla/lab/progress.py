"""A progress bar, where somebody may be looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# Told how much is done, 0 to 1, and what is under way.
Progress = Callable[[float, str], None]


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """The callback itself, or for None a progress bar on stderr, in terminals and notebooks (there with ipywidgets)."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    # In a notebook without widgets it would be a warning, and text that stays.
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True,
             disable=not (console.is_terminal or in_notebook)) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0)
        yield lambda done, note: bar.update(task, completed=min(done, 1.0), description=note)
