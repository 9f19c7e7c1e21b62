"""The translation example with experts, tiny: its data and vocabulary, its layers, and that ranks give one process's numbers."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from epl.graph import registry
from tests.harness import run_ranks

from .commands import EXAMPLES, LAUNCH, output, printed_by, run

FOLDER = EXAMPLES / "moe_transformer"
NAMES = ("subwords", "grammar", "generate_data", "bleu", "einsum_moe", "moe", "model")
CORPUS = ("--sentences", "60", "--held_out", "7", "--vocabulary", "120", "--max_length", "48")
TINY = ("--width", "16", "--heads", "2", "--hidden", "16", "--experts", "3", "--batch_size", "6", "--steps", "4")
STEP = re.compile(r"step (\d+)/(\d+)  loss (\S+)  balance (\S+)  \d+ ms/step")
LAYER = re.compile(r"expert layer (\d): tokens per expert ([\d, ]+); (\d+) of (\d+) found no place")
END = re.compile(r"Train Finished\. BLEU (\S+), (\d+) of (\d+) held-out sentences translated word for word\.")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The files of the example, imported as train.py imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        del sys.modules[name]
    registry.reset()  # the layers of experts are annotated


# The vocabulary


def test_the_commonest_neighbours_are_merged_first(example: SimpleNamespace) -> None:
    # By hand: ab 5, bc 3, then (ab)c 3; "cab" adds ca 2, which is c(ab) after the first merge.
    merges = example.subwords.learn_merges(Counter({"abc": 3, "cab": 2, "b": 9}), 3)
    assert merges == [("a", "b"), ("ab", "c"), ("c", "ab")]


def slow_merges(counts: Counter[str], most: int) -> list[tuple[str, str]]:
    """The same by counting everything anew each time."""
    words = {word: list(word) for word in counts}
    merges: list[tuple[str, str]] = []
    while len({left + right for left, right in merges}) < most:
        total: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                total[pair] += counts[word]
        if not total:
            break
        best = min(total, key=lambda pair: (-total[pair], pair))
        merges.append(best)
        for word, pieces in words.items():
            joined, at = [], 0
            while at < len(pieces):
                step = 2 if tuple(pieces[at : at + 2]) == best else 1
                joined.append("".join(pieces[at : at + step]))
                at += step
            words[word] = joined
    return merges


def test_merges_are_those_of_the_slow_way(example: SimpleNamespace) -> None:
    texts = [text for pair in example.grammar.make_pairs(40) for text in pair] + ["aaaa aaa aa banana"]
    counts = Counter(word for text in texts for word in example.subwords.split_words(text))
    assert example.subwords.learn_merges(counts, 150) == slow_merges(counts, 150)


def test_texts_come_back_from_their_numbers(example: SimpleNamespace, tmp_path: Path) -> None:
    texts = ["Der König, sagt man, sieht's nicht.", "a  b\tc", "100 % (oder mehr)!", ""]
    learnt = example.subwords.Subwords.learn(texts, 60)
    assert len(learnt.pieces) == len(set(learnt.pieces)) <= 60
    learnt.save(tmp_path / "vocabulary.json")
    for subwords in (learnt, example.subwords.Subwords.load(tmp_path / "vocabulary.json")):
        for text in texts:
            assert subwords.decode(subwords.encode(text)) == " ".join(text.split())
    assert learnt.encode("König§")[-1] == example.subwords.UNKNOWN
    ends = [*learnt.encode("Der"), example.subwords.EOS, *learnt.encode("König")]
    assert learnt.decode([example.subwords.BOS, *ends]) == "Der"
    with pytest.raises(SystemExit, match=r"--vocabulary 9: expected at least \d+, the different characters"):
        example.subwords.Subwords.learn(texts, 9)


# The corpus


def corpus_options(example: SimpleNamespace, *words: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    example.generate_data.add_options(parser)
    return parser.parse_args([str(word) for word in words])


def test_the_made_up_german_has_its_word_order(example: SimpleNamespace) -> None:
    pairs = example.grammar.make_pairs(400)
    assert pairs == example.grammar.make_pairs(400) != example.grammar.make_pairs(400, seed=1)
    done = {verb.english_done: verb.german_done for verb in example.grammar.VERBS}
    seen = Counter()
    for english, german in pairs:
        main, _, why = english.rstrip(".").partition(" because ")
        haupt, _, warum = german.rstrip(".").partition(", weil ")
        assert bool(why) == bool(warum)
        if " has " in main:
            assert haupt.split()[-1] == done[main.split(" has ")[1].split()[0]], (english, german)
            seen["done"] += 1
        if why and " has " in why:
            assert warum.split()[-2:] == [done[why.split(" has ")[1].split()[0]], "hat"], (english, german)
            seen["because"] += 1
    assert seen["done"] > 50
    assert seen["because"] > 20


def test_a_corpus_given_by_path_is_prepared(example: SimpleNamespace, tmp_path: Path) -> None:
    lines = [
        ("the cat sees", "die Katze sieht"),
        ("a dog", "ein Hund"),
        ("", "leer"),
        ("x " * 30, "y"),
        ("dog a", "Hund ein"),
    ]
    (tmp_path / "a.en").write_text("\n".join(source for source, _ in lines))
    (tmp_path / "a.de").write_text("\n".join(target for _, target in lines))
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\tmore\r\n" for source, target in lines))
    small = ("--held_out", "1", "--vocabulary", "60", "--max_length", "20")
    aligned = ("--source", tmp_path / "a.en", "--target", tmp_path / "a.de")
    tabbed = ("--pairs", tmp_path / "a.tsv")
    for name, files in (("aligned", aligned), ("tabbed", tabbed)):
        said = example.generate_data.generate_data(
            corpus_options(example, *small, *files, "--data_dir", tmp_path / name)
        )
        assert "2 sentences to learn from, 1 held out" in said
        assert "1 sentences with more than 20 pieces left out" in said
        subwords, train, held_out = example.generate_data.open_data(tmp_path / name)
        assert (len(train), len(held_out)) == (2, 1)
        source, read, to_say = train[1]
        assert {len(part) for part in (source, read, to_say)} == {20}
        assert [subwords.decode(part.tolist()) for part in (source, to_say)] == ["dog a", "Hund ein"]
        length = len(subwords.encode("Hund ein"))
        assert read[0] == example.subwords.BOS
        assert read[1 : length + 1].tolist() == to_say[:length].tolist() == train.target(1)
        assert to_say[length] == example.subwords.EOS
        assert not to_say[length + 1 :].any()
        assert len(held_out.target(0)) == len(subwords.encode("die Katze sieht"))


def test_says_what_is_wrong_with_a_corpus(example: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a\nb\n")
    (tmp_path / "two").write_text("a\n")

    def prepare(*words: str | Path) -> str:
        return example.generate_data.generate_data(corpus_options(example, "--data_dir", tmp_path / "d", *words))

    with pytest.raises(SystemExit, match=r"as many lines in both files, found 3 in .*one and 2 in .*two"):
        prepare("--source", tmp_path / "one", "--target", tmp_path / "two")
    with pytest.raises(SystemExit, match="--source and --target go together"):
        prepare("--source", tmp_path / "one")
    with pytest.raises(SystemExit, match="expected a tab in every line, found none in line 1"):
        prepare("--pairs", tmp_path / "one")
    with pytest.raises(SystemExit, match=r"--pairs .*three: expected a text file, found none there"):
        prepare("--pairs", tmp_path / "three")
    with pytest.raises(SystemExit, match="9 sentences, and --held_out 9: nothing is left to learn from"):
        prepare("--sentences", "9", "--held_out", "9")
    with pytest.raises(SystemExit, match=r"found no vocabulary\.json there: add --generate_data"):
        example.generate_data.open_data(tmp_path / "d")


def test_bleu(example: SimpleNamespace) -> None:
    bleu = example.bleu.bleu
    right = ["the small cat sees the old dog here."]
    assert bleu(right, right) == pytest.approx(100)
    assert bleu(["dogs bark."], right) == 0
    # 9 words and signs; "the small cat sees an old dog here." finds 8 of 9, 6 of 8, 4 of 7, 2 of 6 runs.
    expected = 100 * (8 / 9 * 6 / 8 * 4 / 7 * 2 / 6) ** 0.25
    assert bleu(["the small cat sees an old dog here."], right) == pytest.approx(expected)
    # Two words short of 9: everything said is right, and the rest is a penalty.
    assert bleu(["the small cat sees the old dog"], right) == pytest.approx(100 * math.exp(1 - 9 / 7))


# The layers


def test_einsum_experts_are_the_experts_one_by_one(example: SimpleNamespace) -> None:
    torch.manual_seed(0)
    moe = example.einsum_moe.EinsumMoE(8, 12, 4, top_k=2, capacity_factor=4.0).double()
    x, real = torch.randn(3, 5, 8, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)
    real[0, 3:] = 0
    y, balance = moe(x, real)
    chance = moe.gate.score(x).softmax(-1)
    best, chosen = chance.topk(2)
    best = best / best.sum(-1, keepdim=True)
    for row in range(3):
        for at in range(5):
            expected = torch.zeros(8, dtype=torch.float64)
            for weight, expert in zip(best[row, at], chosen[row, at], strict=True):
                hidden = torch.relu(x[row, at] @ moe.experts.into[expert])
                expected = expected + real[row, at] * weight * (hidden @ moe.experts.back[expert])
            assert torch.allclose(y[row, at], expected, atol=1e-12)
    *sent, lost = moe.gate(x, real).sent.tolist()
    assert (sum(sent), lost) == (2 * 13, 0)
    assert 1 <= balance < 4


def test_einsum_experts_take_first_choices_first(example: SimpleNamespace) -> None:
    gate = example.einsum_moe.Gate(2, 2, top_k=2, capacity_factor=0.5)
    with torch.no_grad():
        gate.score.weight.copy_(torch.eye(2))
    x = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    routing = gate(x, torch.ones(1, 4))  # two places for each expert and sentence: first choices fill them
    assert routing.dispatch.sum(-1)[0].tolist() == [[0, 1], [1, 0], [1, 0], [0, 1]]
    assert routing.sent.tolist() == [4, 4, 4]
    assert routing.balance.item() == pytest.approx(1)


@pytest.mark.parametrize("moe", ["epl", "einsum"])
def test_fillings_and_later_words_change_nothing(example: SimpleNamespace, moe: str) -> None:
    torch.manual_seed(0)
    size = example.model.Size(vocabulary=20, width=8, heads=2, hidden=8, capacity_factor=8.0, moe=moe)
    model = example.model.Translator(size).double().eval()
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 20, (2, 7))
    filled = torch.cat([source, torch.zeros(2, 3, dtype=torch.long)], 1)
    longer = torch.cat([target, torch.randint(4, 20, (2, 2))], 1)
    with torch.no_grad():
        logits = model(source, target).logits
        assert torch.allclose(model(filled, target).logits, logits, atol=1e-12)
        assert torch.allclose(model(source, longer).logits[:, :7], logits, atol=1e-12)
        assert not torch.allclose(model(source.flip(1), target).logits, logits)


def test_only_named_layers_are_without_experts(example: SimpleNamespace) -> None:
    model = example.model.Translator(example.model.Size(vocabulary=9, width=8, heads=2, layers=4, moe="einsum"))
    assert [layer.has_experts for layer in model.encoder] == [False, True, False, True]
    assert len(model.expert_layers()) == 4
    alone = example.model.Translator(example.model.Size(vocabulary=9, width=8, heads=2, layers=1))
    assert alone.expert_layers() == []
    assert alone(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)).balance == 0


# Running it


def printed(*options: str) -> str:
    """What train.py prints when this very process runs it; for `run_ranks`."""
    sys.argv = ["train.py", *options]
    sys.path.insert(0, str(FOLDER))
    return printed_by(str(FOLDER / "train.py"))


def result(text: str) -> tuple[list[float], list[list[int]], tuple[str, ...]]:
    """Losses and balances of the steps, what experts were sent, and the end, after a look at the lines."""
    lines = text.splitlines()
    steps = [match for line in lines if (match := STEP.fullmatch(line))]
    layers = [match for line in lines if (match := LAYER.fullmatch(line))]
    end = END.fullmatch(lines[-1])
    assert end, text
    assert len(steps) + len(layers) + 1 == len([line for line in lines if "sentences to learn from" not in line]), text
    sent = [[*map(int, layer[2].split(", ")), int(layer[3])] for layer in layers]
    assert [sum(counts[:-1]) for counts in sent] == [int(layer[4]) for layer in layers]
    return [float(number) for step in steps for number in (step[3], step[4])], sent, end.groups()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small made-up corpus, prepared by the command."""
    folder = tmp_path_factory.mktemp("data")
    said = output(sys.executable, "generate_data.py", "--data_dir", folder, *CORPUS, folder=FOLDER)
    assert re.search(
        r": \d+ sentences to learn from, \d+ held out, 120 subwords; \d+ sentences with more than 48", said
    )
    return str(folder)


LAYERS = [("epl", "1", "1.0"), ("epl", "2", "1.25"), ("einsum", "1", "1.0"), ("einsum", "2", "0.5")]


@pytest.mark.parametrize(("moe", "top_k", "capacity_factor"), LAYERS)
def test_two_ranks_equal_one_process(data: str, moe: str, top_k: str, capacity_factor: str) -> None:
    options = (*TINY, "--data_dir", data, "--moe", moe, "--top_k", top_k, "--capacity_factor", capacity_factor)
    (alone,) = run_ranks(printed, 1, *options)
    losses, sent, end = result(alone)
    assert len(losses) == 8
    assert len(set(losses)) > 4
    first, second = run_ranks(printed, 2, *options)
    assert second == "", "rank 0 reports"
    found, found_sent, found_end = result(first)
    assert found == pytest.approx(losses, abs=1e-5 * (1 + max(losses)))
    assert found_sent == sent
    assert found_end == end


@pytest.mark.full
@pytest.mark.parametrize("moe", ["epl", "einsum"])
def test_three_ranks_equal_one_process(data: str, moe: str) -> None:
    options = (*TINY, "--data_dir", data, "--moe", moe)
    losses, sent, end = result(run_ranks(printed, 1, *options)[0])
    found, found_sent, found_end = result(run_ranks(printed, 3, *options)[0])
    assert found == pytest.approx(losses, abs=1e-5 * (1 + max(losses)))
    assert (found_sent, found_end) == (sent, end)


@pytest.mark.parametrize("moe", ["epl", "einsum"])
def test_it_learns(data: str, moe: str) -> None:
    longer = ("--width", "32", "--heads", "4", "--steps", "80", "--lr", "1e-2", "--batch_size", "16")
    losses, sent, _ = result(run_ranks(printed, 1, *TINY, *longer, "--data_dir", data, "--moe", moe)[0])
    losses = losses[::2]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    assert all(counts[:-1] and min(counts[:-1]) > 0 for counts in sent)


def test_the_manuals_script_prepares_its_data_once(tmp_path: Path) -> None:
    """Without the launcher, so on one device; the variables say where the corpus is."""
    (tmp_path / "a.en").write_text("\n".join(["the cat sees a dog", "a dog sees", "the dog", "cat"] * 4))
    (tmp_path / "a.de").write_text("\n".join(["die Katze sieht einen Hund", "ein Hund sieht", "der Hund", "Katze"] * 4))
    env = {
        "DATA_DIR": str(tmp_path / "data"),
        "SOURCE": str(tmp_path / "a.en"),
        "TARGET": str(tmp_path / "a.de"),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    small = ("--vocabulary", "40", "--held_out", "2", *TINY, "--steps", "1")
    shown = output("scripts/train_moe_t5.sh", *small, folder=FOLDER, env=env)
    assert "14 sentences to learn from, 2 held out, 40 subwords" in shown
    ended = run("scripts/train_moe_t5.sh", *small, folder=FOLDER, env=env)
    again = ended.stdout
    assert "to learn from" not in again
    assert "SOURCE and TARGET are not read again" in ended.stderr  # a corpus prepared earlier was trained on, silently
    wrong = run(sys.executable, "train.py", "--source", tmp_path / "a.en", folder=FOLDER)
    assert "--source, --target and --pairs say what --generate_data prepares" in wrong.stderr
    anew = output("scripts/train_moe_t5.sh", *small, folder=FOLDER, env=env | {"GENERATE_DATA": "true"})
    assert result(anew) == result(shown) == result(again)


def test_the_manuals_command_trains_two_workers(tmp_path: Path) -> None:
    launch = (*LAUNCH, "--num_workers", "2", "--gpu_per_worker", "1", "--log_dir", tmp_path / "logs")
    env = {"DATA_DIR": str(tmp_path / "data")}
    shown = output(*launch, "scripts/train_moe_t5.sh", *CORPUS, *TINY, folder=FOLDER, env=env)
    assert shown.count("sentences to learn from") == 1
    losses, sent, end = result(shown)
    assert len(losses) == 8
    assert len(sent) == 2
    assert end[2] == "7"
    assert (tmp_path / "logs/attempt_0/rank_1/stdout.log").read_text() == ""
