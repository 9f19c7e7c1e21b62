"""Models built on the meta device: what lives on this rank gets memory, and its first numbers as its modules would make them.

memory     under the same objects, so that optimizers keep their parameters
numbers    children first: the module's own `reset_parameters()`, then `_init_weights(module)` of the nearest module around it
           that has one (Hugging Face models do, for buffers that no state dict holds too). Every module draws from a seed made
           from its name: whoever has it gets the same numbers, however the model is cut
blank      what nothing has filled: it is to be loaded before the model is called, else the call is refused
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import cast

import torch
from torch import nn

from epl import _torch
from epl.cluster.communication import Job
from epl.errors import StateError, list_problems
from epl.report.log import notice

_INITIALISED = (
    "the model was built on the meta device: its parameters were initialised by their modules' own reset_parameters and "
    "_init_weights. epl.load_full_state_dict(model, state) loads others, before or after the first call"
)


class MetaModel:
    """What becomes of a model whose parameters or buffers have no memory yet; nothing, if all have."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._model, self._job = model, job
        self._blank: dict[str, torch.Tensor] = {}
        self.state: Mapping[str, torch.Tensor] | None = None
        """A whole model's state that is loaded as soon as there is memory for it; on ranks other than 0 it may be empty."""

    @property
    def waits(self) -> bool:
        """Whether something has no memory yet."""
        return any(tensor.is_meta for tensor in _tensors(self._model))

    def materialise(self, parameters: Iterable[nn.Parameter]) -> None:
        """Memory and numbers for these parameters and for all buffers; all ranks call it together."""
        if self.waits:
            seed = self._job.share("building the model", torch.initial_seed())
            assert isinstance(seed, int)
            self._blank |= materialise(self._model, parameters, self._job.device, seed)
            if self.state is None:
                notice(_INITIALISED)
            else:
                self.loaded()

    def refuse_plain_load(
        self, module: nn.Module, state: object, prefix: str, metadata: Mapping[str, object], *_: object
    ) -> None:
        """Before `model.load_state_dict`, which would do nothing to tensors without memory."""
        if self.waits and not metadata.get("assign_to_params_buffers"):
            raise StateError(
                f"{type(self._model).__name__} is on the meta device until its first call, and load_state_dict would load nothing: use "
                "epl.load_full_state_dict(model, state), which loads it then; ranks other than 0 may pass None"
            )

    def loaded(self) -> None:
        """Everything that a state dict holds has numbers of its own."""
        for name in self._model.state_dict(keep_vars=True):
            self._blank.pop(name, None)

    def check(self) -> None:
        """Raise if something here is blank."""
        self._refuse(self._still_blank())

    def check_all(self) -> None:
        """Raise if something is blank on any rank; all ranks call it together."""
        names = cast("list[list[str]]", self._job.gather("the first call of the model", self._still_blank()))
        self._refuse({name for some in names for name in some})

    def _still_blank(self) -> list[str]:
        self._blank = {name: tensor for name, tensor in self._blank.items() if _is_blank(tensor)}
        return list(self._blank)

    def _refuse(self, names: Collection[str]) -> None:
        if names:
            held = self._model.state_dict(keep_vars=True)
            problems = [
                f"{name}: load it with epl.load_full_state_dict(model, state) before the first call"
                if name in held
                else f"{name}, which no state dict holds: fill it in its module's reset_parameters(), or build that module "
                "outside of the meta device"
                for name in sorted(names)
            ]
            title = (
                f"{type(self._model).__name__} was built on the meta device, and neither reset_parameters() nor "
                "_init_weights() of its modules fills all of it"
            )
            raise StateError(list_problems(title, problems))


def materialise(
    model: nn.Module, parameters: Iterable[nn.Parameter], device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Memory and numbers for these parameters, and for all buffers, as far as they are on the meta device.

    Returns by name what is still blank. The other parameters stay on the meta device.
    """
    _refuse_hidden(model)
    own = [tensor for tensor in dict.fromkeys(chain(parameters, model.buffers())) if tensor.is_meta]
    for tensor in own:
        _torch.give_memory(tensor, _blank_like(tensor, device))
    ids = set(map(id, own))
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        _initialise(model, "", None, ids, seed)
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in ids and _is_blank(tensor)}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _initialise(module: nn.Module, path: str, around: nn.Module | None, own: set[int], seed: int) -> None:
    around = module if callable(getattr(module, "_init_weights", None)) else around
    for name, child in module.named_children():
        _initialise(child, f"{path}.{name}" if path else name, around, own, seed)
    if not any(id(tensor) in own for tensor in _tensors(module)):
        return
    # An initialisation knows nothing of numbers that are there already.
    kept = [(t, t.clone()) for t in _tensors(module) if id(t) not in own and not t.is_meta]
    torch.manual_seed(seed + zlib.crc32(path.encode()))
    if any(id(tensor) in own for tensor in _tensors(module, recurse=False)):
        for reset in _torch.resets_of(module):
            reset()
    if around is not None:
        initialise = around._init_weights
        assert callable(initialise)
        initialise(module)
    for tensor, before in kept:
        tensor.copy_(before)


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


# ---- what nothing has filled -----------------------------------------------------------------------------------------


def _blank_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory with a mark in it."""
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    dtype = memory.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return memory.fill_(float("nan"))
    return memory.fill_(False if dtype is torch.bool else torch.iinfo(dtype).max)


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether nobody has filled what `materialise` has marked."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype is torch.bool:  # no room for a mark: the marking itself was the one change there was
        return _torch.version_of(tensor) == 1
    return tensor.numel() > 0 and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _refuse_hidden(model: nn.Module) -> None:
    known = set(map(id, _tensors(model)))
    hidden = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in known
    ]
    if hidden:
        raise StateError(
            f"{', '.join(hidden)}: on the meta device, and neither a parameter nor a buffer, so nobody can say what its numbers "
            "should be. Make it a buffer (register_buffer), or build its module outside of the meta device"
        )
