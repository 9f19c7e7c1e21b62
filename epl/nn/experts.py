"""Experts: feed-forward networks of which each row sees a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import nn
from torch.nn import functional

from epl import _torch
from epl.errors import UsageError
from epl.nn.balance import Balance, Statistics, Tally, losses, sums_for_losses
from epl.parallel.experts.grouped import grouped_linear
from epl.parallel.experts.held import Stack, every_module, held_modules, held_stack
from epl.parallel.experts.rows import Rows, local_rows, rows_of
from epl.parallel.experts.run import Held, Told, run, tell
from epl.parallel.split.ranks import SplitRanks
from epl.parallel.split.value import partial
from epl.report.log import notice

Activation = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """Feed-forward networks that each work on the rows routed to them: `y, aux = experts(x, *gate(x))`.

    Their parameters are stacked: `w1` [experts, d_model, d_hidden], `w2` [experts, d_hidden, d_model] and biases; `gated`: `w1` is
    twice as wide, and the hidden values are activation(first half) · second half. With `expert`, a function without arguments that
    makes a module from [rows, d_model] to [rows, d_model], they are a list of such modules, `members`.

    `capacity_factor`: an expert takes at most ceil(factor · choices · rows / experts) of the (row, choice) pairs of the replica's
    micro batch, first choices before second ones, then in the order of rows; what is over adds nothing to its row, is counted in
    `aux.dropped` and `statistics()`, and said once. None: every pair is taken.

    Under `split` the experts are divided over the ranks, whole ones each. Where ranks have rows of their own (beside `replicate`)
    rows go to their experts and back by all-to-all; the numbers are those of one device with all rows.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None,
        num_experts: int,
        *,
        capacity_factor: float | None = 1.25,
        activation: Activation = functional.gelu,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        expert: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if num_experts < 1:
            raise UsageError(f"num_experts: expected at least 1, found {num_experts}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise UsageError(
                f"capacity_factor: expected a number above 0, or None for any number, found {capacity_factor}"
            )
        if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
            raise UsageError(
                f"activation: expected one without parameters, found {activation}; give whole experts by expert="
            )
        self.d_model, self.d_hidden, self.num_experts = d_model, d_hidden, num_experts
        self.capacity_factor, self.gated, self.dropout = capacity_factor, gated, dropout
        self.activation = activation
        self._tally = Tally(num_experts)
        self._told_of_drops = False
        self.stacked = expert is None
        if expert is not None:
            self.members = nn.ModuleList(expert() for _ in range(num_experts))
            return
        if d_hidden is None:
            raise UsageError("d_hidden: expected the hidden width of the experts; only with expert= it may be None")
        wide = d_hidden * (2 if gated else 1)
        self.w1 = nn.Parameter(torch.empty(num_experts, d_model, wide))
        self.w2 = nn.Parameter(torch.empty(num_experts, d_hidden, d_model))
        self.b1: nn.Parameter | None
        self.b2: nn.Parameter | None
        self.register_parameter("b1", nn.Parameter(torch.empty(num_experts, wide)) if bias else None)
        self.register_parameter("b2", nn.Parameter(torch.empty(num_experts, d_model)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New random weights, distributed as those of `nn.Linear`. Modules made by `expert` are left alone."""
        if self.stacked:
            assert self.d_hidden is not None
            for name, fan_in in (
                ("w1", self.d_model),
                ("b1", self.d_model),
                ("w2", self.d_hidden),
                ("b2", self.d_hidden),
            ):
                parameter = getattr(self, name)
                if parameter is not None:
                    nn.init.uniform_(parameter, -1 / sqrt(fan_in), 1 / sqrt(fan_in))

    def extra_repr(self) -> str:
        more = ", gated" if self.gated else ""
        return f"{self.d_model}, {self.d_hidden}, {self.num_experts}, capacity_factor={self.capacity_factor}{more}"

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Balance]:
        """What the experts make of rows x [..., d_model], by weights and experts [..., choices], and the losses by logits [..., experts]."""
        if x.ndim < 2:
            raise UsageError(f"expected x [..., {self.d_model}] with at least 2 dims, found {tuple(x.shape)}")
        home = rows = rows_of(x)
        held = self._held(rows)
        if held is None:  # each expert is spread over all ranks, by its features: it needs all rows
            rows, held = None, every_module(list(self.members))
        local, weights, experts = (local_rows(value, rows) for value in (x, weights, experts))
        tokens, weights, experts = (value.flatten(0, -2) for value in (local, weights, experts))
        sums = None if logits is None else sums_for_losses(local_rows(logits, rows).flatten(0, -2))
        per_row = local.shape[1:-1].numel()
        told = tell(
            experts,
            sums,
            num_experts=self.num_experts,
            capacity_factor=self.capacity_factor,
            rows=rows,
            tokens=[tokens.shape[0]] if rows is None else [per_row * length for length in rows.cut.lengths],
        )
        made = run(tokens, weights, experts, told, held, rows)
        made = made.view(*local.shape[:-1], made.shape[-1])
        if not (_torch.is_fake(local) or _is_plan(home, held)):
            self._remember(told)
        aux = self._balance(told, weights.dtype)
        if home is not None:
            return home.split(home.local(made) if rows is None else made), aux
        return (made if held.ranks is None else partial(made, held.ranks, fresh=True)), aux

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Where rows went since the last reset, in the replicas' micro batches that this rank took part in."""
        found = self._tally.report()
        if reset:
            self._tally = Tally(self.num_experts)
        return found

    def _held(self, rows: Rows | None) -> Held | None:
        if self.stacked:
            return held_stack((self.w1, self.b1, self.w2, self.b2), self.num_experts, rows, self._compute)
        return held_modules(list(self.members), rows, self.training)

    def _compute(self, stack: Stack, x: torch.Tensor, sizes: Sequence[int], ranks: SplitRanks | None) -> torch.Tensor:
        w1, b1, w2, b2 = stack
        assert w1 is not None
        assert w2 is not None
        hidden = grouped_linear(x, w1, b1, sizes)
        if self.gated:
            gate, up = hidden.chunk(2, -1)
            hidden = self.activation(gate) * up
        else:
            hidden = self.activation(hidden)
        if self.dropout and self.training:
            hidden = _dropped(hidden, self.dropout, ranks)
        return grouped_linear(hidden, w2, b2, sizes)

    def _balance(self, told: Told, dtype: torch.dtype) -> Balance:
        counts, sums = told.counts, told.sums
        zero = counts.new_zeros((), dtype=dtype)
        balance, z = (zero, zero) if sums is None else losses(counts, sums, told.rows, dtype)
        over = zero if told.capacity is None else (counts - told.capacity).clamp(min=0).sum().to(dtype)
        return Balance(balance, z, counts.to(dtype), over)

    def _remember(self, told: Told) -> None:
        total, taken = told.total, told.taken
        self._tally.add(total, taken)
        if not self._told_of_drops and total != taken:
            self._told_of_drops = True
            notice(
                f"experts: {sum(total) - sum(taken)} of {sum(total)} (row, choice) pairs were over the capacity {told.capacity} of "
                f"their expert and added nothing to their rows (capacity_factor={self.capacity_factor}; None takes all). From now "
                "on only aux.dropped and statistics() tell"
            )


def _dropped(x: torch.Tensor, p: float, ranks: SplitRanks | None) -> torch.Tensor:
    if ranks is None:
        return functional.dropout(x, p)
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=ranks.generator)
    return x * mask.div_(1 - p) if p < 1 else x * mask


def _is_plan(rows: Rows | None, held: Held) -> bool:
    ranks = held.ranks if rows is None else rows.ranks
    return ranks is not None and ranks.plan
