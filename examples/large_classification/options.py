"""The options that all scripts of this folder take, and the images they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path

from images import ImageFolder, Sample, SyntheticImages
from resnet import BACKBONES
from torch.utils.data import Dataset


def parse(description: str | None) -> argparse.Namespace:
    """The options; `num_classes` is that of the images, where a folder of them is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, help="a folder with one sub-folder of images per class")
    parser.add_argument("--num_classes", type=int, default=10_000, help="of the made-up images")
    parser.add_argument("--images", type=int, default=512, help="how many to make up")
    parser.add_argument("--shown", type=int, default=32, help="how many of the classes the made-up images show")
    parser.add_argument("--image_size", type=int, default=32, help="height and width; 224 for real images")
    parser.add_argument("--backbone", choices=sorted(BACKBONES), default="small")
    parser.add_argument("--margin", action="store_true", help="a classification layer with an angular margin (ArcFace)")
    parser.add_argument("--batch_size", type=int, default=32, help="images of all devices in one step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each device")
    options = parser.parse_args()
    if options.data is not None:
        options.num_classes = len(ImageFolder(options.data, options.image_size).classes)
    return options


def open_images(options: argparse.Namespace) -> tuple[Dataset[Sample], Dataset[Sample]]:
    """The images to learn from and those that are held out."""
    size = options.image_size
    if options.data is not None:
        images: Dataset[Sample] = ImageFolder(options.data, size)
        held_out: Dataset[Sample] = ImageFolder(options.data, size, held_out=True)
    else:
        images = SyntheticImages(options.images, options.num_classes, size, shown=options.shown)
        held_out = SyntheticImages(2 * options.shown, options.num_classes, size, shown=options.shown, seed=10**6)
    if len(images) < options.batch_size:  # type: ignore[arg-type]
        raise SystemExit(f"{len(images)} images do not fill one batch: more of them, or a smaller --batch_size")  # type: ignore[arg-type]
    return images, held_out
