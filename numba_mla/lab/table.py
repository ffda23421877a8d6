"""A plain table: a list of dicts that shows itself, and can be saved."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..info import show_config


class Table(list[dict[str, Any]]):
    """A list of dicts, one a row, with the machine that they were measured on.

    Parameters
    ----------
    rows : iterable of dict
        The rows; their keys are the columns, in the order in which they come.

    Examples
    --------
    >>> from numba_mla.lab import Table
    >>> Table([{"lane_group": 64, "median_us": 12.5}, {"lane_group": 128, "median_us": None}])
    lane_group  median_us
            64       12.5
           128          -
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)
        self.machine = show_config()

    @property
    def columns(self) -> list[str]:
        """The names of all rows' values."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_pandas(self):
        """The rows as a ``pandas.DataFrame``.

        Raises
        ------
        ImportError
            Where pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("Table.to_pandas needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(list(self), columns=self.columns)

    def save(self, path) -> None:
        """Write the rows and the machine (``show_config()``) to a JSON file.

        Parameters
        ----------
        path : str or Path
            The file, which is written anew.
        """
        document = {"machine": self.machine, "rows": list(self)}
        Path(path).write_text(json.dumps(document, indent=1, default=str) + "\n")

    def __repr__(self) -> str:
        cells = [self.columns, *([_text(row.get(name)) for name in self.columns] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Iterable[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        rows = (line("td", (_text(row.get(name)) for name in self.columns)) for row in self)
        return f"<table>{line('th', self.columns)}{''.join(rows)}</table>"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
