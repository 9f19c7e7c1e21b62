"""Gradients set aside while a step makes others: for hooks that must run once, and for gradients that are only asked for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from epl import _torch


class Aside:
    """Parameters whose gradients and hooks are out of the way; what the step adds up is then theirs alone."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._kept = [(p, p.grad, _torch.take_hooks(p)) for p in parameters]
        for parameter, _, _ in self._kept:
            parameter.grad = None

    def put_back(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Everything as it was before; what the step made, by parameter."""
        made = []
        for parameter, gradient, hooks in self._kept:
            made.append((parameter, parameter.grad))
            parameter.grad = gradient
            _torch.give_hooks(parameter, hooks)
        self._kept = []
        return made

    def hand_over(self) -> None:
        """As if one backward had made the gradients: hooks run, then they are added."""
        made = [(p, g) for p, g in self.put_back() if g is not None]
        if made:
            torch.autograd.backward([p for p, _ in made], [g.clone() for _, g in made])


def hooked(parameters: Iterable[nn.Parameter], own_hooks: int) -> list[nn.Parameter]:
    """The parameters with gradient hooks of the user's; `own_hooks` are ours, on every parameter."""
    return [p for p in parameters if _torch.count_hooks(p) > own_hooks]
