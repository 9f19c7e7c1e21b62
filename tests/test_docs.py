"""Every ```python and ```bash block of the READMEs and of docs/ is run.

python   the blocks of a page, top to bottom, in one process and one namespace: a page reads like one session. A page runs
         on one rank, then on two, so what it shows about several ranks is true as well.
bash     each block in a folder that holds examples/ and the files that the page names; a block that stands on several pages
         runs once. `epl-launch`, `python` and `torchrun` are those of the interpreter that runs the tests.

    <!-- file: train.py -->        the next block is also written to that file, for the bash blocks of its page
    <!-- not run: why -->          the next block is only shown
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT, run_ranks

PAGES = [ROOT / "README.md", ROOT / "README_zh.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>file|not run): (?P<what>[^\n]*?) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {"epl-launch": "-m epl.launch", "python": "", "torchrun": "-m torch.distributed.run"}
LAUNCHER_VARIABLES = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|TORCHELASTIC_")


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    mark: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text[: m.start("code")].count("\n"), m["language"], m["code"], m["mark"], (m["what"] or "").strip())
        for m in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = {page.name: [b for b in blocks_of(page) if b.language == "python" and b.mark != "not run"] for page in PAGES}
SHELL = list({b.code: b for b in BLOCKS if b.language == "bash" and b.mark != "not run"}.values())


def run_page(blocks: list[Block], folder: str) -> str:
    """Run the blocks of a page as one program without a launcher, or as a rank of two; what it printed."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in [name for name in os.environ if LAUNCHER_VARIABLES.match(name)]:
            del os.environ[name]
    own = tempfile.mkdtemp(dir=folder)
    os.chdir(own)
    namespace: dict[str, object] = {"__name__": "__main__"}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in blocks:
            # Line numbers of a traceback are those of the page.
            exec(compile("\n" * block.line + block.code, str(ROOT / block.page), "exec"), namespace)
    return out.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("page", [name for name, blocks in PYTHON.items() if blocks])
def test_python(page: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(run_page, ranks, PYTHON[page], str(tmp_path), timeout=100)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the commands that an installed epl has."""
    folder = tmp_path_factory.mktemp("programs")
    for name, arguments in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_bash(block: Block, tmp_path: Path, programs: Path) -> None:
    sandbox = tmp_path / "sandbox"
    shutil.copytree(ROOT / "examples", sandbox / "examples")
    for other in BLOCKS:
        if other.page == block.page and other.mark == "file":
            (sandbox / other.what).write_text(other.code)
    environment = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)} | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=sandbox,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, f"{block}\n{block.code}\n{ended.stdout}\n{ended.stderr}"


def commands(code: str) -> Iterator[str]:
    """The first word of every command in a bash block."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words[0]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_only_what_cannot_run_here_is_left_out(block: Block) -> None:
    runnable = set(commands(block.code)) <= {*PROGRAMS, "diff"}
    several_machines = "--machine_list" in block.code
    if block.mark == "not run":
        assert len(block.what.split()) >= 3, f"{block}: say why it is not run"
        assert not runnable or several_machines, f"{block}: this can be run"
    else:
        assert runnable, f"{block}: put <!-- not run: the reason --> before it"


def test_every_mark_belongs_to_a_block() -> None:
    for page in PAGES:
        marks = re.findall(r"<!-- (?:file|not run):", page.read_text())
        assert len(marks) == sum(block.mark is not None for block in blocks_of(page)), page.name
        assert all(block.language in ("python", "bash", "") for block in blocks_of(page) if block.mark), page.name


def test_python_that_is_not_run_says_why() -> None:
    left_out = [b for b in BLOCKS if b.language == "python" and b.mark == "not run"]
    assert [str(b) for b in left_out if len(b.what.split()) < 3] == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not re.match(r"\w+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_readmes_lead_to_each_other_and_show_the_same() -> None:
    english, chinese = (ROOT / "README.md").read_text(), (ROOT / "README_zh.md").read_text()
    assert "(README_zh.md)" in english
    assert "(README.md)" in chinese
    code = {name: [b.code for b in BLOCKS if b.page == name and b.language] for name in ("README.md", "README_zh.md")}
    assert code["README.md"] == code["README_zh.md"]


def test_the_readme_adds_four_lines() -> None:
    (script,) = (b.code for b in BLOCKS if b.page == "README.md" and b.what == "train.py")
    added = [line for line in script.splitlines() if "epl" in line]
    assert len(added) == 4
    assert all(line.endswith("  # added") for line in added)
    assert script.count("# added") == 4
