"""Parts of epl used alone, each on several ranks."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

from .commands import EXAMPLES, TORCHRUN, output, printed_by

STANDALONE = EXAMPLES / "standalone"


def run_on(ranks: int, script: str) -> list[str]:
    """What a script prints, by rank."""
    return run_ranks(printed_by, ranks, str(STANDALONE / script))


def test_topology() -> None:
    first, *others = run_on(4, "topology.py")
    groups = ["pipe, ranks: [0, 2]", "pipe, ranks: [1, 3]", "data, ranks: [0, 1]", "data, ranks: [2, 3]"]
    for group in groups:
        assert f"group {group}\n" in first
        assert f"group {group}: ok" in first
    assert "WRONG" not in first
    last_lines = [first.splitlines()[-1], *(text.strip() for text in others)]
    assert last_lines == [
        "rank 0: stage 0 of 2, next stage on rank 2, sum over data 1, batch from rank 0",
        "rank 1: stage 0 of 2, next stage on rank 3, sum over data 1, batch from rank 1",
        "rank 2: stage 1 of 2, next stage on rank 0, sum over data 5, batch from rank 0",
        "rank 3: stage 1 of 2, next stage on rank 1, sum over data 5, batch from rank 1",
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_reducer_gives_the_loss_of_one_rank(ranks: int) -> None:
    alone = run_on(1, "reducer.py")[0].partition(": ")[2]
    assert run_on(ranks, "reducer.py") == [f"rank {rank}: {alone}" for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_gives_the_gradient_of_one_rank(ranks: int) -> None:
    for rank, line in enumerate(run_on(ranks, "clipping.py")):
        norm = line.partition("norm ")[2].partition(",")[0]
        assert line == f"rank {rank}: norm {norm}, of one process {norm}; the same gradient: True\n"
        assert float(norm) > 1


def test_clipping_under_torchrun() -> None:
    shown = output(*TORCHRUN, "--nproc_per_node", "2", "--standalone", "clipping.py", folder=STANDALONE)
    assert shown.count("the same gradient: True") == 2


@pytest.mark.parametrize("script", ["topology.py", "reducer.py", "clipping.py"])
def test_uses_one_part_only(script: str) -> None:
    text = (STANDALONE / script).read_text()
    assert "epl.init" not in text
    assert "parallelize" not in text
