"""The stored notebooks: executed in order, without a warning, an error or a path of somebody's machine.

That they run is tested by pytest itself, at small sizes: it collects ``notebooks/*.ipynb``.
"""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
NAMES = ["01_quickstart", "02_how_decode_is_tiled", "03_roofline", "04_amx_without_amx", "05_fp8_caches",
         "06_write_your_own"]  # fmt: skip
MOST_SECONDS = 120


def cells(path, kind="code"):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_every_notebook_is_there_and_listed():
    assert [path.stem for path in NOTEBOOKS] == NAMES
    readme = (NOTEBOOKS[0].parent / "README.md").read_text()
    assert re.findall(r"\((\w+)\.ipynb\)", readme) == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_in_order_and_clean(path):
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output.get("text")
            text = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
            assert "Warning" not in text
            assert not re.search(r"/(work|root|home|tmp|Users)/", text), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_are_stored_and_followed_by_what_they_show(path):
    """Each picture has its sentence: the text cell after it begins with what is to be seen."""
    everything = json.loads(path.read_text())["cells"]
    for cell, after in zip(everything, [*everything[1:], None], strict=True):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert after is not None
            assert after["cell_type"] == "markdown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_ran_in_less_than_two_minutes(path):
    """As it was executed when its outputs were stored."""
    assert json.loads(path.read_text())["metadata"]["seconds"] <= MOST_SECONDS
