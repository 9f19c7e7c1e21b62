"""What benchmarks/lib makes of numbers, on made-up ones; and that every benchmark answers. No clock runs here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.measure import slowest
from benchmarks.lib.ratio import Ratio, median_interval, paired_difference, paired_ratio
from benchmarks.lib.report import Bar, Row, Section, finish, markdown, write

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def test_interval_holds_the_true_median_as_often_as_promised() -> None:
    draw = random.Random(0)
    trials, held = 400, 0
    for _ in range(trials):
        low, high = median_interval([draw.lognormvariate(0.0, 0.5) for _ in range(15)])
        held += low <= 1.0 <= high
    assert 0.93 <= held / trials < 1.0


@pytest.mark.parametrize(
    ("count", "left_out"),
    [(1, 0), (2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (40, 13)],
)
def test_interval_leaves_out_as_many_as_the_binomial_law_allows(count: int, left_out: int) -> None:
    values = [float(n) for n in range(count)]
    random.Random(1).shuffle(values)
    assert median_interval(values) == (left_out, count - 1 - left_out)


def test_what_slows_both_down_cancels_out() -> None:
    draw = random.Random(2)
    busy = [draw.uniform(1, 5) for _ in range(41)]
    ratio = paired_ratio([1.1 * b * draw.gauss(1, 0.01) for b in busy], busy)
    assert ratio.low < 1.1 < ratio.high
    assert ratio.high - ratio.low < 0.02
    assert ratio.pairs == 41


def test_differences_are_taken_pair_by_pair() -> None:
    found = paired_difference([11.0, 31.0, 22.0], [10.0, 30.0, 20.0])
    assert (found.value, found.low, found.high, found.pairs) == (1.0, 1.0, 2.0, 3)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


def test_the_slowest_rank_counts() -> None:
    assert slowest([{"a": [1.0, 4.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 4.0]}


def test_a_bar_is_short_only_beyond_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = Bar("time_a", Ratio(1.05, 0.99, 1.2, 8), 1.03)
    sure = Bar("time_b", Ratio(1.05, 1.04, 1.2, 8), 1.03)
    assert finish([noisy]) == 0
    assert finish([noisy, sure]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "bar time_a 1.050 1.030 ok",
        "bar time_b 1.050 1.030 short",
    ]


def test_few_pairs_are_no_proof() -> None:
    assert Bar("a", Ratio(1.5, 1.4, 1.6, 6), 1.03).short
    assert not Bar("a", Ratio(1.5, 1.4, 1.6, 5), 1.03).short


SECTION = Section(
    "Times",
    ("bar", "ours / theirs"),
    [Row("a", Ratio(1.0, 0.9, 1.1, 7), "2 ms / 2 ms", 1.03), Row("b", Ratio(2, 1, 3, 2), "")],
)


def test_table_has_a_line_for_every_row() -> None:
    lines = markdown("Title", ["note"], [SECTION]).splitlines()
    assert lines[0] == "# Title"
    assert "note" in lines
    assert "| a | 1.000 | 0.900 – 1.100 | 7 | 1.03 | 2 ms / 2 ms |" in lines
    assert "| b | 2.000 | 1.000 – 3.000 | 2 |  |  |" in lines


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        write("x", "Title", [], [SECTION, SECTION], folder=tmp_path / name)
    assert (tmp_path / "one/x.svg").read_bytes() == (tmp_path / "two/x.svg").read_bytes()
    assert "![plot](x.svg)" in (tmp_path / "one/x.md").read_text()


def test_there_are_benchmarks() -> None:
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_has_a_quick_form(script: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(script), "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "--quick" in result.stdout
