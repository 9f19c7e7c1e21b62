"""Correct but odd programs are, to the last bit, what they would be without a rehearsal."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import random
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import epl
import epl.train.pipeline
from epl.errors import UsageError
from epl.train import rehearsal
from epl.train.trial import Outcome, Trial, Unknown
from tests.harness import run_ranks

Function = Callable[..., Any]
ROWS = 6


class Program:
    """A correct program of two stages. `stage` is called as the user's function; what `seen` holds is the program's result."""

    settings: dict[str, Any] = {}  # noqa: RUF012
    width = 4

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.first = rank, folder, rank == 0
        self.layer: nn.Module = nn.Linear(4, 4)
        self.seen: list[Any] = []

    @property
    def functions(self) -> Function | list[Function]:
        return self.stage

    def stage(self, received: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.odd(x if self.first else received)
        return h if self.first else functional.cross_entropy(h, y)

    def odd(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Counts(Program):
    def odd(self, h):
        self.seen.append((len(self.seen), tuple(h.shape), os.getpid()))
        print("printed by the function")
        return self.layer(h)


class Draws(Program):
    def odd(self, h):
        self.seen += [random.random(), numpy.random.rand()]
        h = functional.dropout(self.layer(h), 0.5) * self.seen[-2] + self.seen[-1]
        return h + torch.rand(4)


class Normalises(Program):
    def __init__(self, rank, folder):
        super().__init__(rank, folder)
        self.layer = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.LazyLinear(4)
        )

    def odd(self, h):
        return self.layer(h)


class AsksForANumber(Program):
    def odd(self, h):
        self.seen.append(h.abs().max().item())
        return self.layer(h) / self.seen[-1]


class UsesNumpy(Program):
    def odd(self, h):
        return self.layer(h) + torch.from_numpy(numpy.sin(h.detach().numpy()))


class Branches(Program):
    def stage(self, received, x, y):
        if self.first:
            return self.layer(x) if x.sum() > 0 else (self.layer(x), None)
        h = received if isinstance(received, torch.Tensor) else received[0]
        return functional.cross_entropy(self.layer(h), y)


class AssertsOnNumbers(Program):
    def odd(self, h):
        assert h.isfinite().all()
        return self.layer(h)


class WritesLog(Program):
    def odd(self, h):
        with (self.folder / f"log{self.rank}").open("a") as file:
            file.write("called\n")
        self.seen = [(self.folder / f"log{self.rank}").read_text()]
        return self.layer(h)


class ReadsOn(Program):
    """From a file that it keeps open: processes share the place in it."""

    def __init__(self, rank, folder):
        super().__init__(rank, folder)
        path = folder / f"numbers{rank}"
        path.write_text("\n".join(map(str, range(1000))))
        self.file = os.open(path, os.O_RDONLY)

    def odd(self, h):
        self.seen.append(int(os.read(self.file, 2)))
        return self.layer(h)

    def close(self):
        os.close(self.file)


class ExactType(Program):
    def odd(self, h):
        if type(h) is not torch.Tensor:
            raise TypeError("only tensors")
        return self.layer(h)


class TriesFirst(Program):
    def odd(self, h):
        try:
            h = h.view(99, 99)
        except RuntimeError:
            self.seen.append("other way")
        return self.layer(h)


class Communicates(Program):
    def __init__(self, rank, folder):
        super().__init__(rank, folder)
        self.group = [dist.new_group([0]), dist.new_group([1])][rank]

    def odd(self, h):
        total = h.detach().clone()
        dist.all_reduce(total, group=self.group)
        return self.layer(total)


class HasAThread(Program):
    def __init__(self, rank, folder):
        super().__init__(rank, folder)
        self.numbers: queue.Queue[int | None] = queue.Queue(1)
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.fill)
        self.thread.start()

    def fill(self):
        for number in range(1000):
            while not self.end.is_set():
                with contextlib.suppress(queue.Full):
                    self.numbers.put(number, timeout=0.1)
                    break

    def odd(self, h):
        assert self.thread.is_alive(), "the thread has died"
        self.seen.append(self.numbers.get())
        return self.layer(h)

    def close(self):
        self.end.set()
        self.thread.join()


@torch.library.custom_op("epl_test_rehearsal::wrong", mutates_args=())
def _wrong_rule(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_wrong_rule.register_fake
def _(x):
    return torch.cat([x, x], dim=-1)


@torch.library.custom_op("epl_test_rehearsal::none", mutates_args=())
def _no_rule(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class WrongShapeRule(Program):
    def odd(self, h):
        return self.layer(h) if not self.first else _wrong_rule(h)


class NoShapeRule(Program):
    def odd(self, h):
        return self.layer(h) if not self.first else _no_rule(h)


class Differentiates(Program):
    def odd(self, h):
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(leaf).square().sum(), leaf)
        return self.layer(h) + slope


class IsSlow(Program):
    def odd(self, h):
        if not self.seen:
            self.seen.append("slow at first")
            threading.Event().wait(1.0)
        return self.layer(h)


class IsCompiled(Program):
    def __init__(self, rank, folder):
        super().__init__(rank, folder)
        self.compiled = torch.compile(self.layer, backend="eager")

    def odd(self, h):
        return self.compiled(h)


class WarningsAreErrors(Program):
    def odd(self, h):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.seen.append(h.data_ptr() != 0)
            return self.layer(h)


class Autocasts(Program):
    def odd(self, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(h)


class KeepsBetweenChunks(Program):
    """The second function of a rank uses what the first has put aside."""

    settings = {"pipeline.strategy": "Interleaved", "pipeline.num_chunks": 2}  # noqa: RUF012

    @property
    def functions(self):
        return [self.early, self.late]

    def early(self, received, x, y):
        self.seen.append(x)
        return self.layer(x if received is None else received)

    def late(self, received, x, y):
        h = self.layer(received) + self.seen.pop(0)
        return h if self.first else functional.cross_entropy(h, y)


# What the trials for the first call come to on each rank; empty where an earlier stage has ended them.
ODD: dict[type[Program], tuple[str, str]] = {
    Counts: ("Made", "Made"),
    Draws: ("Made", "Made"),
    Normalises: ("it needs numbers", ""),
    AsksForANumber: ("it needs numbers", ""),
    UsesNumpy: ("it needs numbers", ""),
    Branches: ("it needs numbers", ""),
    AssertsOnNumbers: ("it needs numbers", ""),
    WritesLog: ("it reaches out", ""),
    ReadsOn: ("OSError", ""),
    ExactType: ("Made", "Raised Made"),
    TriesFirst: ("it went on after", ""),
    Communicates: ("it communicates", ""),
    HasAThread: ("AssertionError", ""),
    WrongShapeRule: ("Made Made", "Raised"),
    NoShapeRule: ("it needs numbers", ""),
    Differentiates: ("Made", "Made"),
    IsSlow: ("it took too long", ""),
    IsCompiled: ("Made", "Made"),
    WarningsAreErrors: ("Made", "it needs numbers"),
    Autocasts: ("Made", "Made"),
    KeepsBetweenChunks: ("Made Made", "Made Made"),
}


def _run_odd(evaluates_first: bool, rehearses: bool, folder: Path) -> dict[str, tuple[Any, str]]:
    """By program: its results, to the last bit, and what the trials of the first call came to."""
    return {kind.__name__: _run_program(kind, evaluates_first, rehearses, folder) for kind in ODD}


def _run_program(
    kind: type[Program], evaluates_first: bool, rehearses: bool, folder: Path
) -> tuple[tuple[object, ...] | str, str]:
    epl.init(epl.Config({"pipeline.num_micro_batch": 3, "communication.timeout": 40} | kind.settings))
    rank = epl.Env.get().cluster.rank
    torch.manual_seed(0)
    random.seed(5)
    numpy.random.seed(6)
    outcomes: list[list[Outcome]] = []
    real = rehearsal.rehearse
    with pytest.MonkeyPatch.context() as patch:
        if rehearses:
            patch.setattr(epl.train.pipeline, "rehearse", lambda *args: (outcomes.append([]), real(*args))[1])
            patch.setattr(Trial, "stage", _recorded(Trial.stage, outcomes))
            patch.setattr(rehearsal, "_SECONDS", 0.7 if kind is IsSlow else 10.0)
        else:
            patch.setattr(epl.train.pipeline, "rehearse", lambda *args: True)
        program = kind(rank, folder)
        try:
            result: tuple[object, ...] | str = _train_and_evaluate(program, evaluates_first)
        except UsageError as error:
            result = str(error)
        finally:
            program.close()
    return result, " ".join(_in_short(outcome) for outcome in (outcomes[0] if rehearses else []))


def _recorded(stage: Function, outcomes: list[list[Outcome]]) -> Function:
    def recorded(*args: Any) -> Outcome:
        outcomes[-1].append(stage(*args))
        return outcomes[-1][-1]

    return recorded


def _in_short(outcome: Outcome) -> str:
    return outcome.why if isinstance(outcome, Unknown) else type(outcome).__name__


def _train_and_evaluate(program: Program, evaluates_first: bool) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 4, generator=generator), torch.arange(ROWS) % 4
    losses: list[Any] = []
    if evaluates_first:
        losses.append(epl.forward_eval(program.functions, x, y))
    for _ in range(2):
        program.layer.zero_grad()
        losses.append(epl.forward_backward(program.functions, x, y, module=program.layer))
        with torch.no_grad():
            for p in program.layer.parameters():
                p -= 0.1 * p.grad if p.grad is not None else 0.0
    losses.append(epl.forward_eval(program.functions, x, y))
    pid = os.getpid()
    seen = [[v if v != pid else "pid" for v in s] if isinstance(s, tuple) else s for s in program.seen]
    drawn = (random.random(), numpy.random.rand(), torch.rand(2))
    return losses, program.layer.state_dict(), seen, drawn


def _plain(value: object) -> object:
    """With numbers in the place of tensors, to compare to the last bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@functools.cache
def _odd_results(evaluates_first: bool, rehearses: bool) -> list[dict[str, tuple[Any, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_run_odd, 2, evaluates_first, rehearses, Path(folder), timeout=110)


@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_program_is_as_without_rehearsal(kind: type[Program], evaluates_first: bool) -> None:
    with_it, without = _odd_results(evaluates_first, True), _odd_results(evaluates_first, False)
    for rank, (found, expected) in enumerate(zip(with_it, without, strict=True)):
        result, outcomes = found[kind.__name__]
        assert not isinstance(result, str), result
        assert _plain(result) == _plain(expected[kind.__name__][0])
        assert outcomes.startswith(ODD[kind][rank])
        assert bool(outcomes) == bool(ODD[kind][rank])
