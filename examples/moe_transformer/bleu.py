"""BLEU of a list of translations (Papineni et al., 2002): how many of their runs of 1 to 4 words are in the right ones."""

from __future__ import annotations

import math
from collections import Counter

from subwords import split_words


def bleu(translations: list[str], right: list[str]) -> float:
    """0 to 100; one right translation each, words and signs as they are, no smoothing."""
    found, possible = Counter[int](), Counter[int]()
    length = right_length = 0
    for translation, reference in zip(translations, right, strict=True):
        words, expected = split_words(translation), split_words(reference)
        length += len(words)
        right_length += len(expected)
        for size in range(1, 5):
            runs, known = _runs(words, size), _runs(expected, size)
            found[size] += (runs & known).total()
            possible[size] += runs.total()
    if not all(found[size] for size in range(1, 5)):
        return 0.0
    precision = math.exp(sum(math.log(found[size] / possible[size]) for size in range(1, 5)) / 4)
    return 100 * precision * min(1.0, math.exp(1 - right_length / length))


def _runs(words: list[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))
