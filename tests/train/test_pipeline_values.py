"""What users let travel through a pipeline, and how they use it, on real ranks: each case against plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import epl
from epl.train.micro import cut_batch
from tests.harness import run_ranks

STEPS = 3
Function = Callable[..., Any]


@dataclasses.dataclass
class Case:
    """A pipeline of two or three stages; stage s runs functions[s](modules[s], received, *micro_batch)."""

    functions: Sequence[Function]
    modules: Callable[[], list[nn.Module]] | None = None
    batch: Callable[[int], tuple[Any, ...]] = lambda step: _batch(6)
    micro_batches: int = 3
    before_step: Callable[[list[nn.Module], int], None] = lambda modules, step: None
    backward: Callable[[object, object], None] | None = None
    strategies: Sequence[str] = ("PreferBackward",)

    def build(self) -> list[nn.Module]:
        torch.manual_seed(0)
        make = self.modules or (lambda: [nn.Linear(4, 4) for _ in self.functions])
        return [module.double() for module in make()]


def _batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.arange(rows) % 4


def _first(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(x).tanh()


def _middle(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return h + module(h).tanh()


def _last(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(h), y)


def _train(name: str, strategy: str) -> tuple[list[list[float]], list[dict[str, torch.Tensor | None]]]:
    """The losses of every step on this rank, and its stage's gradients and weights after every step."""
    case = CASES[name]
    settings = {"pipeline.num_micro_batch": case.micro_batches, "pipeline.strategy": strategy}
    epl.init(epl.Config(settings | {"communication.timeout": 30}))
    rank = epl.Env.get().cluster.rank
    modules = case.build()
    stage = modules[rank]
    optimizer = torch.optim.SGD(_trained(stage), lr=0.1, momentum=0.9)
    losses, states = [], []
    for step in range(STEPS):
        case.before_step(modules, step)
        optimizer.zero_grad()
        found = epl.forward_backward(
            lambda received, *mb: case.functions[rank](stage, received, *mb),
            *case.batch(step),
            module=stage,
            backward=case.backward,
        )
        optimizer.step()
        losses.append(found.tolist())
        states.append(_state(stage))
    return losses, states


def _plain(name: str) -> tuple[list[list[float]], list[list[dict[str, torch.Tensor | None]]]]:
    case = CASES[name]
    modules = case.build()
    optimizer = torch.optim.SGD([p for m in modules for p in _trained(m)], lr=0.1, momentum=0.9)
    losses, states = [], []
    for step in range(STEPS):
        case.before_step(modules, step)
        optimizer.zero_grad()
        batch = case.batch(step)
        rows = len(batch[0])
        losses.append([])
        for piece in cut_batch(batch, rows, min(case.micro_batches, rows)):
            value = None
            for function, module in zip(case.functions, modules, strict=True):
                value = function(module, value, *piece)
            if value.requires_grad:
                (value * len(piece[0]) / rows).sum().backward()
            losses[-1].append(value.item())
        optimizer.step()
        states.append([_state(module) for module in modules])
    return losses, states


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [*module.parameters()] or [nn.Parameter(torch.zeros(1))]


def _state(module: nn.Module) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for key, parameter in module.named_parameters():
        found[key] = parameter.detach().clone()
        found[f"{key}.grad"] = parameter.grad.clone() if parameter.grad is not None else None
    return found


# ---- what travels ------------------------------------------------------------------------------------------------------


def _other_lengths(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = (2, 5, 2)[step]
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, length, 4, generator=generator, dtype=torch.float64), torch.arange(6 * length).view(6, -1) % 4


def _last_of_sequence(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(h).flatten(0, 1), y.flatten())


def _count(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> Any:
    return {"h": module(x), "step": step, "text": "a" * step, "nested": [None, (step / 3, {step})]}


def _use_count(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    expected = {"step": step, "text": "a" * step, "nested": [None, (step / 3, {step})]}
    assert {key: value for key, value in received.items() if key != "h"} == expected
    return functional.cross_entropy(module(received["h"]) * (1 + received["step"]), y)


def _many_dtypes(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    h = module(x)
    return {
        "half": h.to(torch.bfloat16),
        "float": h.float(),
        "double": h,
        "complex": torch.complex(h, h.tanh()),
        "int8": y.to(torch.int8),
        "bool": y > 1,
        "scalar": h.sum(),
        "empty": h[:0],
        "strided": h.T[::2],
        "expanded": h[:1].expand(3, 4),
        "twice": [h, h],
        "none": None,
    }


def _use_many(module: nn.Module, received: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = {key: value.dtype for key, value in received.items() if isinstance(value, torch.Tensor)}
    assert found["int8"] == torch.int8
    assert found["bool"] == torch.bool
    assert received["none"] is None
    assert received["twice"][0] is received["twice"][1]
    assert received["empty"].shape == (0, 4)
    h = received["half"].double() + received["float"].double() + received["double"] + received["complex"].abs()
    h = h + received["twice"][1] * received["int8"].unsqueeze(1) + received["scalar"] + received["expanded"].mean(dim=0)
    h = h * received["bool"].unsqueeze(1) + received["strided"].sum() + received["empty"].sum()
    return functional.cross_entropy(module(h), y)


@dataclasses.dataclass
class Outputs:
    """What a stage of Hugging Face's kind returns."""

    hidden: torch.Tensor
    mask: torch.Tensor
    cache: tuple[torch.Tensor, ...] | None = None


def _to_dataclass(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> Outputs:
    return Outputs(module(x), y > 0, (x,))


def _through_dataclass(module: nn.Module, received: Outputs, x: torch.Tensor, y: torch.Tensor) -> Outputs:
    return dataclasses.replace(received, hidden=module(received.hidden).tanh() * received.mask.unsqueeze(1))


def _from_dataclass(module: nn.Module, received: Outputs, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(received.hidden + received.cache[0]), y)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)


def _with_unused(module: Two, received: None, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return module.used(x), module.unused(x)


def _unused(module: nn.Module, received: tuple[torch.Tensor, ...], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(received[0]), y)


def _unchanged(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return received


def _partly_unchanged(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"raw": h, "new": module(h)}


def _of_partly_unchanged(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(received["raw"] * received["new"]), y)


def _lend_weight(module: nn.Linear, received: None, x: torch.Tensor, y: torch.Tensor) -> Any:
    return module(x), module.weight


def _with_lent_weight(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(module(received[0]), received[1]), y)


def _linear(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(x)


def _in_place(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(functional.relu_(h)), y)


def _in_place_middle(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(functional.relu(h, inplace=True)).tanh()


def _now_and_then(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> Any:
    return module(x) if bool(y[0] % 4 == 0) else (module(x), None, "and more")


def _use_now_and_then(module: nn.Module, received: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = received if isinstance(received, torch.Tensor) else received[0] * 2
    return functional.cross_entropy(module(h), y)


def _nothing(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> None:
    return None


def _alone(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert received is None
    return functional.cross_entropy(module(x), y)


# ---- how it is used ----------------------------------------------------------------------------------------------------


def _freeze_first(modules: list[nn.Module], step: int) -> None:
    modules[0].requires_grad_(False)


def _freeze_middle(modules: list[nn.Module], step: int) -> None:
    modules[1].requires_grad_(False)


def _freeze_last(modules: list[nn.Module], step: int) -> None:
    modules[-1].requires_grad_(False)


def _freeze_all_but_last(modules: list[nn.Module], step: int) -> None:
    for module in modules[:-1]:
        module.requires_grad_(False)


def _thaw(modules: list[nn.Module], step: int) -> None:
    modules[0].requires_grad_(step == 1)


def _no_grad_first(module: nn.Module, received: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


def _users_backward(output: object, gradient: object) -> None:
    torch.autograd.backward(output, gradient)


def _users_backward_of_a_tuple(output: object, gradient: object) -> None:
    outputs, gradients = (output, gradient) if isinstance(output, tuple) else ((output,), (gradient,))
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _shape_of_one(module: nn.Module, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(h), y).reshape(1, 1)


THREE = (_first, _middle, _last)
ALL = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubble")
CASES = {
    "chain": Case(THREE, strategies=ALL),
    "other shapes in each step": Case((_first, _middle, _last_of_sequence), batch=_other_lengths),
    "other rows in each step": Case(THREE, batch=lambda step: _batch((7, 4, 6)[step]), micro_batches=4),
    "fewer rows than micro batches": Case(THREE, batch=lambda step: _batch((3, 1, 8)[step]), micro_batches=5),
    "values that change": Case((_count, _use_count), batch=lambda step: (*_batch(6), step)),
    "many dtypes": Case((_many_dtypes, _use_many), strategies=("PreferBackward", "ZeroBubble")),
    "dataclass": Case((_to_dataclass, _through_dataclass, _from_dataclass)),
    "unused output": Case((_with_unused, _unused), modules=lambda: [Two(), nn.Linear(4, 4)]),
    "unused output, two halves": Case(
        (_with_unused, _unused), modules=lambda: [Two(), nn.Linear(4, 4)], strategies=("ZeroBubble",)
    ),
    "unchanged": Case(
        (_first, _unchanged, _last),
        modules=lambda: [nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)],
        strategies=("PreferBackward", "ZeroBubble"),
    ),
    "partly unchanged": Case(
        (_first, _partly_unchanged, _of_partly_unchanged), strategies=("PreferBackward", "ZeroBubble")
    ),
    "lent weight": Case((_lend_weight, _with_lent_weight), strategies=("PreferBackward", "ZeroBubble")),
    "in place, last": Case((_linear, _in_place)),
    "in place, middle": Case((_linear, _in_place_middle, _last), strategies=("PreferBackward", "ZeroBubble")),
    "another form now and then": Case((_now_and_then, _use_now_and_then), micro_batches=6),
    "nothing": Case((_nothing, _alone)),
    "frozen first": Case(THREE, before_step=_freeze_first),
    "frozen middle": Case(THREE, before_step=_freeze_middle, strategies=("PreferBackward", "ZeroBubble")),
    "frozen last": Case(THREE, before_step=_freeze_last),
    "frozen but last": Case(THREE, before_step=_freeze_all_but_last, strategies=("PreferBackward", "ZeroBubble")),
    "frozen now and then": Case(THREE, before_step=_thaw),
    "no grad in the first": Case((_no_grad_first, _middle, _last)),
    "own backward": Case(THREE, backward=_users_backward),
    "own backward of several": Case(
        (_with_unused, _unused), modules=lambda: [Two(), nn.Linear(4, 4)], backward=_users_backward_of_a_tuple
    ),
    "loss of shape (1, 1)": Case((_first, _shape_of_one)),
}


@pytest.mark.parametrize(("name", "strategy"), [(name, s) for name, case in CASES.items() for s in case.strategies])
def test_equals_plain_pytorch(name: str, strategy: str) -> None:
    expected_losses, expected_states = _plain(name)
    for rank, (losses, states) in enumerate(run_ranks(_train, len(CASES[name].functions), name, strategy)):
        assert losses == [pytest.approx(of_step, abs=1e-12) for of_step in expected_losses]
        for state, of_step in zip(states, expected_states, strict=True):
            assert state.keys() == of_step[rank].keys()
            for key, expected in of_step[rank].items():
                found = state[key]
                assert (found is None) == (expected is None), f"{key}: found {found}, expected {expected}"
                if expected is not None and found is not None:
                    torch.testing.assert_close(
                        found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
                    )


# ---- other loops -------------------------------------------------------------------------------------------------------


def _ready(**settings: object) -> int:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    epl.init(epl.Config({"pipeline.num_micro_batch": 3, "communication.timeout": 30} | named))
    return epl.Env.get().cluster.rank


def _evaluate_around_training() -> list[object]:
    """Evaluation of any kind of value, by all micro batches, before, between and after steps."""
    rank = _ready()
    stage = CASES["chain"].build()[rank]
    x, y = _batch(7)

    def score(received, x, y):
        if rank == 2:
            assert not torch.is_grad_enabled()
            return {"logits": stage(received), "rows": len(y), "name": "scores", "none": None}
        return THREE[rank](stage, received, x, y)

    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    found: list[object] = [epl.forward_eval(score, x, y)]
    for _ in range(2):
        optimizer.zero_grad()
        epl.forward_backward(lambda received, *mb: THREE[rank](stage, received, *mb), x, y, module=stage)
        optimizer.step()
        found.append(epl.forward_eval(score, x[:5], y[:5]))
    return found


def test_evaluation_before_between_and_after_steps() -> None:
    modules = CASES["chain"].build()
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    x, y = _batch(7)

    def score(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return modules[2](_middle(modules[1], _first(modules[0], None, x, y), x, y))

    expected = [score(x, y)]
    for _ in range(2):
        optimizer.zero_grad()
        h = _middle(modules[1], _first(modules[0], None, x, y), x, y)
        _last(modules[2], h, x, y).backward()
        optimizer.step()
        expected.append(score(x[:5], y[:5]))
    for found in run_ranks(_evaluate_around_training, 3):
        for parts, whole in zip(found, expected, strict=True):
            assert [(part["rows"], part["name"], part["none"]) for part in parts] == [
                (rows, "scores", None) for rows in ([3, 2, 2] if len(whole) == 7 else [2, 2, 1])
            ]
            torch.testing.assert_close(torch.cat([part["logits"] for part in parts]), whole, rtol=1e-12, atol=1e-12)


def _two_models(replicas: int) -> list[list[torch.Tensor]]:
    """Two pipelines over the same devices take turns, as a generator and a critic do."""
    rank = _ready()
    topology = epl.setup_process_groups([("data", replicas), ("pipe", 2)])
    place, last = topology.rank("pipe"), topology.is_last("pipe")
    rows = slice(3 * topology.rank("data"), 3 * topology.rank("data") + 3) if replicas == 2 else slice(None)
    x, y = (t[rows] for t in _batch(6))
    stages = [CASES["chain"].build()[place + n] for n in (0, 1)]
    optimizers = [torch.optim.Adam(stage.parameters(), lr=0.01) for stage in stages]
    for _ in range(STEPS):
        for stage, optimizer in zip(stages, optimizers, strict=True):

            def run(received, x, y, stage=stage):
                return _last(stage, received, x, y) if last else _first(stage, None, x, y)

            optimizer.zero_grad()
            epl.forward_backward(run, x, y, module=stage)
            optimizer.step()
    assert rank == topology.rank("data") * 2 + place
    return [[p.detach() for p in stage.parameters()] for stage in stages]


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_pipelines_take_turns(replicas: int) -> None:
    x, y = _batch(6)
    models = [nn.ModuleList(CASES["chain"].build()[n : n + 2]) for n in (0, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for _ in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _last(model[1], _first(model[0], None, x, y), x, y).backward()
            optimizer.step()
    for rank, found in enumerate(run_ranks(_two_models, 2 * replicas, replicas)):
        for parameters, model in zip(found, models, strict=True):
            for p, expected in zip(parameters, model[rank % 2].parameters(), strict=True):
                torch.testing.assert_close(p, expected.detach(), rtol=1e-10, atol=1e-10)


def _count_groups() -> list[int]:
    """How many process groups there are while modules take turns."""
    _ready()
    topology = epl.setup_process_groups([("data", 2), ("pipe", 2)])
    stages = [nn.Linear(4, 4) for _ in range(2)]
    counts = []
    for step in range(6):
        stage = stages[step % 2]
        function = _last if topology.is_last("pipe") else _first
        epl.forward_backward(lambda received, *mb, s=stage, f=function: f(s, received, *mb), *_floats(), module=stage)
        counts.append(torch.distributed.get_pg_count())
    return counts


def _floats() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _batch(6)
    return x.float(), y


def test_modules_that_take_turns_make_no_new_groups() -> None:
    for counts in run_ranks(_count_groups, 4):
        assert len(set(counts[1:])) == 1, counts


def _batch_norm() -> list[torch.Tensor]:
    """The running statistics of one of two replicas, which see different rows."""
    _ready()
    topology = epl.setup_process_groups([("data", 2), ("pipe", 1)])
    x, y = _floats()
    stage = nn.BatchNorm1d(4)
    for _ in range(2):
        epl.forward_backward(lambda received, x, y: _last(stage, x, x, y), x + topology.rank("data"), y, module=stage)
    return [stage.running_mean, stage.running_var]


def test_buffers_of_replicas_stay_those_of_the_first() -> None:
    x, y = _floats()
    reference = nn.BatchNorm1d(4)
    for piece in cut_batch((x, y), 6, 3) * 2:
        _last(reference, piece[0], *piece)
    for mean, var in run_ranks(_batch_norm, 2):
        torch.testing.assert_close(mean, reference.running_mean)
        torch.testing.assert_close(var, reference.running_var)


def _accumulate() -> list[list[torch.Tensor]]:
    """Two pipelines, and two calls before a step, of rows that differ between replicas and calls."""
    _ready()
    topology = epl.setup_process_groups([("data", 2), ("pipe", 2)])
    stage = CASES["chain"].build()[topology.rank("pipe")]

    def run(received, batch, scale):
        assert scale == [2.0, "no tensor"]
        x, y = batch["x"], batch["y"]
        return _last(stage, received, x, y) if topology.is_last("pipe") else _first(stage, None, x, y)

    for call in range(2):
        x, y = _batch(*((5, 1), (2, 2))[topology.rank("data")])
        batch = {"x": x + call, "y": y}
        epl.forward_backward(run, batch, [2.0, "no tensor"], module=stage)
    return [p.grad for p in stage.parameters()]


def test_calls_before_a_step_add_up() -> None:
    model = CASES["chain"].build()
    for call in range(2):
        parts = [_batch(5, 1), _batch(2, 2)]
        x, y = torch.cat([x + call for x, _ in parts]), torch.cat([y for _, y in parts])
        _last(model[1], _first(model[0], None, x, y), x, y).backward()
    for rank, found in enumerate(run_ranks(_accumulate, 4)):
        for gradient, p in zip(found, model[rank % 2].parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-10)


def _tied(calls: int, replicas: int) -> list[tuple[float, list[torch.Tensor]]]:
    """A weight used by the first and the last stage, which may be one device; several calls before each step."""
    _ready()
    world_size = epl.Env.get().cluster.world_size
    topology = epl.setup_process_groups([("data", replicas), ("pipe", world_size / replicas)])
    first, last = CASES["chain"].build()[:2]
    for layer in (first, last):
        epl.parallel.tie("weight", layer.weight)
    own = [layer for layer, here in ((first, topology.is_first("pipe")), (last, topology.is_last("pipe"))) if here]
    stage = nn.ModuleList(own)

    def run(received, x, y):
        h = _first(own[0], None, x, y) if topology.is_first("pipe") else received
        return _last(own[-1], h, x, y) if topology.is_last("pipe") else h

    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        for call in range(calls):
            epl.forward_backward(run, *_batch(6, seed=10 * step + call), module=stage)
        norm = nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
        optimizer.step()
        found.append((norm.item(), [layer.weight.detach().clone() for layer in own]))
    return found


@pytest.mark.parametrize(
    ("ranks", "replicas", "calls"),
    [
        (2, 1, 1),
        (4, 2, 1),
        (1, 1, 1),
        (1, 1, 2),
        (2, 1, 2),
        (4, 2, 2),
    ],
)
def test_a_weight_tied_between_first_and_last_stage(ranks: int, replicas: int, calls: int) -> None:
    first, last = CASES["chain"].build()[:2]
    last.weight = first.weight
    parameters = [first.weight, first.bias, last.bias]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    expected = []
    for step in range(2):
        optimizer.zero_grad()
        for call in range(calls):
            x, y = _batch(6, seed=10 * step + call)
            _last(last, _first(first, None, x, y), x, y).backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        expected.append((norm.item(), first.weight.detach().clone()))
    for found in run_ranks(_tied, ranks, calls, replicas):
        for (norm, weights), (expected_norm, weight) in zip(found, expected, strict=True):
            assert norm == pytest.approx(expected_norm, abs=1e-10)
            for copy in weights:
                torch.testing.assert_close(copy, weight, rtol=1e-10, atol=1e-10)


# ---- modules that take turns -----------------------------------------------------------------------------------------


class _Tasks:
    """One body and two heads; what travels to the second head is larger."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.heads = [nn.Linear(4, 4).double(), nn.Linear(20, 4).double()]

    def first(self, task: int, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh().repeat(1, 5 if task else 1)

    def last(self, task: int, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.heads[task](h), y)


def _takes_turns() -> list[float]:
    epl.init(epl.Config({"pipeline.num_micro_batch": 2, "communication.timeout": 30}))
    rank, tasks, found = epl.Env.get().cluster.rank, _Tasks(), []
    for task in (0, 1, 0, 1):

        def stage(received: Any, x: torch.Tensor, y: torch.Tensor, task: int = task) -> torch.Tensor:
            return tasks.last(task, received, y) if rank else tasks.first(task, x)

        losses = epl.forward_backward(stage, *_batch(6), module=tasks.heads[task] if rank else tasks.body)
        evaluated = epl.forward_eval(stage, *_batch(6))
        found += [losses.mean().item(), torch.stack(evaluated).mean().item()]
    own = tasks.heads[1] if rank else tasks.body
    return [*found, own.weight.grad.norm().item()]


def test_heads_that_take_turns_after_one_body():
    # The rank of the body has one list of modules, that of the heads two: each kept its own memory of what was sent last, and Gloo
    # aborted when the first head came again.
    tasks, expected = _Tasks(), []
    x, y = _batch(6)
    for task in (0, 1, 0, 1):
        loss = tasks.last(task, tasks.first(task, x), y)
        loss.backward()
        expected += [loss.item()] * 2
    for own, found in zip([tasks.body, tasks.heads[1]], run_ranks(_takes_turns, 2), strict=True):
        assert found == pytest.approx([*expected, own.weight.grad.norm().item()])
