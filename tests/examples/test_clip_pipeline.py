"""The CLIP example, tiny: 2 and 3 stages of the launcher print the losses of one device over the same micro batches."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import RankFailure, run_ranks

from .commands import EXAMPLES, LAUNCH, output, printed_by

CLIP = EXAMPLES / "clip_pipeline"
TINY = ("--width", "16", "--image_size", "16", "--image_depth", "3", "--text_depth", "1", "--steps", "4")
LINE = re.compile(r"^step (\d+)/4  loss (\S+)$", re.MULTILINE)


def losses(printed: str) -> list[float]:
    """The losses of a run, after a look at its lines."""
    *steps, end = printed.splitlines()
    found = [LINE.fullmatch(line) for line in steps]
    assert [match and match[1] for match in found] == ["1", "2", "3", "4"], printed
    assert re.fullmatch(r"Train Finished\. \d+ of \d+ images find their text\.", end)
    return [float(match[2]) for match in found if match]


def printed(*options: str) -> str:
    """What train.py prints when this very process runs it; for `run_ranks`."""
    sys.argv = ["train.py", *options]
    sys.path.insert(0, str(CLIP))
    return printed_by(str(CLIP / "train.py"))


def plain(*options: str) -> list[float]:
    return losses(run_ranks(printed, 1, "--plain", *TINY, *options)[0])


def launched(ranks: int, logs: Path, *options: str) -> list[float]:
    launch = (*LAUNCH, "--num_workers", "1", "--gpu_per_worker", str(ranks), "--log_dir", logs)
    return losses(output(*launch, "scripts/train_clip.sh", *TINY, *options, folder=CLIP))


def test_two_and_three_stages_equal_one_device(tmp_path: Path) -> None:
    batch = ("--batch_size", "10", "--micro_batches", "4")  # 3, 3, 2 and 2 pairs
    expected = plain(*batch)
    assert len(set(expected)) == 4
    assert launched(2, tmp_path / "two", *batch) == pytest.approx(expected, abs=2e-5)
    trace = tmp_path / "trace.json"
    three = launched(3, tmp_path / "three", "--schedule", "ZeroBubble", "--trace", str(trace), *batch)
    assert three == pytest.approx(expected, abs=2e-5)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1I3", "2W3", "0SF3>1"} <= names
    assert (tmp_path / "three/attempt_0/rank_2/stdout.log").read_text() == "", "rank 0 reports"


def test_two_pipelines_equal_one_device_with_twice_the_batch() -> None:
    ranks = run_ranks(printed, 4, *TINY, "--stages", "2", "--batch_size", "4", "--micro_batches", "2")
    assert ranks[1:] == ["", "", ""]
    assert losses(ranks[0]) == pytest.approx(plain("--batch_size", "8", "--micro_batches", "4"), abs=2e-5)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`clip.py` and `pairs.py`, imported as train.py imports them."""
    monkeypatch.syspath_prepend(str(CLIP))
    for name in ("clip", "pairs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("clip"), importlib.import_module("pairs")


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 9])
def test_every_stage_builds_its_own_pieces_and_no_other(modules, stages: int) -> None:
    clip, _ = modules
    size = clip.Size(width=8, heads=2)
    whole = {name: tuple(p.shape) for name, p in clip.Stage(0, 1, size).named_parameters()}
    built = [clip.Stage(stage, stages, size) for stage in range(stages)]
    assert sum(p.numel() for s in built for p in s.parameters()) == sum(map(_count, whole.values()))
    assert [n for s in range(stages) for n in clip.image_blocks(s, stages, size)] == list(range(size.image_depth))
    assert all((s.text_tower is not None) == (s is built[-1]) for s in built)


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * _count(shape[1:]) if shape else 1


def test_reads_a_folder_of_pairs(modules, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    _, pairs = modules
    for number in range(4):
        image.new("RGB", (20, 12), (0, 0, 60 * number)).save(tmp_path / f"{number}.png")
        if number:
            (tmp_path / f"{number}.txt").write_text(f"blue {number}")
    folder = pairs.PairFolder(tmp_path, 8, 7)
    assert len(folder) == 3
    assert folder.images([0, 2]).shape == (2, 3, 8, 8)
    assert folder.texts([1]).tolist() == [[1 + byte for byte in b"blue 2"] + [0]]


def test_says_what_is_missing(modules, tmp_path: Path) -> None:
    _, pairs = modules
    pytest.importorskip("PIL.Image")
    with pytest.raises(SystemExit, match="expected images with a text beside each"):
        pairs.PairFolder(tmp_path, 8, 7)
    with pytest.raises(RankFailure, match="5 pairs do not fill one global batch of 32"):
        run_ranks(printed, 1, "--plain", "--pairs", "5")
