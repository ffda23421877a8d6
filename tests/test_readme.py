"""The README: its Python runs as it stands, and its commands are those that CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_python_blocks_run_one_after_another(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks("python")
    assert len(blocks) >= 8
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


@pytest.mark.parametrize("name", ["decode", "extend", "merge_states", "write_cache", "gather_cache", "bmm",
                                  "expand_block_table", "MLALayer"])  # fmt: skip
def test_every_operation_has_a_quickstart(name):
    assert any(f"mla.{name}" in block for block in code_blocks("python"))


def test_ci_runs_the_readme_s_own_commands():
    """CI takes each set-up command from the README by a pattern: each must find one whole code block."""
    patterns = re.findall(r"readme_command '(.*)'", (ROOT / ".ci" / "run").read_text())
    assert len(patterns) == 2
    for pattern in patterns:
        lines = [line for line in README.splitlines() if re.search(pattern, line)]
        assert len(lines) == 1
        assert f"{lines[0]}\n" in code_blocks("bash")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file()
