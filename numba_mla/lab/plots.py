"""Pictures of measurements: a heat map of two settings, and the roofline of this machine with operations on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..machine import Yardstick


def heatmap(rows: Iterable[Mapping[str, Any]], x: str, y: str, value: str = "fraction", *, ax=None, title=None):
    """Draw what was measured over two settings.

    A combination that was refused, or not measured, is left white and marked with a cross.

    Parameters
    ----------
    rows : iterable of mapping
        Measurements, as ``sweep`` returns them.
    x, y : str
        The settings on the axes; their values keep the order in which they first come.
    value : str
        What the colour and the number in each cell tell; a fraction of the peak by default.
    ax : matplotlib Axes, optional
        Where to draw; None: a new figure.
    title : str, optional
        What stands above.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    ValueError
        A row without one of the settings, no row with a value.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("agg")
    >>> from numba_mla.lab import heatmap
    >>> rows = [{"key_tile": k, "lane_group": n, "fraction": 0.1 * n / k} for k in (128, 256) for n in (16, 64)]
    >>> ax = heatmap(rows, "lane_group", "key_tile")
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('lane_group', 'key_tile')
    """
    rows = list(rows)
    columns, lines = (_values(rows, name) for name in (x, y))
    cells = np.full((len(lines), len(columns)), np.nan)
    for row in rows:
        if row.get(value) is not None:
            cells[lines.index(row[y]), columns.index(row[x])] = row[value]
    if np.isnan(cells).all():
        raise ValueError(f"rows: expected a value of {value!r} in one at least, got none")
    ax = _axes(ax)
    image = ax.imshow(cells, aspect="auto", cmap="viridis")
    ax.figure.colorbar(image, ax=ax, label=_label(value))
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for (line, column), number in np.ndenumerate(cells):
        text, colour = ("x", "grey") if np.isnan(number) else (f"{number:.3g}", "white" if number < middle else "black")
        ax.text(column, line, text, ha="center", va="center", color=colour)
    ax.set_xticks(range(len(columns)), [str(value) for value in columns])
    ax.set_yticks(range(len(lines)), [str(value) for value in lines])
    ax.set_xlabel(_label(x))
    ax.set_ylabel(_label(y))
    if title is not None:
        ax.set_title(title)
    return ax


def roofline(rows: Iterable[Mapping[str, Any]], label: str, *, yardstick: Yardstick | None = None, ax=None,
             title=None):  # fmt: skip
    """Draw operations under what this machine can do: ``min(peak, bandwidth * intensity)``.

    Intensity is floating point operations for each byte that must be read; to the left of the ridge memory bounds
    an operation, to the right of it arithmetic.

    Parameters
    ----------
    rows : iterable of mapping
        Measurements with ``gflops`` and ``gbps`` (10^9 operations and bytes per second), as ``sweep`` returns them, or
        made by hand of a peer's times.
    label : str
        The setting that names a row.
    yardstick : Yardstick, optional
        This machine's peak and read bandwidth, both measured; None: measured now, on the threads in force.
    ax : matplotlib Axes, optional
        Where to draw; None: a new figure.
    title : str, optional
        What stands above.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    ValueError
        A row without a label, a speed or a bandwidth, or no rows.

    Notes
    -----
    Source: Williams, Waterman, Patterson: Roofline (CACM 52, 2009).

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("agg")
    >>> from numba_mla.lab import roofline
    >>> ax = roofline([{"op": "decode", "gflops": 100.0, "gbps": 4.0}], "op")
    >>> ax.get_xscale(), ax.get_yscale()
    ('log', 'log')
    """
    rows = list(rows)
    names, speeds, bandwidths = (_column(rows, name) for name in (label, "gflops", "gbps"))
    if yardstick is None:
        yardstick = _measured()
    ax = _axes(ax)
    intensities = [speed / bandwidth for speed, bandwidth in zip(speeds, bandwidths, strict=True)]
    ridge = yardstick.gflops / yardstick.read_gbps
    reach = np.geomspace(min(*intensities, ridge) / 4, max(*intensities, ridge) * 4, 200)
    roof = np.minimum(yardstick.gflops, yardstick.read_gbps * reach)
    ax.plot(reach, roof, color="black", label=f"{yardstick.gflops:.0f} GFLOP/s, {yardstick.read_gbps:.0f} GB/s")
    for name, intensity, speed in zip(names, intensities, speeds, strict=True):
        ax.plot(intensity, speed, "o", label=f"{name}: {speed:.0f}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("intensity (FLOP/byte)")
    ax.set_ylabel("speed (GFLOP/s)")
    ax.legend(fontsize="small", loc="lower right")
    if title is not None:
        ax.set_title(title)
    return ax


# What axes are called where a name alone has no unit.
_UNITS = {
    "fraction": "fraction of the peak",
    "median_us": "median time (µs)",
    "best_us": "best time (µs)",
    "gflops": "speed (GFLOP/s)",
    "gbps": "bytes read (GB/s)",
}


def _label(name: str) -> str:
    return _UNITS.get(name, name)


def _column(rows: list[Mapping[str, Any]], name: str) -> list[Any]:
    """A value of every row."""
    if not rows:
        raise ValueError("rows: expected at least one measurement, got none")
    missing = [row for row in rows if row.get(name) is None]
    if missing:
        raise ValueError(f"rows: expected a value of {name!r} in each, got {dict(missing[0])}")
    return [row[name] for row in rows]


def _values(rows: list[Mapping[str, Any]], name: str) -> list[Any]:
    """A setting's values, each once, in the order in which they come."""
    found: list[Any] = []
    for value in _column(rows, name):
        if value not in found:
            found.append(value)
    return found


def _axes(ax):
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numba-mla[lab]'") from error
    return plt.subplots(figsize=(7, 4.5), layout="constrained")[1]


def _measured() -> Yardstick:
    """Peak and bandwidth, the best of a few slices."""
    yardstick = Yardstick()
    for _ in range(10):
        yardstick.take_peak()
    for _ in range(3):
        yardstick.take_bandwidth()
    return yardstick
