"""SQuAD v1.1: the questions of a file, and the windows of tokens in which the model looks for their answers.

A window is `[CLS] question [SEP] part of the context [SEP]`; a long context makes several, which overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000  # questions given to the tokenizer in one call: its lists of offsets are large


@dataclass(frozen=True)
class Question:
    """One question about one paragraph, with every answer that counts as right."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[int, str], ...]
    """Where each answer begins in the context, in characters, and its text; empty where they are not known."""

    def is_placed(self) -> bool:
        """Whether the first answer, which is learnt, stands in the context where the file says."""
        return any(self.context.startswith(text, start) for start, text in self.answers[:1])


@dataclass(frozen=True)
class Window:
    """The tokens of one question and of one part of its context."""

    question: int
    """Place of the question among those the windows were made from."""
    ids: torch.Tensor
    types: torch.Tensor
    """1 for the context and the token after it, 0 for what is before."""
    context: range
    """Which tokens are of the context."""
    offsets: torch.Tensor
    """From where to where each token stands in the context, in characters: one row of two for each of `context`."""
    answer: tuple[int, int]
    """First and last token of the first answer; (0, 0), the place of [CLS], where the window does not have all of it."""


def read_questions(path: Path) -> list[Question]:
    """The questions of a file in the format of SQuAD v1.1, in its order."""
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            Question(
                entry["id"],
                entry["question"].strip(),
                paragraph["context"],
                tuple((answer["answer_start"], answer["text"]) for answer in entry.get("answers", ())),
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except FileNotFoundError:
        raise SystemExit(f"{path}: expected a SQuAD v1.1 file, found none there") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise SystemExit(
            f'{path}: expected SQuAD v1.1, {{"data": [{{"paragraphs": [{{"context", "qas"}}]}}]}}; '
            f"found something else ({type(error).__name__}: {error})"
        ) from error


def make_windows(
    questions: list[Question], tokenizer: PreTrainedTokenizerBase, max_length: int, doc_stride: int
) -> list[Window]:
    """The windows of all questions, in order; `doc_stride` tokens of a context stand both in a window and in the next."""
    windows = []
    for begin in range(0, len(questions), AT_ONCE):
        some = questions[begin : begin + AT_ONCE]
        _check_room([question.text for question in some], tokenizer, max_length, doc_stride)
        encoded = tokenizer(
            [question.text for question in some],
            [question.context for question in some],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for row, which in enumerate(encoded["overflow_to_sample_mapping"]):
            context = _context(encoded.sequence_ids(row))
            offsets = encoded["offset_mapping"][row][context.start : context.stop]
            windows.append(
                Window(
                    begin + which,
                    torch.tensor(encoded["input_ids"][row], dtype=torch.int32),
                    torch.tensor(encoded["token_type_ids"][row], dtype=torch.int8),
                    context,
                    torch.tensor(offsets, dtype=torch.int32).view(-1, 2),
                    _answer_tokens(some[which], context, offsets),
                )
            )
    return windows


def _check_room(texts: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int, doc_stride: int) -> None:
    longest = max(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    room = max_length - longest - 3
    if room <= doc_stride:
        raise SystemExit(
            f"--max_length {max_length} leaves {room} tokens of context beside the longest question ({longest} tokens) and "
            f"3 marks; expected more than --doc_stride {doc_stride}. Make the one larger or the other smaller."
        )


def _context(sequence_ids: list[int | None]) -> range:
    """The tokens of the second text of a pair; empty if it has none."""
    found = [place for place, sequence in enumerate(sequence_ids) if sequence == 1]
    return range(found[0], found[-1] + 1) if found else range(0)


def _answer_tokens(question: Question, context: range, offsets: list[tuple[int, int]]) -> tuple[int, int]:
    if not question.answers or not offsets:
        return 0, 0
    begin, text = question.answers[0]
    end = begin + len(text)
    if begin < offsets[0][0] or end > offsets[-1][1]:
        return 0, 0
    # An answer may begin or end inside a token: the token is then part of it.
    first = next(place for place, (_, token_end) in enumerate(offsets) if token_end > begin)
    last = max(place for place, (token_begin, _) in enumerate(offsets) if token_begin < end)
    return context[first], context[last]


class WindowDataset(Dataset[dict[str, torch.Tensor]]):
    """What `model(**row)` takes for each window, all of one length, with where the answer stands if it is to be learnt."""

    def __init__(self, windows: list[Window], pad: int, *, learn: bool) -> None:
        self.windows, self.pad, self.learn = windows, pad, learn
        self.length = max((len(window.ids) for window in windows), default=0)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        window = self.windows[place]
        known = len(window.ids)
        row = {
            "input_ids": torch.full((self.length,), self.pad),
            "token_type_ids": torch.zeros(self.length, dtype=torch.long),
            "attention_mask": torch.zeros(self.length, dtype=torch.long),
        }
        row["input_ids"][:known] = window.ids
        row["token_type_ids"][:known] = window.types
        row["attention_mask"][:known] = 1
        if self.learn:
            row["start_positions"], row["end_positions"] = torch.tensor(window.answer)
        return row


def texts_of(questions: list[Question]) -> Iterator[str]:
    """Every context once and every question: what a vocabulary is built from."""
    yield from dict.fromkeys(question.context for question in questions)
    yield from (question.text for question in questions)
