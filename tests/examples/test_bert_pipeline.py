"""The BERT example: its data, its scores, and a small model that learns part of the sample on one and on several ranks."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import run_ranks

from .commands import EXAMPLES, LAUNCH, output, printed_by

BERT = EXAMPLES / "bert_pipeline"
SAMPLE = BERT / "sample/squad.json"
TINY = ("--width", "32", "--layers", "2", "--max_length", "64", "--doc_stride", "16")
LINE = re.compile(r"step (\d+)/(\d+)  loss (\S+)  \d+ ms/step")
END = re.compile(r"Train Finished\. f1 (\S+), exact_match (\S+) \((\d+) questions\)")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The files of the example, imported as train.py imports them."""
    monkeypatch.syspath_prepend(str(BERT))
    names = ("squad", "answers", "evaluate", "model")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def tokenizer_for(example: SimpleNamespace, *texts: str):
    return example.model.make_small(texts, 64, width=8, layers=1)[1]


# The sample and its questions


def test_every_answer_of_the_sample_stands_where_it_says(example: SimpleNamespace) -> None:
    questions = example.squad.read_questions(SAMPLE)
    assert len({question.id for question in questions}) == len(questions) == 122
    assert len({question.context for question in questions}) == 40
    for question in questions:
        assert question.answers, question
        for start, text in question.answers:
            assert question.context[start : start + len(text)] == text, question
            around = question.context[start - 1 : start] + question.context[start + len(text) :][:1]
            assert not any(character.isalnum() for character in around), question
        assert question.is_placed()


def test_the_answers_of_the_sample_are_read_back_from_their_tokens(example: SimpleNamespace) -> None:
    questions = example.squad.read_questions(SAMPLE)
    tokenizer = tokenizer_for(example, *example.squad.texts_of(questions))
    windows = example.squad.make_windows(questions, tokenizer, 64, 16)
    assert len(windows) > len(questions), "some contexts need several windows"
    assert [w.question for w in windows] == sorted(w.question for w in windows)
    found: dict[int, set[str]] = {place: set() for place in range(len(questions))}
    for window in windows:
        question = questions[window.question]
        assert len(window.ids) == len(window.types) <= 64
        assert len(window.offsets) == len(window.context)
        for place, (begin, end) in zip(window.context, window.offsets.tolist(), strict=True):
            piece = tokenizer.convert_ids_to_tokens(int(window.ids[place])).removeprefix("##")
            assert piece == tokenizer.backend_tokenizer.normalizer.normalize_str(question.context[begin:end])
        if window.answer != (0, 0):
            first, last = (window.offsets[place - window.context.start].tolist() for place in window.answer)
            found[window.question].add(question.context[first[0] : last[1]])
    assert found == {place: {question.answers[0][1]} for place, question in enumerate(questions)}


# Windows


def test_a_long_context_is_read_in_windows_that_overlap(example: SimpleNamespace) -> None:
    words = [f"w{letter}" for letter in "abcdefghijklmnopqrst"]
    context = " ".join(words)
    question = example.squad.Question("one", "where is it", context, ((context.index("wg wh wi"), "wg wh wi"),))
    tokenizer = tokenizer_for(example, context, question.text)
    windows = example.squad.make_windows([question], tokenizer, 3 + 3 + 8, 3)
    read = [[context[begin:end] for begin, end in window.offsets.tolist()] for window in windows]
    assert read == [words[0:8], words[5:13], words[10:18], words[15:20]]
    # The first window has only the beginning of the answer, the last two nothing of it: they point at [CLS].
    assert [window.answer for window in windows] == [(0, 0), (6, 8), (0, 0), (0, 0)]
    assert [window.context for window in windows] == [range(5, 13)] * 3 + [range(5, 10)]
    assert windows[1].types.tolist() == [0] * 5 + [1] * 9


def test_an_answer_inside_a_word_takes_the_whole_token(example: SimpleNamespace) -> None:
    context = "It costs 90euros today"
    tokenizer = tokenizer_for(example, context)
    for text, expected in (("90", "90euros"), ("euros", "90euros"), ("costs 90", "costs 90euros"), ("today", "today")):
        question = example.squad.Question("one", "costs", context, ((context.index(text), text),))
        (window,) = example.squad.make_windows([question], tokenizer, 20, 4)
        first, last = (place - window.context.start for place in window.answer)
        assert context[window.offsets[first][0] : window.offsets[last][1]] == expected


def test_rows_are_filled_up_to_the_longest_window(example: SimpleNamespace) -> None:
    questions = [
        example.squad.Question("one", "who", "Ann sat", ((0, "Ann"),)),
        example.squad.Question("two", "who", "Ann sat and Tom ran far", ((12, "Tom"),)),
    ]
    tokenizer = tokenizer_for(example, *example.squad.texts_of(questions))
    windows = example.squad.make_windows(questions, tokenizer, 40, 4)
    short, long = example.squad.WindowDataset(windows, tokenizer.pad_token_id, learn=True)
    assert tokenizer.convert_ids_to_tokens(short["input_ids"]) == (
        ["[CLS]", "who", "[SEP]", "ann", "sat", "[SEP]"] + ["[PAD]"] * 4
    )
    assert short["attention_mask"].tolist() == [1] * 6 + [0] * 4
    assert short["token_type_ids"].tolist() == [0] * 3 + [1] * 3 + [0] * 4
    assert (int(short["start_positions"]), int(short["end_positions"])) == (3, 3)
    assert (int(long["start_positions"]), int(long["end_positions"])) == (6, 6)
    assert long["attention_mask"].all()
    assert set(example.squad.WindowDataset(windows, 0, learn=False)[0]) == {
        "input_ids",
        "token_type_ids",
        "attention_mask",
    }


def test_a_misplaced_answer_is_noticed(example: SimpleNamespace) -> None:
    placed = example.squad.Question("one", "who", "Ann sat", ((4, "sat"),))
    assert placed.is_placed()
    assert not example.squad.Question("one", "who", "Ann sat", ((3, "sat"),)).is_placed()
    assert not example.squad.Question("one", "who", "Ann sat", ()).is_placed()


def test_says_what_is_wrong_with_the_data(example: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("no JSON")
    for name, said in (("none.json", "found none there"), ("list.json", "TypeError"), ("text.json", "JSONDecodeError")):
        with pytest.raises(SystemExit, match=said):
            example.squad.read_questions(tmp_path / name)
    question = example.squad.Question("one", "who sat where", "Ann sat", ())
    tokenizer = tokenizer_for(example, question.text, question.context)
    with pytest.raises(SystemExit, match=r"leaves 4 tokens of context beside the longest question \(3 tokens\)"):
        example.squad.make_windows([question], tokenizer, 10, 4)


# The small model


def test_the_vocabulary_covers_its_texts(example: SimpleNamespace) -> None:
    texts = ["The café's door.", "the door, the sea"]
    vocabulary = example.model.make_vocabulary(texts)
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert list(vocabulary)[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = example.model.BertTokenizer(vocab=vocabulary)
    assert tokenizer.tokenize("The Café: doors") == ["the", "cafe", "[UNK]", "door", "##s"]
    small = example.model.make_vocabulary(texts, size=len(vocabulary) - 2)
    assert vocabulary.keys() - small.keys() == {"cafe", "sea"}, "the commonest words stay"


def parameters_by_stage(stages: int) -> dict[str, list[str]]:
    """The parameters of each TaskGraph of a model with five layers; in a process of its own, for annotations stay."""
    sys.path.insert(0, str(BERT))
    module = importlib.import_module("model")
    model, _ = module.make_small(["some words"], 16, width=8, layers=5)
    module.annotate(model, stages)
    found = module.epl.taskgraphs(model)
    assert sum(len(graph.parameters) for graph in found) == len(list(model.parameters()))
    return {graph.taskgraph.name: list(graph.parameters) for graph in found}


def test_the_stages_are_the_whole_model() -> None:
    (found,) = run_ranks(parameters_by_stage, 1, 2)
    assert list(found) == ["stage_0", "stage_1"]
    layers = [{int(n) for name in names for n in re.findall(r"layer\.(\d+)\.", name)} for names in found.values()]
    assert layers == [{0, 1}, {2, 3, 4}]
    assert "bert.embeddings.word_embeddings.weight" in found["stage_0"]
    assert "qa_outputs.weight" in found["stage_1"]


def test_says_what_is_wrong_with_a_directory(example: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected a Hugging Face directory, found no config\.json there"):
        example.model.load(tmp_path, 16)
    model, tokenizer = example.model.make_small(["some words"], 16, width=8, layers=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, loaded = example.model.load(tmp_path, 16)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    with pytest.raises(SystemExit, match="--max_length 17: expected at most 16, the positions of the model"):
        example.model.load(tmp_path, 17)


def test_no_stage_is_without_a_layer(example: SimpleNamespace) -> None:
    model, _ = example.model.make_small(["some words"], 16, width=8, layers=2)
    for stages in (0, 3):
        with pytest.raises(SystemExit, match=f"--stages {stages}: expected 1 to 2, the layers of this model"):
            example.model.annotate(model, stages)


# From logits to answers


def two_windows(example: SimpleNamespace):
    """One question over two windows of four tokens of context each, and one whose context is empty."""
    context = "ab cd ef gh ij kl"
    offsets = [[3 * n, 3 * n + 2] for n in range(6)]
    ids = torch.zeros(8, dtype=torch.int32)

    def window(question: int, first: int, count: int):
        part = torch.tensor(offsets[first : first + count], dtype=torch.int32).view(-1, 2)
        return example.squad.Window(question, ids, ids, range(3, 3 + count), part, (0, 0))

    questions = [example.squad.Question("one", "q", context, ()), example.squad.Question("two", "q", "", ())]
    return questions, [window(0, 0, 4), window(0, 2, 4), window(1, 0, 0)]


def test_the_best_span_of_all_windows_is_the_answer(example: SimpleNamespace) -> None:
    questions, windows = two_windows(example)
    starts, ends = torch.zeros(3, 8), torch.zeros(3, 8)
    starts[0, 3], ends[0, 4] = 5.0, 5.0  # "ab cd" in the first window
    starts[1, 5], ends[1, 6] = 6.0, 5.0  # "ij kl" in the second
    assert example.answers.best_answers(questions, windows, starts, ends) == {"one": "ij kl", "two": ""}
    starts[1, 5] = 4.0
    assert example.answers.best_answers(questions, windows, starts, ends) == {"one": "ab cd", "two": ""}


def test_an_answer_is_inside_the_context_in_order_and_not_too_long(example: SimpleNamespace) -> None:
    questions, windows = two_windows(example)
    windows = windows[:1]
    starts, ends = torch.zeros(1, 8), torch.zeros(1, 8)
    starts[0, 0] = ends[0, 0] = starts[0, 7] = ends[0, 7] = 100.0  # [CLS] and padding
    starts[0, 5], ends[0, 3] = 10.0, 10.5  # the end before the start
    starts[0, 4], ends[0, 6] = 9.0, 9.5
    found = [
        example.answers.best_answers(questions[:1], windows, starts, ends, **limits)["one"]
        for limits in ({}, {"max_answer_length": 2}, {"max_answer_length": 1}, {"n_best": 1})
    ]
    assert found == ["ef gh", "ef gh", "ab", ""]


# Scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tsat.", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("St. John's (1874)", "st johns 1874"),
        ("A", ""),
        ("a-b", "ab"),
    ],
)
def test_normalise(example: SimpleNamespace, text: str, expected: str) -> None:
    assert example.evaluate.normalise(text) == expected


@pytest.mark.parametrize(
    ("predicted", "right", "f1", "exact"),
    [
        ("the Black Sea", "Black Sea.", 1, 1),
        ("in the Black Sea", "the Black Sea", 2 * 2 / (3 + 2), 0),
        ("Black Forest", "Black Sea", 1 / 2, 0),
        ("sea sea", "sea", 2 / 3, 0),
        ("sea", "sea sea sea", 2 * 1 / (1 + 3), 0),
        ("lake", "sea", 0, 0),
        ("", "sea", 0, 0),
    ],
)
def test_f1_and_exact_match(example: SimpleNamespace, predicted: str, right: str, f1: float, exact: float) -> None:
    assert example.evaluate.f1(predicted, right) == pytest.approx(f1)
    assert example.evaluate.exact_match(predicted, right) == exact


def test_scores_take_the_best_answer_and_count_what_is_missing(example: SimpleNamespace) -> None:
    answers = {"one": ["sea", "the deep sea"], "two": ["Ann"], "three": ["Tom"], "four": ["red", "dark red"]}
    predictions = {"one": "deep sea", "two": "Ann Berg", "four": "RED!"}
    assert example.evaluate.scores(answers, predictions) == {
        "exact_match": pytest.approx(100 * 2 / 4),
        "f1": pytest.approx(100 * (1 + 2 / 3 + 0 + 1) / 4),
    }
    with pytest.raises(SystemExit, match="found none"):
        example.evaluate.scores({}, {})


# Training


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two articles of the sample: 18 questions."""
    sample = json.loads(SAMPLE.read_text())
    path = tmp_path_factory.mktemp("squad") / "part.json"
    path.write_text(json.dumps({"version": "1.1", "data": sample["data"][:2]}))
    return path


def printed(*options: str) -> str:
    """What train.py prints when this very process runs it; for `run_ranks`."""
    sys.argv = ["train.py", *options]
    sys.path.insert(0, str(BERT))
    return printed_by(str(BERT / "train.py"))


def on_part(part: Path, *options: str) -> tuple[str, ...]:
    return ("--train_file", str(part), "--predict_file", str(part), *TINY, *options)


def losses(text: str) -> list[float]:
    """The losses of a run, after a look at its lines."""
    *steps, end = text.splitlines()
    found = [LINE.fullmatch(line) for line in steps]
    assert all(found), text
    assert END.fullmatch(end), text
    return [float(match[3]) for match in found if match]


def test_one_process_learns_answers_and_can_be_loaded_again(part: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    learn = ("--micro_batches", "1", "--batch_size", "6", "--epochs", "40", "--lr", "3e-3", "--output_dir", str(out))
    (text,) = run_ranks(printed, 1, *on_part(part, *learn))
    found = losses(text)
    assert len(found) >= 20
    assert found[-1] < 0.2 * found[0]
    predictions = json.loads((out / "predictions.json").read_text())
    assert list(predictions) == [
        entry["id"] for a in json.loads(part.read_text())["data"] for p in a["paragraphs"] for entry in p["qas"]
    ]
    scored = json.loads(output(sys.executable, "evaluate.py", part, out / "predictions.json", folder=BERT))
    assert END.search(text).groups() == (f"{scored['f1']:.1f}", f"{scored['exact_match']:.1f}", "18")
    assert scored["f1"] >= scored["exact_match"] > 80

    only_answer = ("--model", str(out), "--epochs", "0", "--micro_batches", "1", "--output_dir", str(again))
    (text,) = run_ranks(printed, 1, *on_part(part, *only_answer))
    assert losses(text) == []
    assert json.loads((again / "predictions.json").read_text()) == predictions


def run_on(ranks: int, part: Path, folder: Path, *options: str) -> tuple[list[float], dict[str, str]]:
    """The losses of every step and the answers of a run over three epochs, with rank 0 alone to report them."""
    short = ("--epochs", "3", "--lr", "3e-3", "--output_dir", str(folder))
    first, *others = run_ranks(printed, ranks, *on_part(part, *short, *options))
    assert others == [""] * (ranks - 1)
    return losses(first), json.loads((folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def expected(part: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, str]]:
    """One process that learns from 8 windows in each step, fewer in the last of an epoch."""
    found, answers = run_on(1, part, tmp_path_factory.mktemp("one"), "--micro_batches", "1", "--batch_size", "8")
    assert len(set(found)) == len(found) == 9
    return found, answers


def check_same(run: tuple[list[float], dict[str, str]], expected: tuple[list[float], dict[str, str]]) -> None:
    assert run[0] == pytest.approx(expected[0], abs=1e-5)
    assert run[1] == expected[1]


def test_two_replicas_equal_one_process(part: Path, tmp_path: Path, expected) -> None:
    check_same(run_on(2, part, tmp_path, "--stages", "1", "--micro_batches", "1", "--batch_size", "4"), expected)


def test_two_stages_equal_one_process(part: Path, tmp_path: Path, expected) -> None:
    check_same(run_on(2, part, tmp_path, "--stages", "2", "--micro_batches", "4", "--batch_size", "2"), expected)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "stages", "micro_batches"), [(1, 2, 4), (2, 1, 2), (4, 2, 2)])
def test_other_layouts_equal_one_process(part, tmp_path: Path, expected, ranks, stages, micro_batches) -> None:
    options = ("--stages", str(stages), "--micro_batches", str(micro_batches), "--batch_size", "2")
    check_same(run_on(ranks, part, tmp_path, *options), expected)


def test_the_manuals_command_trains_two_stages(part: Path, tmp_path: Path) -> None:
    launch = (*LAUNCH, "--num_workers", "1", "--gpu_per_worker", "2", "--log_dir", tmp_path / "logs")
    options = on_part(part, "--epochs", "1", "--output_dir", str(tmp_path / "out"))
    shown = output(*launch, "scripts/train_bert_base_dp.sh", *options, folder=BERT)
    assert len(losses(shown)) == 2  # 4 micro batches of 4 windows: 16 of 18 or more, and the rest
    assert len(json.loads((tmp_path / "out/predictions.json").read_text())) == 18
