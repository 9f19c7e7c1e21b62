"""Split parts on real ranks: random numbers, which threads would share, and the collectives of a process group."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.parallel.split.choose import choose
from epl.parallel.split.part import SplitPart
from epl.parallel.split.ranks import GroupRanks
from epl.parallel.split.value import SplitTensor, whole
from tests.harness import run_ranks
from tests.parallel.split.cases import in_double, make_case
from tests.parallel.split.parity import close, plans_of, split_copy, train


class Dropping(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 8), reentrant
        self.seen: list[Any] = []

    def inner(self, h: torch.Tensor) -> Any:
        dropped = F.dropout(torch.relu(h) + 1, 0.5)
        self.seen.append(dropped)
        return F.dropout(self.b(dropped), 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.inner(self.a(x))
        return checkpoint(self.inner, self.a(x), use_reentrant=self.reentrant)


def _split(module: nn.Module, x: torch.Tensor, **settings: Any) -> tuple[Any, SplitPart]:
    ranks = GroupRanks(dist.group.WORLD)  # type: ignore[arg-type]
    own = copy.deepcopy(module)
    return own, SplitPart(own, choose(own, ranks.ways, (x,)), ranks, **settings)


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def _masks() -> None:
    """Whole values have a common mask, cut ones each rank its own."""
    x = torch.randn(64, 8)
    own, _ = _split(Dropping(), x)
    out = whole(own(x))
    inner = _gathered((own.seen[0].local != 0).float())
    outer = _gathered((out != 0).float())
    assert not torch.equal(inner[0], inner[1])
    assert torch.equal(outer[0], outer[1])


def _exact_masks(reentrant: bool | None) -> None:
    """`exact_dropout` gives one device's numbers, also where a checkpoint computes them again."""
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    module = Dropping(reentrant).double()
    own, part = _split(module, x, exact_dropout=True)
    reference = copy.deepcopy(module)
    found = []
    for model in (own, reference):
        torch.manual_seed(3)
        out = whole(model(x))
        out.pow(2).sum().backward()
        found.append(out)
    close(found[0].detach(), found[1].detach(), "output")
    for (name, p), q in zip(own.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        close(part.gather(name, p.grad), q.grad, name)


def _rewound(reentrant: bool, around: bool) -> None:
    """What a checkpoint computes again, inside a part or around it, has the masks of the first time."""
    x = torch.randn(6, 8, requires_grad=True)
    own, part = _split(Dropping(None if around else reentrant), x)
    for _ in range(2):
        own.seen.clear()
        after = part.ranks.generator.get_state()
        out = checkpoint(own, x, use_reentrant=reentrant) if around else own(x)
        moved = part.ranks.generator.get_state()
        assert not torch.equal(moved, after)
        whole(out).sum().backward()
        first, again = own.seen
        assert isinstance(first, SplitTensor)
        assert torch.equal(first.local, again.local)
        assert torch.equal(part.ranks.generator.get_state(), moved), "the stream goes on where it was"
    part.undo()


def _probes() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    _masks()
    for reentrant in (None, False, True):
        _exact_masks(reentrant)
    for reentrant in (False, True):
        for around in (False, True):
            _rewound(reentrant, around)
    dist.destroy_process_group()


def test_random_numbers() -> None:
    run_ranks(_probes, 2)


def _models(names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        case = make_case(name)
        with in_double(case.model):
            plans = plans_of(case, dist.get_world_size())
            expected = train(case._replace(model=copy.deepcopy(case.model)))
            split, parts = split_copy(case, plans, GroupRanks(dist.group.WORLD))  # type: ignore[arg-type]
            found = train(split, None, parts)
        for key, weight in expected.weights.items():
            close(found.weights[key], weight, f"{name}: {key}")
    dist.destroy_process_group()


def test_models_on_a_process_group() -> None:
    run_ranks(_models, 3, ["gated_fused", "encoder_layer", "ce_all", "conv_pair"])
