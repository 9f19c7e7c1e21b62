"""What the example trains on: made-up pairs of an image and a text, or a folder of real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0), "white": (1.0, 1.0, 1.0)}
SHAPES = ("disc", "square", "bar", "ring")
PLACES = ("top", "bottom")


def tokens(text: str, length: int) -> torch.Tensor:
    """The first bytes of a text as numbers, 0 where there are no more."""
    found = [1 + byte for byte in text.encode()[:length]]
    return torch.tensor(found + [0] * (length - len(found)))


class SyntheticPairs:
    """Noisy drawings and what they show, such as "a red disc, top"; made from their index, so alike in every process.

    Images and texts are made one without the other: a rank makes what its stage needs.
    """

    def __init__(self, count: int, image_size: int, text_length: int, *, seed: int = 0) -> None:
        self.count, self.image_size, self.text_length, self.seed = count, image_size, text_length, seed

    def __len__(self) -> int:
        return self.count

    def images(self, rows: list[int]) -> torch.Tensor:
        return torch.stack([self._draw(row) for row in rows])

    def texts(self, rows: list[int]) -> torch.Tensor:
        written = ["a {} {}, {}".format(*self._content(row)) for row in rows]
        return torch.stack([tokens(text, self.text_length) for text in written])

    def _content(self, row: int) -> tuple[str, str, str]:
        colour, rest = row % len(COLOURS), row // len(COLOURS)
        return list(COLOURS)[colour], SHAPES[rest % len(SHAPES)], PLACES[rest // len(SHAPES) % len(PLACES)]

    def _draw(self, row: int) -> torch.Tensor:
        colour, shape, place = self._content(row)
        size = self.image_size
        down, across = torch.meshgrid(torch.arange(size) / size, torch.arange(size) / size, indexing="ij")
        down, across = down - (0.3 if place == "top" else 0.7), across - 0.5
        away = (down**2 + across**2).sqrt()
        inside = {
            "disc": away < 0.22,
            "square": (down.abs() < 0.18) & (across.abs() < 0.18),
            "bar": (down.abs() < 0.07) & (across.abs() < 0.4),
            "ring": (away > 0.14) & (away < 0.26),
        }[shape]
        generator = torch.Generator().manual_seed(self.seed + row)
        noise = 0.2 * torch.randn(3, size, size, generator=generator)
        return inside * torch.tensor(COLOURS[colour]).view(3, 1, 1) + noise


class PairFolder:
    """The images of a folder, each with a text beside it: `cat.jpg` and `cat.txt`."""

    def __init__(self, root: Path, image_size: int, text_length: int) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit(
                "--data reads image files with Pillow, which is not installed: pip install Pillow"
            ) from None
        self._open = Image.open
        self.image_size, self.text_length = image_size, text_length
        self.files = [
            path
            for path in sorted(root.rglob("*"))
            if path.suffix.lower() in ENDINGS and path.with_suffix(".txt").exists()
        ]
        if not self.files:
            raise SystemExit(f"--data {root}: expected images with a text beside each (a.jpg and a.txt), found none")

    def __len__(self) -> int:
        return len(self.files)

    def images(self, rows: list[int]) -> torch.Tensor:
        return torch.stack([self._read(self.files[row]) for row in rows])

    def texts(self, rows: list[int]) -> torch.Tensor:
        return torch.stack([tokens(self.files[r].with_suffix(".txt").read_text(), self.text_length) for r in rows])

    def _read(self, path: Path) -> torch.Tensor:
        with self._open(path) as file:
            pixels = np.asarray(file.convert("RGB").resize((self.image_size, self.image_size)), dtype=np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
