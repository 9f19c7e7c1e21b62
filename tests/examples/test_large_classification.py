"""The large-classification example, tiny: how much a user writes, what it trains on, and that it gives one device's numbers."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import RankFailure, run_ranks

from .commands import EXAMPLES, LAUNCH, output, printed_by

FOLDER = EXAMPLES / "large_classification"
NAMES = ("images", "margin", "options", "resnet")
TINY = (
    "--num_classes",
    "51",
    "--shown",
    "8",
    "--image_size",
    "16",
    "--batch_size",
    "8",
    "--lr",
    "0.02",
    "--steps",
    "4",
)
LINE = re.compile(r"step (\d+)/(\d+)  loss (\S+)")
END = re.compile(r"Train Finished\. Held-out accuracy \S+% \((\d+) of (\d+) images\)\.")


def words(path: Path) -> list[str]:
    """The lines of a file, white space aside."""
    return [" ".join(line.split()) for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize(("script", "most"), [("train.py", 5), ("train_dp.py", 4)])
def test_few_lines_are_added_and_none_removed(script: str, most: int) -> None:
    changes = [line for line in difflib.ndiff(words(FOLDER / "plain.py"), words(FOLDER / script)) if line[0] in "+-"]
    assert [line for line in changes if line.startswith("-")] == []
    assert len(changes) == most
    assert all("epl" in line for line in changes)


@pytest.mark.parametrize("name", NAMES)
def test_the_rest_knows_nothing_of_epl(name: str) -> None:
    assert "epl" not in (FOLDER / f"{name}.py").read_text()


# Running it


def printed(script: str, *options: str) -> str:
    """What a script of the example prints when this very process runs it; for `run_ranks`."""
    sys.argv = [script, *options]
    sys.path.insert(0, str(FOLDER))
    return printed_by(str(FOLDER / script))


def result(text: str) -> tuple[list[float], int, int]:
    """The losses of every step, images recognised and images seen, after a look at the lines."""
    *steps, last = text.splitlines()
    found = [LINE.fullmatch(line) for line in steps]
    assert [match and match[1] for match in found] == [str(n) for n in range(1, len(steps) + 1)], text
    end = END.fullmatch(last)
    assert end, text
    return [float(match[3]) for match in found if match], int(end[1]), int(end[2])


def check_together(texts: list[str], expected: tuple[list[float], int, int]) -> None:
    """Ranks report the images they saw themselves: losses average, images add up, to the numbers of one device."""
    ranks = [result(text) for text in texts]
    together = [sum(losses) / len(ranks) for losses in zip(*(losses for losses, _, _ in ranks), strict=True)]
    assert together == pytest.approx(expected[0], abs=1e-5 * (1 + max(expected[0])))
    assert (sum(right for _, right, _ in ranks), sum(seen for _, _, seen in ranks)) == expected[1:]
    assert len({tuple(losses) for losses, _, _ in ranks}) == len(ranks)


@pytest.fixture(scope="module", params=["linear", "margin"])
def head(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--margin",) if request.param == "margin" else ()


@pytest.fixture(scope="module")
def expected(head: tuple[str, ...]) -> tuple[list[float], int, int]:
    """What one device prints, without epl."""
    found = result(run_ranks(printed, 1, "plain.py", *TINY, *head)[0])
    assert len(set(found[0])) == 4
    assert found[2] == 16
    return found


def test_plain_python_gives_what_the_plain_script_gives(head: tuple[str, ...], expected) -> None:
    for script in ("train.py", "train_dp.py"):
        assert result(run_ranks(printed, 1, script, *TINY, *head)[0]) == expected


def test_data_parallel_ranks_equal_one_device(head: tuple[str, ...], expected) -> None:
    check_together(run_ranks(printed, 2, "train_dp.py", *TINY, *head), expected)


def test_split_ranks_equal_one_device(head: tuple[str, ...], expected) -> None:
    check_together(run_ranks(printed, 2, "train.py", *TINY, *head), expected)  # 26 and 25 of the 51 classes


@pytest.mark.full
def test_four_split_ranks_equal_one_device(head: tuple[str, ...], expected) -> None:
    check_together(run_ranks(printed, 4, "train.py", *TINY, *head), expected)


@pytest.mark.parametrize("script", ["train_split.sh", "train_dp.sh"])
def test_two_workers_of_the_launcher_equal_one_device(tmp_path: Path, script: str) -> None:
    launch = (*LAUNCH, "--num_workers", "2", "--gpu_per_worker", "1", "--log_dir", tmp_path)
    shown = output(*launch, f"scripts/{script}", *TINY, folder=FOLDER)
    texts = [(tmp_path / f"attempt_0/rank_{rank}/stdout.log").read_text() for rank in (0, 1)]
    assert shown.strip() == texts[0].strip(), "the launcher shows rank 0"
    check_together(texts, result(run_ranks(printed, 1, "plain.py", *TINY)[0]))


@pytest.mark.parametrize("options", [(), ("--margin",)])
def test_it_learns(options: tuple[str, ...]) -> None:
    small = (
        "--num_classes",
        "1000",
        "--shown",
        "8",
        "--image_size",
        "16",
        "--batch_size",
        "24",
        "--steps",
        "20",
        "--lr",
        "0.05",
    )
    losses, right, seen = result(run_ranks(printed, 1, "train.py", *small, *options)[0])
    assert losses[-1] < 0.3 * losses[0]
    assert right > 0.6 * seen


# The pieces


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The files of the example, imported as its scripts import them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        del sys.modules[name]


def shapes_on_meta() -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Parameters and features of each backbone, and the shape of two images' features; without computing anything."""
    sys.path.insert(0, str(FOLDER))
    backbones = importlib.import_module("resnet").BACKBONES
    with torch.device("meta"):
        built = {name: make() for name, make in backbones.items()}
        return {
            name: (sum(p.numel() for p in m.parameters()), m.features, tuple(m(torch.empty(2, 3, 64, 64)).shape))
            for name, m in built.items()
        }


def test_the_backbones_have_their_sizes() -> None:
    # In a process of its own: torch's meta device imports what sets variables in the environment.
    (found,) = run_ranks(shapes_on_meta, 1)
    assert found == {"resnet50": (23_508_032, 2048, (2, 2048)), "small": (128_392, 256, (2, 256))}


def test_made_up_labels_are_spread_over_all_classes(example: SimpleNamespace) -> None:
    images = example.images.SyntheticImages(12, 1_000_000, 4, shown=4)
    assert [images[n][1] for n in range(5)] == [0, 250_000, 500_000, 750_000, 0]
    assert torch.equal(images[3][0], example.images.SyntheticImages(12, 1_000_000, 4, shown=4)[3][0])
    assert not torch.equal(images[0][0], images[4][0])
    assert [label for _, label in (example.images.SyntheticImages(4, 2, 4, shown=9)[n] for n in range(4))] == [
        0,
        1,
        0,
        1,
    ]


def test_the_margin_widens_the_angle_to_the_right_class(example: SimpleNamespace) -> None:
    head = example.margin.MarginHead(8, 5, scale=2.0, margin=0.3).double()
    features, labels = torch.randn(3, 8, dtype=torch.float64), torch.tensor([4, 0, 4])
    with torch.no_grad():
        usual, widened = head(features) / 2, head(features, labels) / 2
    assert (widened.acos() - usual.acos()).gather(1, labels[:, None]).flatten().tolist() == pytest.approx([0.3] * 3)
    elsewhere = torch.ones(3, 5, dtype=torch.bool).scatter(1, labels[:, None], False)
    assert torch.equal(widened[elsewhere], usual[elsewhere])
    directions = torch.nn.functional.normalize(head.weight)
    assert torch.allclose(usual, torch.nn.functional.normalize(features) @ directions.T)


def test_reads_a_folder_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, colour in (("blue", (0, 0, 255)), ("green", (0, 255, 0)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        for number in range(10):
            image.new("RGB", (20, 12), colour).save(tmp_path / label / f"{number}.png")
    small = ("--data", str(tmp_path), "--image_size", "16", "--batch_size", "6", "--steps", "3", "--num_classes", "9")
    _, _, seen = result(run_ranks(printed, 1, "train.py", *small)[0])
    assert seen == 3


def test_says_what_is_missing(tmp_path: Path, example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="one sub-folder of images per class, found none"):
        example.images.ImageFolder(tmp_path, 8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match="pip install Pillow"):
        example.images.ImageFolder(tmp_path, 8)
    with pytest.raises(RankFailure, match="5 images do not fill one batch"):
        run_ranks(printed, 1, "plain.py", "--images", "5")
