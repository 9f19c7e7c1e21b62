"""The whole state of a model whose parts live on different ranks: gathered from them, and loaded into them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from epl.cluster.communication import Job, speaking
from epl.parallel.split.ranks import SplitRanks
from epl.plan.split.layout import layout_of, whole_shape
from epl.train.lazy import ForeignParameter
from epl.train.split.whole import whole_of


class WholeState:
    """Which rank of a replica has which entry of the model's `state_dict`: `owners`, by the places of ranks in `group`."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        group: dist.ProcessGroup,
        owners: Mapping[str, int],
        split: SplitRanks | None = None,
    ) -> None:
        """`split`: the ranks over which this one's parameters are cut, if they are."""
        self._model, self._job, self._group, self._owners, self._split = model, job, group, owners, split
        self._own = dist.get_rank(group)

    def gather(self) -> dict[str, torch.Tensor]:
        """A copy of every entry, on every rank; all ranks call it together."""
        self._job.meet("epl.full_state_dict").wait()
        whole: dict[str, torch.Tensor] = {}
        known: dict[int, torch.Tensor] = {}  # by id of the parameter: a tied one travels once
        for name, entry in self._model.state_dict(keep_vars=True).items():
            if not isinstance(entry, torch.Tensor):
                whole[name] = entry
                continue
            if id(entry) not in known:
                known[id(entry)] = self._fetch(name, entry)
            whole[name] = known[id(entry)]
        return whole

    def _fetch(self, name: str, entry: torch.Tensor) -> torch.Tensor:
        owner = self._owners.get(name)
        # Copies of what is here as well: parts that go on changing beside others that do not would be no state of any step.
        if owner is None:  # nobody uses it: everybody has it as it was built
            return entry.detach().clone()
        layout = layout_of(entry)
        if layout is not None:
            assert self._split is not None
            value = whole_of(entry.detach(), layout, self._split)
        elif owner == self._own:
            value = entry.detach().clone(memory_format=torch.contiguous_format)
        else:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=self._job.device)
        with speaking(self._job, f"gathering {name} for epl.full_state_dict"):
            dist.broadcast(value, group=self._group, group_src=owner)
        return value

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Rank 0's state into the parts, wherever they are; all ranks call it together."""
        for name, entry in self._model.state_dict(keep_vars=True).items():
            if not isinstance(entry, torch.Tensor):
                continue
            if self._job.rank == 0:
                assert state is not None
                value = state[name].detach().to(self._job.device, entry.dtype).contiguous()
            else:
                value = torch.empty(whole_shape(entry), dtype=entry.dtype, device=self._job.device)
            with speaking(self._job, f"loading {name}"):
                dist.broadcast(value, src=0)
            layout = layout_of(entry)
            if layout is not None:
                assert self._split is not None
                entry.data.copy_(layout.cut.take(value, layout.dim, self._split.rank))
            elif not isinstance(entry, ForeignParameter):
                entry.data.copy_(value)
