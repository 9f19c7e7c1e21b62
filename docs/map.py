"""docs/map.md: every file of epl with its first sentence, `python docs/map.py` (part of `make docs`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TOP = """\
# Map

<!-- Written by `make docs` from the first sentence of each file. Do not edit by hand. -->

Every file of `epl/`, by room. Which question leads to which file: [CONTRIBUTING](../CONTRIBUTING.md).
"""


def page() -> str:
    """The page, as it should be."""
    return "\n".join([_TOP, *_rooms(ROOT / "epl")])


def _rooms(folder: Path) -> Iterator[str]:
    """A folder as a section, then the folders in it."""
    yield f"## {folder.relative_to(ROOT)}\n\n{_says(folder / '__init__.py')}\n"
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if files:
        rows = [f"| [{path.name}](../{path.relative_to(ROOT)}) | {_says(path)} |" for path in files]
        yield "\n".join(["| file | |", "|---|---|", *rows]) + "\n"
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").exists():
            yield from _rooms(inner)


def _says(path: Path) -> str:
    """The first sentence of a file."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0].replace("|", r"\|")


if __name__ == "__main__":
    (ROOT / "docs/map.md").write_text(page(), encoding="utf-8")
