"""This rank's part of a cut model: which parameters live here, and what happens to their gradients around a backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from epl.parallel.pipeline.executor import StageReducer
from epl.parallel.pipeline.ties import Ties
from epl.parallel.reducer import GradientReducer
from epl.train.cut.aside import Aside, hooked


class Held(nn.Module):
    """The parameters and buffers of a model that live on this rank, under the model's own names, as a module without a forward."""

    def __init__(self, model: nn.Module, parameters: Collection[str], buffers: Collection[str]) -> None:
        super().__init__()
        self._model = [model]  # in a list: it is not a submodule
        self._names, self._buffer_names = tuple(parameters), tuple(buffers)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name in self._names:
            parameter = self._model[0].get_parameter(name)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """The modules that hold them."""
        owners = (name.rpartition(".")[0] for name in (*self._names, *self._buffer_names))
        return iter(dict.fromkeys(self._model[0].get_submodule(owner) for owner in owners))


class PartGradients:
    """Around every backward pass: what is added up where, and when it leaves for the other replicas."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stages: Sequence[int],
        reducers: Sequence[GradientReducer],
        ties: Ties | None,
    ) -> None:
        self._parameters, self._stages = list(parameters), stages
        self._reducers, self._ties = reducers, ties
        self._aside: Aside | None = None
        self._collects = self._more_comes = False
        self._sends: list[bool] = []
        self.at_work = False
        """A pass of the model is under way; what comes at other times is from code of the loop that has whole parameters."""

    def before(self, *, collects: bool, more_comes: bool = False) -> None:
        """A pass begins. `collects`: gradients are only asked for, `.grad` stays as it is. `more_comes`: to one lane of a stage, maybe,
        and not to the others: nothing leaves before that."""
        self.at_work, self._collects, self._more_comes = True, collects, more_comes
        # Hooks of the user's must see the whole gradient, once: until then it is kept beside `.grad`.
        own_hooks = len(self._reducers)  # each has one on every trained parameter
        apart = self._parameters if collects else hooked(self._parameters, own_hooks)
        if self._ties is not None and not collects:
            self._ties.set_aside()
        self._sends = [reducer.syncing and reducer.policy.when == "backward" for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.accumulate()
            reducer.ignore(apart)
        self._aside = Aside(apart) if apart else None

    def reducers(self) -> dict[int, StageReducer]:
        """By stage, what may send gradients while the schedule is still at work."""
        waits = self._collects or self._more_comes or self._aside is not None
        if waits or not self._reducers or not all(self._sends):
            return {}
        return dict.fromkeys(self._stages, _LastBackward(self._reducers, len(self._stages)))

    def after(self, extra: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """The pass is over, these come on top: all are reduced; or, if they were only asked for, returned."""
        try:
            if extra:
                torch.autograd.backward(list(extra), [g.clone() for g in extra.values()])
            return self._finish()
        finally:
            self.at_work = False

    def _finish(self) -> dict[nn.Parameter, torch.Tensor]:
        aside, self._aside = self._aside, None
        for reducer in self._reducers:
            reducer.ignore(())
        if self._collects:
            made = aside.put_back() if aside is not None else []
            for reducer, sends in zip(self._reducers, self._sends, strict=True):
                if sends:
                    reducer.resume()
            return {p: g for p, g in made if g is not None}
        if aside is not None:
            aside.hand_over()
        for reducer, sends in zip(self._reducers, self._sends, strict=True):
            if sends:
                reducer.finish()
        if self._ties is not None:
            self._ties.add_up_gradients()
        return {}

    def abandon(self) -> None:
        """The pass has raised."""
        self.at_work = False
        if self._aside is not None:
            self._aside.put_back()
            self._aside = None
        for reducer, sends in zip(self._reducers, self._sends, strict=True):
            if sends:
                reducer.resume()


class _LastBackward:
    """Lets gradients leave once the last backward of all stages of this rank has come; waiting is left to the end of the pass."""

    def __init__(self, reducers: Sequence[GradientReducer], stages: int) -> None:
        self._reducers, self._left = reducers, stages

    def last_backward(self) -> None:
        self._left -= 1
        if self._left == 0:
            for reducer in self._reducers:
                reducer.send_next()

    def finish(self) -> None:
        """The pass waits when it is over."""
