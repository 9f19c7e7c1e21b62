"""Prepares a parallel corpus for training: a subword vocabulary, the numbered sentences, and some held out.

    python generate_data.py --data_dir data --source train.en --target train.de     two aligned files
    python generate_data.py --data_dir data --pairs train.tsv                       one file, a tab between the two
    python generate_data.py --data_dir data                                         made-up English and German

`train.py --generate_data`, with the same options, does it before training.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from grammar import make_pairs
from subwords import BOS, EOS, PAD, Subwords
from torch.utils.data import Dataset

VOCABULARY, TRAIN, HELD_OUT = "vocabulary.json", "train.pt", "held_out.pt"
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TextPairs = list[tuple[str, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="where the prepared corpus is")
    parser.add_argument("--source", type=Path, help="a text file, one sentence per line, such as train.en")
    parser.add_argument("--target", type=Path, help="its translation, line by line, such as train.de")
    parser.add_argument("--pairs", type=Path, help="instead: one file with sentence, tab, translation on each line")
    parser.add_argument("--sentences", type=int, default=2560, help="how many to make up, where no file is given")
    parser.add_argument("--held_out", type=int, default=64, help="sentences kept for the translations at the end")
    parser.add_argument("--vocabulary", type=int, default=256, help="pieces; 32768 for a real corpus")
    parser.add_argument("--max_length", type=int, default=40, help="pieces of a sentence; longer ones are left out")


def generate_data(options: argparse.Namespace) -> str:
    """The corpus is prepared in `data_dir`; what was done, as a sentence."""
    pairs = read_pairs(options)
    held_out, train = pairs[: options.held_out], pairs[options.held_out :]
    if not train:
        raise SystemExit(f"{len(pairs)} sentences, and --held_out {options.held_out}: nothing is left to learn from")
    subwords = Subwords.learn((text for pair in train for text in pair), options.vocabulary)
    options.data_dir.mkdir(parents=True, exist_ok=True)
    kept = _write(options.data_dir / TRAIN, train, subwords, options.max_length)
    asked = _write(options.data_dir / HELD_OUT, held_out, subwords, options.max_length)
    subwords.save(options.data_dir / VOCABULARY)  # last: where it is, the rest is too
    return (
        f"{options.data_dir}: {kept} sentences to learn from, {asked} held out, {len(subwords)} subwords; "
        f"{len(pairs) - kept - asked} sentences with more than {options.max_length} pieces left out"
    )


def read_pairs(options: argparse.Namespace) -> TextPairs:
    """Sentences with their translations; empty ones are left out."""
    if options.pairs is not None:
        lines = _lines(options.pairs, "--pairs")
        parted = [line.split("\t") for line in lines if line]
        wrong = next((number for number, parts in enumerate(parted, start=1) if len(parts) < 2), None)
        if wrong is not None:
            raise SystemExit(f"--pairs {options.pairs}: expected a tab in every line, found none in line {wrong}")
        pairs = [(parts[0].strip(), parts[1].strip()) for parts in parted]
    elif options.source is not None or options.target is not None:
        if options.source is None or options.target is None:
            raise SystemExit("--source and --target go together: two files with as many lines")
        sources, targets = _lines(options.source, "--source"), _lines(options.target, "--target")
        if len(sources) != len(targets):
            raise SystemExit(
                f"expected as many lines in both files, found {len(sources)} in {options.source} and "
                f"{len(targets)} in {options.target}"
            )
        pairs = list(zip(sources, targets, strict=True))
    else:
        pairs = make_pairs(options.sentences)
    return [pair for pair in pairs if all(pair)]


class Corpus(Dataset[Sample]):
    """Prepared sentences: source, what the decoder reads, what it is to say; each filled up to the same length."""

    def __init__(self, path: Path) -> None:
        found = torch.load(path, weights_only=True)
        self.length: int = found["max_length"]
        self.numbers, self.ends = found["numbers"], [0, *found["ends"].tolist()]

    def __len__(self) -> int:
        return len(self.ends) // 2

    def __getitem__(self, index: int) -> Sample:
        source, target = (self._part(2 * index + side) for side in (0, 1))
        return self._filled(source + [EOS]), self._filled([BOS] + target), self._filled(target + [EOS])

    def target(self, index: int) -> list[int]:
        """The numbers of the right translation."""
        return self._part(2 * index + 1)

    def _part(self, at: int) -> list[int]:
        return self.numbers[self.ends[at] : self.ends[at + 1]].tolist()

    def _filled(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers + [PAD] * (self.length - len(numbers)))


class Prepared(NamedTuple):
    subwords: Subwords
    train: Corpus
    held_out: Corpus


def open_data(folder: Path) -> Prepared:
    """What `generate_data` prepared."""
    if not (folder / VOCABULARY).exists():
        raise SystemExit(
            f"--data_dir {folder}: expected a prepared corpus, found no {VOCABULARY} there: add --generate_data"
        )
    return Prepared(Subwords.load(folder / VOCABULARY), Corpus(folder / TRAIN), Corpus(folder / HELD_OUT))


def _write(path: Path, pairs: TextPairs, subwords: Subwords, max_length: int) -> int:
    """How many pairs fit into `max_length`, sentence end included; these are written."""
    encoded = [(subwords.encode(source), subwords.encode(target)) for source, target in pairs]
    short = [part for pair in encoded if max(map(len, pair)) < max_length for part in pair]
    numbers = torch.tensor([number for part in short for number in part], dtype=torch.int32)
    ends = torch.tensor([len(part) for part in short], dtype=torch.int64).cumsum(0)
    torch.save({"numbers": numbers, "ends": ends, "max_length": max_length}, path)
    return len(short) // 2


def _lines(path: Path, option: str) -> list[str]:
    if not path.is_file():
        raise SystemExit(f"{option} {path}: expected a text file, found none there")
    return [line.strip("\r ") for line in path.read_text(encoding="utf-8").split("\n")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    print(generate_data(parser.parse_args()))


if __name__ == "__main__":
    main()
