"""Words before what the loop's own code sends: once for each of its lines between two calls of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from epl.cluster.communication import Circle, Job
from epl.train.split.loopwords import LoopWords


class Spoken(list[str]):
    """A job that only writes down what is said."""

    def meet(self, kind: str, *, place: str, circle: Circle) -> Any:
        self.append(place)
        return SimpleNamespace(wait=lambda: None)


def test_a_line_says_its_word_once_between_two_calls() -> None:
    spoken = Spoken()
    words = LoopWords(cast(Job, spoken), cast(Circle, None))
    for _ in range(2):
        words.call_begins()
        words()  # what the model sends itself: ranks have met at the call
        words.call_ends()
        for _ in range(100):
            words()  # a penalty over all parameters
        words()
    penalty, loss = dict.fromkeys(spoken)
    assert spoken == [penalty, loss, penalty, loss]
    assert penalty.startswith("test_loopwords.py:")
