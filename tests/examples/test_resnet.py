"""The ResNet example, narrow: the shape of the model, two workers of the launcher, and a folder of real images."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import run_ranks

from .commands import EXAMPLES, LAUNCH, output, run

RESNET = EXAMPLES / "resnet"


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`images.py`, imported as train.py imports it."""
    monkeypatch.syspath_prepend(str(RESNET))
    monkeypatch.delitem(sys.modules, "images", raising=False)
    return importlib.import_module("images")


def shape_on_meta() -> tuple[int, int, tuple[int, ...]]:
    """Parameters, 3×3 and 7×7 convolutions, and the shape of the scores of two images; without computing anything."""
    model_class = runpy.run_path(str(RESNET / "resnet.py"))["ResNet"]
    with torch.device("meta"):
        model = model_class()
        scores = model(torch.empty(2, 3, 224, 224))
    wide = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size != (1, 1)]
    return sum(p.numel() for p in model.parameters()), len(wide), tuple(scores.shape)


def test_has_the_size_of_resnet_50() -> None:
    # In a process of its own: torch's meta device imports what sets variables in the environment.
    assert run_ranks(shape_on_meta, 1) == [(25_557_032, 1 + 16, (2, 1000))]


def test_two_workers_train_and_report_once(tmp_path: Path) -> None:
    options = ("--num_workers", "2", "--gpu_per_worker", "1", "--log_dir", tmp_path)
    small = ("--width", "4", "--steps", "3", "--batch_size", "4", "--image_size", "16", "--classes", "5")
    shown = output(*LAUNCH, *options, "scripts/train_dp.sh", *small, folder=RESNET)
    lines = shown.splitlines()
    assert [re.sub(r" loss \S+ .*", "", line) for line in lines[:-1]] == [f"step {n}/3 " for n in (1, 2, 3)]
    # 25 held-out images over two ranks: an uneven tail, and no image is counted twice.
    assert re.fullmatch(r"Train Finished\. 3 steps, held-out accuracy \S+% \(\d+ of 25 images\)\.", lines[-1])
    assert (tmp_path / "attempt_0/rank_1/stdout.log").read_text() == ""


def test_reads_a_folder_of_images(tmp_path: Path, images: ModuleType) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        for number in range(10):
            image.new("RGB", (20, 12), colour).save(tmp_path / label / f"{number}.png")
    (tmp_path / "red/notes.txt").write_text("not an image")

    folder = images.ImageFolder(tmp_path, 8)
    pixels, label = folder[0]
    assert (len(folder), folder.classes, label) == (18, ["blue", "red"], 0)
    assert pixels[:, 0, 0].tolist() == [-1, -1, 1]
    assert len(images.ImageFolder(tmp_path, 8, held_out=True)) == 2

    small = ("--width", "4", "--batch_size", "4", "--image_size", "16", "--epochs", "2")
    shown = output(sys.executable, "train.py", "--data", tmp_path, *small, folder=RESNET)
    assert "step 8/8" in shown
    assert "of 2 images" in shown


def test_says_what_is_missing(tmp_path: Path, images: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="one sub-folder of images per class, found none"):
        images.ImageFolder(tmp_path, 8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match="pip install Pillow"):
        images.ImageFolder(tmp_path, 8)
    ended = run(sys.executable, "train.py", "--images", "5", "--batch_size", "8", folder=RESNET)
    assert ended.returncode == 1
    assert "5 images do not fill one global batch" in ended.stderr
