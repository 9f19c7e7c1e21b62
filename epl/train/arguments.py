"""Sorts what was handed to `epl.parallelize`: one model, any number of optimizers and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from epl.errors import UsageError, list_problems


@dataclass(frozen=True)
class Arguments:
    """The optimizers and loaders, in the order they were given."""

    optimizers: tuple[Optimizer, ...]
    loaders: tuple[DataLoader[object], ...]


def sort_arguments(model: object, others: Sequence[object], loss_fn: object) -> Arguments:
    """The optimizers and loaders among `others`; everything else is refused, all at once, with what to do instead."""
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"the first argument is the model, an nn.Module; found {type(model).__name__}")
    for position, thing in enumerate(others, 2):
        if not isinstance(thing, Optimizer | DataLoader):
            problems.append(f"argument {position} is a {type(thing).__name__}: {_remedy(thing)}")
    if loss_fn is not None and not callable(loss_fn):
        problems.append(f"loss_fn is something to call, or None; found {type(loss_fn).__name__}")
    optimizers = tuple(thing for thing in others if isinstance(thing, Optimizer))
    problems += _problems_with_optimizers(model, optimizers, loss_fn)
    if problems:
        raise UsageError(list_problems("epl.parallelize(model, *optimizers_and_loaders)", problems))
    return Arguments(optimizers, tuple(thing for thing in others if isinstance(thing, DataLoader)))


def _remedy(thing: object) -> str:
    if isinstance(thing, LRScheduler):
        return "schedulers need nothing, leave it out; it steps as in your single-device script"
    if isinstance(thing, nn.Module):
        return "one model per call: call epl.parallelize again for a second model, or pass a loss module as loss_fn="
    if isinstance(thing, Dataset | Sampler):
        return "pass the DataLoader that reads it"
    if isinstance(thing, list | tuple):
        return "pass its elements one by one (epl.parallelize(model, *things))"
    return "expected torch.optim.Optimizer or torch.utils.data.DataLoader"


def _problems_with_optimizers(model: object, optimizers: Sequence[Optimizer], loss_fn: object) -> list[str]:
    """Optimizers of which none would train the model: made for another model, or before it was copied."""
    if not isinstance(model, nn.Module) or not optimizers:
        return []
    own = {id(p) for p in model.parameters()}
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if not own or own & held:
        return []
    return [
        f"no optimizer holds a parameter of this model: expected some of its {len(own)}, found {len(held)} others. Make "
        "the optimizer from model.parameters() of this very model (not of a copy), after the last time it was rebuilt"
    ]
