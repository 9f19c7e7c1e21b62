"""From logits to answers: the best span of tokens over all windows of a question, as text of its context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from squad import Question, Window


@dataclass(frozen=True)
class Span:
    """Part of a context that may be the answer; `score` is the sum of the two logits."""

    score: float
    begin: int
    end: int


def best_answers(
    questions: list[Question],
    windows: list[Window],
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> dict[str, str]:
    """The answer to each question by its id, "" where no window has a span: what the evaluator of SQuAD v1.1 reads.

    The logits have one row per window. Of each window the `n_best` best starts are tried with the `n_best` best ends.
    """
    best: dict[int, Span] = {}
    for window, starts, ends in zip(windows, start_logits, end_logits, strict=True):
        for span in _spans(window, starts, ends, n_best, max_answer_length):
            known = best.get(window.question)
            if known is None or span.score > known.score:
                best[window.question] = span
    found = {}
    for place, question in enumerate(questions):
        span = best.get(place)
        found[question.id] = "" if span is None else question.context[span.begin : span.end]
    return found


def _spans(
    window: Window, starts: torch.Tensor, ends: torch.Tensor, n_best: int, max_answer_length: int
) -> Iterator[Span]:
    """Spans inside the context only: an answer cannot be in the question or in the padding."""
    inside = slice(window.context.start, window.context.stop)
    count = min(n_best, len(window.context))
    best_starts, best_ends = (logits[inside].float().topk(count) for logits in (starts, ends))
    offsets = window.offsets.tolist()
    for start_score, start in zip(best_starts.values.tolist(), best_starts.indices.tolist(), strict=True):
        for end_score, end in zip(best_ends.values.tolist(), best_ends.indices.tolist(), strict=True):
            if start <= end < start + max_answer_length:
                yield Span(start_score + end_score, offsets[start][0], offsets[end][1])
