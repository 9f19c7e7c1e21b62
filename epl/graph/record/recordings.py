"""The recordings of one model, kept per signature: what goes in, and everything that decides what its forward does."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Container, Hashable
from typing import Any

import torch
from torch import nn

from epl import _torch
from epl.graph.leftovers import leaving_no_fakes
from epl.graph.record.call import RecordedCall
from epl.graph.record.draws import DrawTree
from epl.graph.record.fakes import FakeModel
from epl.graph.record.foresight import Foresight
from epl.graph.record.inputs import Inputs
from epl.graph.record.leaf import Leaves
from epl.graph.record.maker import Maker
from epl.graph.record.modules import Modules, TaskGraphOf
from epl.graph.record.outlook import Outlook
from epl.graph.record.recorder import STAGES, Apart, HooksInside, NotALeaf
from epl.graph.record.roles import Roles
from epl.graph.record.run import Scopes, Surroundings
from epl.graph.state import Registry
from epl.graph.state import registry as the_registry

_SIGNATURES = 256
"""Kept at most; a run with ever new lengths must not keep them all."""


class Recordings:
    """Gives the recording that fits a call of the model, and makes it if there is none yet."""

    def __init__(
        self,
        model: nn.Module,
        taskgraph_of: TaskGraphOf,
        *,
        registry: Registry = the_registry,
        device: torch.device | None = None,
        bound: Container[str] = frozenset(),
        reads_inputs: bool = True,
        apart: Apart = STAGES,
    ) -> None:
        """`taskgraph_of`: the TaskGraph that everything in a module belongs to, None if nothing in it is tagged, or MIXED.
        `device`: where the tensors of a model on the meta device are going to be (the CPU). `bound`: parameters that code can compute with in
        stages only, not with the loss: they are cut over ranks. `reads_inputs`: whether all ranks that compute a call together have the same
        inputs, so that a forward may read their numbers between its modules. `apart`: what is recorded for, as errors tell it."""
        self._reads_inputs = reads_inputs
        self._modules = Modules(model, taskgraph_of)
        self._fakes = FakeModel(model, device or torch.device("cpu"))
        mode = _torch.fake_mode()
        self._leaves = Leaves(self._fakes, mode)
        foresight = Foresight(self._leaves.fresh)
        surroundings = Surroundings(
            self._fakes, self._leaves, foresight, Scopes(registry), mode, self._modules.taskgraph_of, apart
        )
        self._maker = Maker(self._modules, surroundings, set(), Outlook(), bound)
        self._roles = Roles(model)
        self._cache: OrderedDict[Hashable, DrawTree[RecordedCall]] = OrderedDict()

    def of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batches: int,
        draw_seed: int = 0,
        widths: Collection[int] = (1,),
    ) -> RecordedCall:
        """The recording of `model(*args, **kwargs)`, whole and in micro batches.

        `draw_seed` differs from call to call and is the same on all ranks: single random numbers that the glue draws come
        from it. `widths`: a stage of width k computes the k-th part of a micro batch, and is recorded at that size too.
        """
        inputs = Inputs(args, kwargs, self._fakes.spec_of)
        model = self._model_key()
        signature = (inputs.key, micro_batches, tuple(sorted(set(widths))))
        tree = self._cache.get((model, signature))
        tensors = list(inputs.tensors) if self._reads_inputs else []
        found = tree.find(draw_seed, tensors) if tree is not None else None
        if found is not None and all(home.is_current() for home in found[0].homes):
            self._cache.move_to_end((model, signature))
            call, given = found
            return call.with_draws(given)
        inputs.release()
        positions = self._roles.positions(args, kwargs, inputs)
        known = self._roles.known(positions)
        hooked: HooksInside | None = None
        while True:
            try:
                # Looking through everything that might keep a fake takes 0.1 s: only the first time, when caches are filled.
                first = not self._cache
                with leaving_no_fakes(self._modules.model) if first else contextlib.nullcontext():
                    call, draws = self._maker.make(
                        inputs, tensors, (model, inputs.form), draw_seed, micro_batches, widths, known
                    )
                break
            except NotALeaf as found_scope:
                self._modules.look_into(found_scope.module)
            except HooksInside as found_hooks:
                if hooked is not None:
                    self._modules.leave_whole(*hooked.modules)
                    raise hooked.error from None
                # What hooks take out of modules (Hugging Face's router logits, for a loss between them) is seen only where they are
                # looked into.
                hooked, self._leaves.minds_hooks = found_hooks, True
                self._modules.look_into(*hooked.modules)
            except Exception:
                if hooked is None:
                    raise
                self._modules.leave_whole(*hooked.modules)
                raise hooked.error from None
        if self._roles.note(positions, inputs, call.is_cut):
            self._cache.clear()  # some of them cut what is no batch
        if not draws.answers:
            tensors.clear()  # nothing was read of them, and whoever made the recording may live on
        # Modules that turned out to be glue have attributes that count.
        tree = self._cache.setdefault((self._model_key(), signature), DrawTree())
        tree.add(draws.steps, call)
        while len(self._cache) > _SIGNATURES:
            self._cache.popitem(last=False)
        return call.with_draws(draws.values)

    @property
    def glue(self) -> Collection[nn.Module]:
        """The modules that are looked into: a recording holds what they were set to. Others read that when they run."""
        return self._modules.glue

    def _model_key(self) -> Hashable:
        key, is_new = self._modules.key()
        if is_new:
            self._fakes.look_again()
            self._leaves.memo.forget_modules()
        return key
