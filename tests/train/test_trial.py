"""A copy of the process tries a stage: what it finds out, what it cannot, and that nothing of it is left."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epl.parallel.pipeline.parcel import Form, take_apart
from epl.train.trial import Made, Outcome, Raised, Trial, Unknown

LAYER = nn.Linear(4, 3)


@pytest.fixture(autouse=True, scope="module")
def _compiler_is_imported() -> None:
    """By the first optimizer, as in most programs; else every copy would do it again."""
    torch.optim.SGD(LAYER.parameters(), lr=0.1)


class _Program:
    """The stage of a function of what stage 0 sent; what it returns goes to stage 2."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def forward(self, received: Mapping[int, object], micro_batch: int) -> tuple[Mapping[int, object], object]:
        assert micro_batch == 0
        return {2: self._function(received.get(0))}, None


def _form(value: object) -> Form:
    return take_apart(value)[0]


def _try(
    function: Callable[[Any], object], given: object = None, *, numbers: bool = False, seconds: float = 20.0
) -> Outcome:
    given = torch.ones(2, 4) if given is None else given
    with Trial({1: _Program(function)}, numbers=numbers, seconds=seconds) as trial:
        return trial.stage(1, {0: _form(given)})


# ---- what it finds out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        LAYER,
        lambda h: {"h": LAYER(h).detach(), "n": 3, "none": None, "same": [h, h]},
        lambda h: (h.long(), h[:, :1].expand(2, 5), h.T, LAYER.weight),
        lambda h: LAYER.weight,
        lambda h: "no tensor",
        lambda h: torch.relu_(h) + torch.tensor(2.0).item(),
        lambda h: torch.utils.checkpoint.checkpoint(LAYER, h, use_reentrant=False),
    ],
)
def test_the_form_is_that_of_the_real_call(function: Callable[[Any], object], numbers: bool) -> None:
    given = torch.ones(2, 4, requires_grad=True)
    outcome = _try(function, given, numbers=numbers)
    expected = _form(function(given * 1))
    if isinstance(function(given * 1), nn.Parameter):  # travels as a tensor
        expected = _form(torch.empty(3, 4, requires_grad=True))
    assert outcome == Made({2: expected})


@pytest.mark.parametrize("numbers", [False, True])
def test_what_is_compiled_is_tried_as_it_was_written(numbers: bool) -> None:
    compiled = torch.compile(LAYER, backend="eager")
    assert _try(compiled, numbers=numbers) == _try(LAYER, numbers=numbers)
    assert isinstance(_try(compiled, torch.ones(2, 5), numbers=numbers), Raised)


def test_under_no_grad_nothing_needs_a_gradient():
    with torch.no_grad():
        assert _try(LAYER) == Made({2: _form(torch.ones(2, 3))})


def _unpack(received: Any) -> object:
    first, second = received
    return first + second


def _positive(h: torch.Tensor) -> torch.Tensor:
    assert h.shape[1] == 5, "five are needed"
    return h


MISFITS: dict[str, tuple[Callable[[Any], object], object, str, str]] = {
    "width": (LAYER, torch.ones(2, 5), "torch", "RuntimeError"),
    "dtype": (LAYER, torch.ones(2, 4, dtype=torch.float64), "torch", "RuntimeError"),
    "a dict": (LAYER, {"h": torch.ones(2, 4)}, "torch", "TypeError"),
    "index": (nn.Embedding(3, 4), torch.ones(2, 4), "torch", "RuntimeError"),
    "check of a module": (nn.BatchNorm1d(4), torch.ones(2, 4, 1, 1), "torch", "ValueError"),
    "unpacking": (_unpack, (torch.ones(2), torch.ones(2), None), "python", "ValueError"),
    "key": (lambda received: received["x"], {"h": torch.ones(2)}, "python", "KeyError"),
    "attribute": (lambda received: received.hidden, torch.ones(2), "python", "AttributeError"),
    "call": (lambda received: LAYER(*received), (torch.ones(2, 4), 3), "torch", "TypeError"),
    "assertion": (_positive, torch.ones(2, 4), "python", "AssertionError"),
    "what is returned": (lambda received: (n for n in range(3)), torch.ones(2), "epl", "UsageError"),
}


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_found_with_its_lines(name: str, numbers: bool) -> None:
    function, given, whose, kind = MISFITS[name]
    outcome = _try(function, given, numbers=numbers)
    assert isinstance(outcome, Raised)
    assert (outcome.whose, outcome.kind) == (whose, kind)
    assert outcome.received.endswith(" from stage 0")
    if whose == "python":
        assert outcome.lines[-1][0] == __file__
        assert __file__ in outcome.trace


def test_a_later_stage_sees_what_an_earlier_one_of_the_same_process_left():
    kept: list[torch.Tensor] = []
    first, second = _Program(lambda h: kept.append(h) or h * 2), _Program(lambda h: h + kept.pop())
    with Trial({0: first, 1: second}, numbers=False, seconds=20) as trial:
        made = trial.stage(0, {})
        assert isinstance(made, Raised)  # None * 2
        assert isinstance(trial.stage(1, {0: _form(torch.ones(2))}), Raised)
    first = _Program(lambda h: kept.append(torch.ones(2)) or torch.ones(2))
    with Trial({0: first, 1: second}, numbers=False, seconds=20) as trial:
        assert isinstance(trial.stage(0, {}), Made)
        assert isinstance(trial.stage(1, {0: _form(torch.ones(2))}), Made)
    assert kept == []


# ---- what it cannot tell -----------------------------------------------------------------------------------------------


def _raise_after_error(h: torch.Tensor) -> object:
    try:
        return h.view(77)
    except RuntimeError:
        raise ValueError("not of 77") from None


def _go_on_after_error(h: torch.Tensor) -> object:
    try:
        return h.view(77)
    except RuntimeError:
        return h


NEEDS_NUMBERS: dict[str, Callable[[Any], object]] = {
    "item": lambda h: h * h.sum().item(),
    "bool": lambda h: h if h.sum() > 0 else -h,
    "tolist": lambda h: h.tolist(),
    "numpy": lambda h: torch.from_numpy(h.numpy()),
    "mask": lambda h: h[h > 0],
    "caught": _go_on_after_error,
    "raised again": _raise_after_error,
    "not written": lambda h: (_ for _ in ()).throw(NotImplementedError("later")),
    "own error": lambda h: (_ for _ in ()).throw(LookupError("of no known kind")),
}


@pytest.mark.parametrize("name", NEEDS_NUMBERS)
def test_what_needs_numbers_is_not_known_without(name: str) -> None:
    assert isinstance(_try(NEEDS_NUMBERS[name]), Unknown)


@pytest.mark.parametrize("numbers", [False, True])
def test_what_reaches_out_of_the_process_ends_the_trial_before_it_happens(numbers: bool, tmp_path: Path) -> None:
    there, file = tmp_path / "there", tmp_path / "file"
    there.mkdir()
    (there / "old").write_text("old")
    read, write = os.pipe()
    acts: list[Callable[[Any], object]] = [
        lambda h: file.write_text("something"),
        lambda h: file.open("a").write("something"),
        lambda h: os.open(file, os.O_CREAT | os.O_WRONLY),
        lambda h: (there / "old").unlink(),
        lambda h: (there / "old").rename(there / "new"),
        lambda h: (there / "more").mkdir(),
        lambda h: subprocess.run(["touch", str(file)], check=True),
        lambda h: os.system(f"touch {file}"),
        lambda h: os.fork(),
        lambda h: os.kill(os.getppid(), 9),
        lambda h: _caught(lambda: file.write_text("something")),
    ]
    for act in acts:
        outcome = _try(act, numbers=numbers)
        assert isinstance(outcome, Unknown)
        assert "reaches out" in outcome.why
    assert isinstance(_try(lambda h: os.write(write, b"lost") and h, numbers=numbers), Made), "written to nowhere"
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.close(read)
    os.close(write)
    assert [p.name for p in tmp_path.rglob("*")] == ["there", "old"]


def _caught(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:
        return


def test_open_files_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\nthree\n")
    with path.open("r+") as file:
        assert file.readline() == "one\n"
        place = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        assert isinstance(_try(lambda h: os.read(file.fileno(), 2)), Unknown)
        assert isinstance(_try(lambda h: (file.write("lost"), file.flush(), h)[2]), Made)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == place
    assert path.read_text() == "one\ntwo\nthree\n"


@pytest.mark.parametrize("numbers", [False, True])
def test_memory_that_processes_share_is_read_only(numbers: bool) -> None:
    shared = mmap.mmap(-1, 8)
    batch = torch.ones(2, 4).share_memory_()
    array = batch.numpy()
    died = Unknown("the process that tried it died")
    assert _try(lambda h: shared.write(b"changed"), numbers=numbers) == died
    assert _try(lambda h: array.fill(3.0), numbers=numbers) == died
    if numbers:
        assert _try(lambda h: batch.mul_(2), numbers=numbers) == died
    assert isinstance(_try(lambda h: (h + batch, shared[0], array.sum())[:2], numbers=numbers), Made)
    assert shared[:] == bytes(8)
    assert batch.eq(1).all()
    shared.close()


def test_a_copy_that_hangs_dies_or_leaves_is_not_known():
    start = time.monotonic()
    assert _try(lambda h: time.sleep(100), seconds=0.5) == Unknown("it took too long")
    assert time.monotonic() - start < 30
    died = Unknown("the process that tried it died")
    assert _try(lambda h: ctypes.string_at(0)) == died
    assert _try(lambda h: os._exit(3)) == died
    assert _try(lambda h: sys.exit(3)) == died
    assert _try(lambda h: (_ for _ in ()).throw(KeyboardInterrupt)) == died


def test_after_a_copy_has_died_nothing_is_known_either():
    with Trial({1: _Program(lambda h: os._exit(3))}, numbers=False, seconds=20) as trial:
        for _ in range(3):
            assert isinstance(trial.stage(1, {}), Unknown)


def test_threads_are_not_copied_so_what_python_code_says_is_not_believed():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:

        def stage(h: torch.Tensor) -> torch.Tensor:
            assert thread.is_alive()
            return h

        for numbers in (False, True):
            assert isinstance(_try(stage, numbers=numbers), Unknown)
            assert isinstance(_try(LAYER, torch.ones(2, 5), numbers=numbers), Raised), "but torch is"
            assert isinstance(_try(_unpack, (1, 2, 3), numbers=numbers), Raised), "and so are types and unpacking"
    finally:
        done.set()
        thread.join()


def test_another_thread_makes_no_copy():
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(_try(LAYER)))
    thread.start()
    thread.join()
    assert found == [Unknown("it was called on a thread that is not the main one")]


def test_without_a_new_process_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("too many")

    monkeypatch.setattr(os, "fork", refuse)
    assert _try(LAYER) == Unknown("no process could be started: too many")


# ---- nothing is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [False, True])
def test_the_program_is_as_it_was(numbers: bool, capfd: pytest.CaptureFixture[str]) -> None:
    norm, seen = nn.BatchNorm1d(4), []
    generators = [random.getstate(), torch.get_rng_state()]
    open_files = sorted(os.listdir("/proc/self/fd"))

    def stage(h: torch.Tensor) -> torch.Tensor:
        seen.append(random.random())
        print("printed", flush=True)
        print("printed", file=sys.stderr, flush=True)
        os.write(1, b"printed")
        norm.weight.grad = torch.ones(4)
        torch.manual_seed(3)
        os.environ["EPL_OF_THE_COPY"] = "1"
        return nn.functional.dropout(norm(h + torch.rand(4)))

    for _ in range(2):
        assert isinstance(_try(stage, numbers=numbers), Made)
    assert seen == []
    assert norm.num_batches_tracked == 0
    assert norm.weight.grad is None
    assert norm.running_mean.count_nonzero() == 0
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert capfd.readouterr() == ("", "")
    assert sorted(os.listdir("/proc/self/fd")) == open_files  # that no process is left, the house rules check


def test_the_copy_draws_what_the_program_will_draw():
    def stage(h: torch.Tensor) -> tuple[float, torch.Tensor]:
        return random.random(), h

    outcome = _try(stage)
    assert outcome == Made({2: _form((random.random(), torch.ones(2, 4)))})
