"""docs/map.md is what the sources say of themselves today, and the packages' own maps name files that are there."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.harness import ROOT

PACKAGES = sorted((ROOT / "epl").rglob("__init__.py"))


def test_the_map_is_fresh_and_every_file_says_what_it_is() -> None:
    made = runpy.run_path(str(ROOT / "docs/map.py"))["page"]()
    assert (ROOT / "docs/map.md").read_text(encoding="utf-8") == made, "stale: run `make docs`, or python docs/map.py"
    assert [path for path in (ROOT / "epl").rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_packages_name_files_that_exist(path: Path) -> None:
    # The map of train/cut told of a placing.py, long after that had become placer.py.
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    named = re.findall(r"(?<![/\w])(\w+)\.py\b", text)
    assert [name for name in named if not (path.parent / f"{name}.py").exists()] == []
