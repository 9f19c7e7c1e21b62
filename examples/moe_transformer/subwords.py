"""A subword vocabulary, learnt from the texts themselves: byte-pair encoding (Sennrich et al., 2016) in plain Python.

A text is cut into words and signs; one that follows a space begins with "▁", so pieces join up to the same text again. Every
word starts as its characters, and the commonest neighbours are merged, again and again, until the vocabulary is full.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

PAD, EOS, BOS, UNKNOWN = range(4)
SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
Pair = tuple[str, str]


class Subwords:
    """Texts to numbers and back. `learn` makes one from texts, `load` reads what `save` wrote."""

    def __init__(self, pieces: list[str], merges: list[Pair]) -> None:
        self.pieces, self.merges = pieces, merges
        self._number = {piece: number for number, piece in enumerate(pieces)}
        self._rank = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> Subwords:
        """A vocabulary of at most `size` pieces, which has all characters of the texts."""
        counts = Counter(word for text in texts for word in split_words(text))
        characters = sorted({character for word in counts for character in word})
        if len(SPECIAL) + len(characters) > size:
            raise SystemExit(
                f"--vocabulary {size}: expected at least {len(SPECIAL) + len(characters)}, the different characters of the "
                f"corpus and {len(SPECIAL)} special pieces"
            )
        merges = learn_merges(counts, size - len(SPECIAL) - len(characters))
        made = dict.fromkeys(left + right for left, right in merges)
        return cls([*SPECIAL, *characters, *made], merges)

    def encode(self, text: str) -> list[int]:
        return [number for word in split_words(text) for number in self._encode_word(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text up to the end of the sentence; special pieces are left out."""
        pieces = []
        for number in numbers:
            if number == EOS:
                break
            if number >= len(SPECIAL):
                pieces.append(self.pieces[number])
        return "".join(pieces).replace("▁", " ").strip()

    def save(self, path: Path) -> None:
        path.write_text(
            json.dumps({"pieces": self.pieces, "merges": self.merges}, ensure_ascii=False), encoding="utf-8"
        )

    @classmethod
    def load(cls, path: Path) -> Subwords:
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(found["pieces"], [(left, right) for left, right in found["merges"]])

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._known:
            pieces = list(word)
            while len(pieces) > 1:
                pairs = pairwise(pieces)
                best = min(pairs, key=lambda pair: self._rank.get(pair, len(self._rank)))
                if best not in self._rank:
                    break
                pieces = merge(pieces, best)
            self._known[word] = [self._number.get(piece, UNKNOWN) for piece in pieces]
        return self._known[word]


def split_words(text: str) -> list[str]:
    """Words and signs, with "▁" before what follows a space or begins the text."""
    return re.findall(r"▁?(?:\w+|[^\w\s▁])", "▁" + "▁".join(text.replace("▁", "_").split()))


def merge(pieces: list[str], pair: Pair) -> list[str]:
    """The pieces with every occurrence of the pair made into one."""
    merged: list[str] = []
    at = 0
    while at < len(pieces):
        if at + 1 < len(pieces) and (pieces[at], pieces[at + 1]) == pair:
            merged.append(pieces[at] + pieces[at + 1])
            at += 2
        else:
            merged.append(pieces[at])
            at += 1
    return merged


def learn_merges(counts: Counter[str], most: int) -> list[Pair]:
    """The merges of the commonest pairs, in order, that make `most` pieces; ties go by the alphabet.

    Only the words that have the merged pair are looked at again; the heap may hold counts that are no longer true.
    """
    words = [list(word) for word in counts]
    often = list(counts.values())
    total: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = defaultdict(set)
    for at, word in enumerate(words):
        for pair in pairwise(word):
            total[pair] += often[at]
            places[pair].add(at)
    heap = [(-count, pair) for pair, count in total.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    made: set[str] = set()  # two merges may make the same piece
    while heap and len(made) < most:
        count, pair = heapq.heappop(heap)
        if -count != total[pair]:  # it was pushed again with what is true when it changed
            continue
        merges.append(pair)
        made.add(pair[0] + pair[1])
        changed: set[Pair] = set()
        for at in places.pop(pair):
            for old in pairwise(words[at]):
                total[old] -= often[at]
                changed.add(old)
            words[at] = merge(words[at], pair)
            for new in pairwise(words[at]):
                total[new] += often[at]
                places[new].add(at)
                changed.add(new)
        for other in changed:
            if total[other] > 0:
                heapq.heappush(heap, (-total[other], other))
    return merges
