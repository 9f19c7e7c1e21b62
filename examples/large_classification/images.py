"""What the example trains on: made-up images, or a folder of real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
Sample = tuple[torch.Tensor, int]


class SyntheticImages(Dataset[Sample]):
    """`count` noisy copies of `shown` pictures, whose labels are spread over all classes.

    Everything is made from the index, so it is alike in every process, and a million classes cost nothing.
    """

    def __init__(self, count: int, num_classes: int, size: int, *, shown: int, seed: int = 0) -> None:
        self.count, self.num_classes, self.seed = count, num_classes, seed
        self.pictures = torch.randn(min(shown, num_classes), 3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        number = index % len(self.pictures)
        picture = self.pictures[number]
        noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(self.seed + index))
        return picture + 0.5 * noise, number * self.num_classes // len(self.pictures)


class ImageFolder(Dataset[Sample]):
    """The images in the sub-folders of `root`, one sub-folder per class; every tenth is kept for `held_out`."""

    def __init__(self, root: Path, size: int, *, held_out: bool = False) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit(
                "--data reads image files with Pillow, which is not installed: pip install Pillow"
            ) from None
        self._open = Image.open
        self.size, self.held_out = size, held_out
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not files:
            raise SystemExit(f"--data {root}: expected a folder with one sub-folder of images per class, found none")
        self.files = [file for place, file in enumerate(files) if (place % 10 == 9) == held_out]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        with self._open(path) as file:
            pixels = np.asarray(file.convert("RGB").resize((self.size, self.size)), dtype=np.float32)
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
        mirrored = not self.held_out and bool(torch.rand(()) < 0.5)
        return image.flip(2) if mirrored else image, label
