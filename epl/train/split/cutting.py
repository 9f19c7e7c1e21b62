"""How the split TaskGraphs of a model are cut: decided once, alike on all ranks, and carried out on this one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from epl.cluster.communication import Job
from epl.config import Config
from epl.errors import SplitError, list_problems
from epl.graph import TaskGraphs
from epl.graph.deferred import is_deferred, materialise_whole
from epl.parallel.split.choose import choose
from epl.parallel.split.cutparameter import become_plain
from epl.parallel.split.part import SplitPart
from epl.parallel.split.ranks import SplitRanks
from epl.plan.split.layout import ParameterLayout
from epl.plan.split.splitplan import SplitPlan
from epl.report.log import notice, warn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def split_parameters(model: nn.Module, taskgraphs: TaskGraphs, names: Collection[str]) -> set[str]:
    """The parameters that may be cut, by their first names: those that belong to these TaskGraphs under all their names.

    A weight that is tied to another TaskGraph stays whole, on every rank, with a notice.
    """
    owners: dict[int, set[str | None]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        taskgraph = taskgraphs.of_parameter.get(name)
        owners.setdefault(id(parameter), set()).add(None if taskgraph is None else taskgraph.name)
        first.setdefault(id(parameter), name)
    for key, found in owners.items():
        if len(found) > 1 and found.intersection(names):
            notice(
                f"{first[key]} is tied between TaskGraphs ({', '.join(sorted(map(str, found)))}): it is not split, every rank has the "
                "whole of it"
            )
    own = {first[key] for key, found in owners.items() if found <= set(names)}
    if not own:
        warn(
            f"nothing is split of {', '.join(sorted(names))}: no parameter belongs to it alone, so each of its ranks computes all of it. "
            "Build what is to be cut under epl.split, or name it with epl.annotate"
        )
    return own


@contextlib.contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Inside, the model is planned as for training, whatever its first call is for: a teacher must be cut like its student.

    What learns nothing at all is planned as if it learned everything. Whether some of it is frozen counts, as in training.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    thawed = [] if any(p.requires_grad for p in parameters) else parameters
    try:
        for parameter in thawed:
            parameter.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter in thawed:
            parameter.requires_grad_(False)


Decide = Callable[[nn.Module, int, Iterable[Arguments], Mapping[str, None]], SplitPlan]
"""The plan of a module for so many ranks that is called like one of these examples, some of whose parameters are not to be cut."""


def plan_of(
    model: nn.Module,
    part: nn.Module,
    own: Collection[str],
    ways: int,
    examples: Iterable[Arguments],
    decide: Decide,
) -> SplitPlan:
    """How `part` of a model is split, of whose parameters only `own` may be cut."""
    fixed = {name: None for name, _ in part.named_parameters() if name not in own}
    with as_in_training(model):
        return decide(part, ways, examples, fixed)


def plans_of_all(wanted: Mapping[str, Callable[[], SplitPlan]]) -> dict[str, SplitPlan]:
    """The plans of several parts, by name; SplitError with what is in the way of each of them."""
    found, problems = dict[str, SplitPlan](), list[str]()
    for name, make in wanted.items():
        try:
            found[name] = make()
        except SplitError as error:
            problems.append(f"{name}: {error}")
    if len(problems) > 1:
        raise SplitError(list_problems("parts of the model cannot be split", problems))
    if problems:
        raise SplitError(problems[0])
    return found


def choose_by(root: nn.Module, ways: int, examples: Iterable[Arguments], fixed: Mapping[str, None]) -> SplitPlan:
    """The plan of a module by the first example with which its own code does not fail."""
    failure: Exception | None = None
    for args, kwargs in examples:
        try:
            return choose(root, ways, args, kwargs, fixed=fixed)
        except SplitError:
            raise
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def decide(job: Job, root: nn.Module, ways: int, examples: Iterable[Arguments], fixed: Mapping[str, None]) -> SplitPlan:
    """Rank 0's plan for a module that is called like this, on every rank; what cannot be split raises on all ranks."""
    found: SplitPlan | None = None
    problem = ""
    try:
        found = choose_by(root, ways, examples, fixed)
    except SplitError as error:
        problem = str(error)
    everyone = job.gather("deciding how the model is split", problem)
    told = next((text for text in everyone if text), "")
    if told:
        raise SplitError(str(told))
    plan = job.share("deciding how the model is split", found)
    assert isinstance(plan, SplitPlan)
    return plan


def agree_on_deferred(job: Job, model: nn.Module) -> None:
    """Large parameters that have no memory yet (epl/graph/deferred) must come out the same on all ranks; all ranks call it together.

    Each rank makes its own block from the random state in which the parameter was built. Where ranks were seeded differently it
    is built whole, so that rank 0's numbers can be sent.
    """
    waiting = [(name, p) for name, p in model.named_parameters() if is_deferred(p)]
    samples = [(name, p.detach()[0].flatten()[:8].tolist()) for name, p in waiting]
    everyone = job.gather("parameters without memory", samples)
    if all(said == everyone[0] for said in everyone):
        return
    for name, parameter in waiting:
        notice(
            f"{name} is built whole on every rank, and then cut: ranks were seeded differently, and it is to have rank 0's numbers. Call "
            "torch.manual_seed with the same seed on all ranks before the model is built to save that memory"
        )
        materialise_whole(parameter)


class CutParameters:
    """The parameters of a model that are cut over the ranks of a split, and what was cut along with them."""

    def __init__(self, ranks: SplitRanks) -> None:
        self.ranks = ranks
        self.parts: list[SplitPart] = []
        self.layouts: dict[nn.Parameter, ParameterLayout] = {}

    def cut(
        self,
        root: nn.Module,
        plan: SplitPlan,
        config: Config,
        optimizers: Sequence[Optimizer],
        kind: Callable[..., SplitPart] = SplitPart,
        **more: Any,
    ) -> SplitPart:
        """Cut a module in place; the state of these optimizers is cut with it."""
        named = dict(root.named_parameters())
        settings = config.split
        for name, parameter in named.items():
            if name in plan.choices and plan.choices[name] is None and is_deferred(parameter):
                materialise_whole(parameter)
        part = kind(
            root,
            plan,
            self.ranks,
            sequence_parallel=settings.sequence_parallel,
            exact_dropout=settings.exact_dropout,
            **more,
        )
        for name, layout in part.layouts.items():
            parameter = named[name]
            self.layouts[parameter] = layout
            for optimizer in optimizers:
                self.cut_state(optimizer, parameter, layout)
        self.parts.append(part)
        return part

    def cut_state(self, optimizer: Optimizer, parameter: nn.Parameter, layout: ParameterLayout) -> None:
        """What an optimizer has kept for a whole parameter becomes that of the block."""
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == layout.shape:
                optimizer.state[parameter][key] = layout.take(value, self.ranks.rank)

    def undo(self) -> None:
        """Let go: the blocks stay as they are."""
        for part in reversed(self.parts):  # several may have wrapped one and the same forward
            part.undo(gather=False)
        for parameter in self.layouts:
            become_plain(parameter)
        self.parts, self.layouts = [], {}
