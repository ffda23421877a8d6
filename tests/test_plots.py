"""Pictures of measurements: what stands on the axes and in the cells, and what is refused."""

import sys
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest

from numba_mla.lab import heatmap, roofline

matplotlib.use("agg")
MACHINE = SimpleNamespace(gflops=400.0, read_gbps=40.0)
ROWS = [
    {"key_tile": 512, "lane_group": 16, "fraction": 0.25},
    {"key_tile": 512, "lane_group": 64, "fraction": 0.5},
    {"key_tile": 128, "lane_group": 16, "fraction": None, "refused": "does not fit"},
]


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    matplotlib.pyplot.close("all")


def texts(ax):
    return {text.get_position(): text.get_text() for text in ax.texts}


def test_heatmap_has_each_value_in_its_cell_and_a_cross_where_there_is_none():
    ax = heatmap(ROWS, "lane_group", "key_tile", title="decode")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["16", "64"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["512", "128"]
    assert texts(ax) == {(0, 0): "0.25", (1, 0): "0.5", (0, 1): "x", (1, 1): "x"}
    assert ax.get_title() == "decode"
    np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), [[0.25, 0.5], [np.nan, np.nan]])
    assert ax.images[0].colorbar.ax.get_ylabel() == "fraction of the peak"


def test_roofline_has_a_ridge_and_a_point_for_each_row():
    rows = [{"op": "decode", "gflops": 300.0, "gbps": 2.0}, {"op": "bmm", "gflops": 30.0, "gbps": 30.0}]
    ax = roofline(rows, "op", yardstick=MACHINE)
    roof, *points = ax.lines
    assert [point.get_xydata().tolist() for point in points] == [[[150.0, 300.0]], [[1.0, 30.0]]]
    intensity, speed = roof.get_xydata().T
    np.testing.assert_allclose(speed, np.minimum(400, 40 * intensity))
    assert speed[0] < 40
    assert speed[-1] == 400
    assert [text.get_text() for text in ax.get_legend().texts] == ["400 GFLOP/s, 40 GB/s", "decode: 300", "bmm: 30"]


def test_both_draw_where_they_are_told():
    _, (left, right) = matplotlib.pyplot.subplots(1, 2)
    assert heatmap(ROWS, "lane_group", "key_tile", ax=left) is left
    assert roofline([{"op": "decode", "gflops": 1.0, "gbps": 1.0}], "op", yardstick=MACHINE, ax=right) is right


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: heatmap([], "lane_group", "key_tile"), "rows: expected at least one measurement, got none"),
        (lambda: heatmap(ROWS, "lanes", "key_tile"), "rows: expected a value of 'lanes' in each, got {'key_tile'"),
        (lambda: heatmap(ROWS[2:], "lane_group", "key_tile"), "a value of 'fraction' in one at least, got none"),
        (lambda: roofline([{"op": "decode", "gflops": 1.0}], "op", yardstick=MACHINE), "a value of 'gbps' in each"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'numba-mla\[lab\]'"):
        heatmap(ROWS, "lane_group", "key_tile")
