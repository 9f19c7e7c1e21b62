"""The quick start: how much a user writes, and that it runs in every way with the numbers of one device."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import pytest

from tests.harness import run_ranks

from .commands import EXAMPLES, LAUNCH, TORCHRUN, output, printed_by

QUICKSTART = EXAMPLES / "quickstart"
LINE = re.compile(r"^Iteration (\d+) , Loss: (\S+) \.$", re.MULTILINE)


def words(path: Path) -> list[str]:
    """The lines of a file, white space aside."""
    return [" ".join(line.split()) for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize(("script", "most"), [("local_model.py", 4), ("pipeline.py", 5)])
def test_few_lines_are_added_and_none_removed(script: str, most: int) -> None:
    changes = [
        line for line in difflib.ndiff(words(QUICKSTART / "plain.py"), words(QUICKSTART / script)) if line[0] in "+-"
    ]
    added = [line for line in changes if line.startswith("+")]
    assert len(added) <= most
    assert [line for line in changes if line.startswith("-")] == []
    assert len([line for line in added if "epl" in line]) == len(added)


def losses(printed: str) -> list[float]:
    """The losses of one rank, after a look at its lines."""
    found = LINE.findall(printed)
    assert [int(step) for step, _ in found] == list(range(1, 11))
    assert [line for line in printed.splitlines() if not LINE.match(line)] == ["Train Finished."]
    return [float(loss) for _, loss in found]


def plain_losses(tmp_path: Path, batch_size: int) -> list[float]:
    """What one device prints with this batch size."""
    script = tmp_path / "plain.py"
    text = (QUICKSTART / "plain.py").read_text()
    assert text.count("batch_size=10") == 1
    script.write_text(text.replace("batch_size=10", f"batch_size={batch_size}"))
    return losses(run_ranks(printed_by, 1, str(script))[0])


def test_plain_python_gives_what_the_plain_script_gives(tmp_path: Path) -> None:
    printed = output(sys.executable, "local_model.py", folder=QUICKSTART)
    assert losses(printed) == plain_losses(tmp_path, 10)


def test_two_ranks_of_the_launcher_learn_from_one_global_batch(tmp_path: Path) -> None:
    options = ("--num_workers", "1", "--gpu_per_worker", "2", "--log_dir", tmp_path / "logs")
    shown = output(*LAUNCH, *options, QUICKSTART / "run.sh", folder=tmp_path)
    ranks = [losses((tmp_path / f"logs/attempt_0/rank_{rank}/stdout.log").read_text()) for rank in (0, 1)]
    assert losses(shown) == ranks[0], "the launcher shows rank 0"
    # Each rank prints the loss of its own 10 rows; together they are the 20 rows of one device's batch.
    together = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
    assert together == pytest.approx(plain_losses(tmp_path, 20), rel=1e-5)
    assert ranks[0] != ranks[1]


def test_torchrun_runs_the_same_script(tmp_path: Path) -> None:
    options = ("--nproc_per_node", "2", "--standalone", "--redirects", "3", "--log_dir", tmp_path)
    output(*TORCHRUN, *options, "local_model.py", folder=QUICKSTART)
    printed = [losses(path.read_text()) for path in sorted(tmp_path.rglob("stdout.log"))]
    assert len(printed) == 2
    assert printed[0] != printed[1]


def test_two_stages_give_what_the_plain_script_gives(tmp_path: Path) -> None:
    expected = plain_losses(tmp_path, 50)  # five micro batches of 10 rows
    for printed in run_ranks(printed_by, 2, str(QUICKSTART / "pipeline.py")):
        assert losses(printed) == pytest.approx(expected, rel=1e-5)
    assert losses(output(sys.executable, "pipeline.py", folder=QUICKSTART)) == pytest.approx(expected, rel=1e-5)
