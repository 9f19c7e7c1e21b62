"""The package as others get it: its metadata, its chores, and the boundaries that CONTRIBUTING.md draws."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "epl").rglob("*.py"))
PACKAGES = sorted({path.parent.relative_to(ROOT) for path in SOURCES})
TARGETS = ("help", "setup", "demo", "test", "test-full", "lint", "format", "bench", "docs", "clean")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_git = pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")


def test_is_called_pyepl_and_pins_torch_exactly() -> None:
    assert PYPROJECT["project"]["name"] == "pyepl"
    # A looser pin would take whatever torch is newest, with gigabytes of CUDA packages, and break epl/_torch.py.
    assert [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("torch")] == ["torch==2.13.0"]


def test_version_is_the_same_inside() -> None:
    assert importlib.import_module("epl").__version__ == PYPROJECT["project"]["version"]


def test_installed_metadata_agrees_with_pyproject() -> None:
    try:
        installed = importlib.metadata.metadata("pyepl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pyepl is not installed (make setup)")
    assert installed["Version"] == PYPROJECT["project"]["version"], "installed from older sources: make setup"
    assert installed["Requires-Python"] == PYPROJECT["project"]["requires-python"]
    assert installed["License-Expression"] == "Apache-2.0"


def test_commands_lead_to_functions() -> None:
    scripts: dict[str, str] = PYPROJECT["project"]["scripts"]
    assert "epl-launch" in scripts
    for entry in scripts.values():
        module, name = entry.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("folder", PACKAGES, ids=str)
def test_every_folder_with_sources_is_a_package(folder: Path) -> None:
    """A folder without __init__.py works in a checkout and is missing from `pip install .`."""
    assert (ROOT / folder / "__init__.py").exists()
    importlib.import_module(".".join(folder.parts))


def test_types_are_shipped() -> None:
    assert (ROOT / "epl/py.typed").exists()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["epl"]


def make(*arguments: str, folder: Path = ROOT, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))
    }
    environment["PATH"] = path or os.environ["PATH"]
    command = [shutil.which("make") or "make", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@needs_make
def test_make_alone_lists_every_target() -> None:
    listed = re.findall(r"^  make (\S+) +\S", make().stdout, flags=re.MULTILINE)
    assert listed == list(TARGETS)


@needs_make
@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("test", ["ruff check", "ruff format --check", "mypy", "OMP_NUM_THREADS=1 python -m pytest --numprocesses 2"]),
        ("test-full", ["ruff check", "ruff format --check", "mypy", '-m "full or not full"']),
        ("demo", ["epl-launch --num_workers 1 --gpu_per_worker 2"]),
        ("docs", ["python -m epl.config.reference docs/config.md"]),
    ],
)
def test_chores_do_their_steps_in_order(target: str, steps: list[str]) -> None:
    shown = make("--dry-run", target).stdout
    places = [shown.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


FAKE_PYTHON = """#!/bin/sh
[ "$1" = --version ] && {{ echo Python {version}; exit 0; }}
case "$2" in *version_info*) exit {old} ;; *ensurepip*) exit 1 ;; esac
"""


@needs_make
@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({}, "Missing: Python 3.11 or later. Found: python3.11 (none) python3 (none)."),
        ({"python3": ("3.9.2", 1)}, "Missing: Python 3.11 or later. Found: python3.11 (none) python3 (Python 3.9.2)."),
        ({"python3": ("3.11.2", 0)}, "Missing: python3-venv, the package with which python3 makes"),
    ],
    ids=["no python", "old python", "no venv package"],
)
def test_setup_names_what_is_missing(pythons: dict[str, tuple[str, int]], expected: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, (version, old) in pythons.items():
        (programs / name).write_text(FAKE_PYTHON.format(version=version, old=old))
        (programs / name).chmod(0o755)

    result = make("setup", folder=tmp_path, path=str(programs))

    assert result.returncode != 0
    assert expected in result.stderr
    assert "apt install" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_developers_run() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert lines[-1] == "make test"


def test_contributing_points_at_files_that_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")[1]
    paths = re.findall(r"`((?:epl|tests|docs)/[^`]*)`", table)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


@needs_git
def test_no_paths_of_one_machine_in_tracked_files() -> None:
    pattern = r"(^|[^A-Za-z0-9_.])/(work|farm|root)/"
    found = subprocess.run(["git", "grep", "-nIE", pattern], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode in (0, 1), found.stderr
    assert found.stdout == ""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each imported thing with its full dotted name, and the name it is bound to here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def private_torch_names(source: str) -> list[str]:
    """Underscored names that `source` imports from torch, or reaches through a name imported from there."""
    tree = ast.parse(source)
    torch_imports = [(full, bound) for full, bound in imported_names(tree) if full.partition(".")[0] == "torch"]
    reached = {bound for _, bound in torch_imports}
    chains = {full for full, _ in torch_imports}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if re.fullmatch(r"\w+(\.\w+)*", chain) and chain.partition(".")[0] in reached:
                chains.add(chain)
    return sorted(c for c in chains if any(re.match("_(?!_)", part) for part in c.split(".")))


def test_private_torch_names_are_seen() -> None:
    """The check below would pass on anything if it saw nothing."""
    source = "import torch\nfrom torch import distributed as dist, _C\nfrom torch.utils._pytree import tree_map\n"
    source += "torch._foreach_norm([])\ndist._x.y\ntorch.__version__\nself._mine"
    assert private_torch_names(source) == ["dist._x", "dist._x.y", "torch._C", "torch._foreach_norm"] + [
        "torch.utils._pytree.tree_map"
    ]


def test_private_torch_names_stay_in_one_file() -> None:
    paths = [*SOURCES, *sorted((ROOT / "examples").rglob("*.py"))]
    found = {relative(p): names for p in paths if (names := private_torch_names(p.read_text()))}
    assert set(found) <= {"epl/_torch.py"}, "ask epl/_torch.py for a function that says why it is needed"


@pytest.mark.parametrize("room", ["plan", "graph"])
def test_decisions_know_nothing_of_processes(room: str) -> None:
    paths = sorted((ROOT / "epl" / room).rglob("*.py"))
    assert paths
    mention = re.compile(r"torch\.distributed|\bdist\.|from torch import .*\bdistributed\b")
    assert [relative(p) for p in paths if mention.search(p.read_text())] == []


@pytest.mark.parametrize("room", ["config", "graph", "plan", "cluster"])
def test_dependencies_point_downwards(room: str) -> None:
    upper = {"env", "parallel", "memory", "train", "data", "checkpoint"}
    climbs = [
        f"{relative(path)} imports {full}"
        for path in sorted((ROOT / "epl" / room).rglob("*.py"))
        for full, _ in imported_names(ast.parse(path.read_text()))
        if full.startswith("epl.") and full.split(".")[1] in upper
    ]
    assert climbs == []
