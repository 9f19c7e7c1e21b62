"""F1 and exact match of SQuAD v1.1 predictions: `python evaluate.py dev-v1.1.json predictions.json`."""

from __future__ import annotations

import argparse
import json
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """What is compared: lower case, without punctuation and articles, one blank between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(predicted: str, right: str) -> float:
    """1 if the two are the same once normalised, else 0."""
    return float(normalise(predicted) == normalise(right))


def f1(predicted: str, right: str) -> float:
    """The harmonic mean of precision and recall of the predicted words, each counted as often as both have it."""
    said, expected = normalise(predicted).split(), normalise(right).split()
    common = (Counter(said) & Counter(expected)).total()
    return 2 * common / (len(said) + len(expected)) if common else 0.0


def best(score: Callable[[str, str], float], predicted: str, answers: Iterable[str]) -> float:
    """The score against the answer it is best for: any of them counts as right."""
    return max((score(predicted, right) for right in answers), default=0.0)


def scores(answers: Mapping[str, Iterable[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """`{"exact_match": …, "f1": …}` in percent of all questions, given the right answers by id; no prediction counts 0."""
    if not answers:
        raise SystemExit("expected questions to score, found none")
    totals = {"exact_match": 0.0, "f1": 0.0}
    for id, right in answers.items():
        if id in predictions:
            totals["exact_match"] += best(exact_match, predictions[id], right)
            totals["f1"] += best(f1, predictions[id], right)
    return {name: 100 * total / len(answers) for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path, help="the SQuAD v1.1 file with the right answers")
    parser.add_argument("predictions", type=Path, help='{"id": "answer", …}')
    options = parser.parse_args()
    articles = json.loads(options.dataset.read_text(encoding="utf-8"))["data"]
    predictions = json.loads(options.predictions.read_text(encoding="utf-8"))
    answers = {
        entry["id"]: [answer["text"] for answer in entry["answers"]]
        for article in articles
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    }
    missing = len(answers.keys() - predictions.keys())
    if missing:
        print(f"{missing} of {len(answers)} questions have no prediction; each counts 0", file=sys.stderr)
    print(json.dumps(scores(answers, predictions)))


if __name__ == "__main__":
    main()
