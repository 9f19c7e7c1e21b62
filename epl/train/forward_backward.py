"""`epl.forward_backward` and `epl.forward_eval`: a pipeline of the user's own per-stage functions, without an engine object."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from epl.env import Env
from epl.errors import UsageError, list_problems
from epl.train.pipeline import Forward, Pipeline

Functions = Forward | Sequence[Forward]


def forward_backward(
    forward: Functions,
    *batch: object,
    module: nn.Module | Sequence[nn.Module] | None = None,
    backward: Callable[[object, object], None] | None = None,
) -> torch.Tensor:
    """The losses of all micro batches, on every rank, after one forward and backward over the whole pipeline.

        losses = epl.forward_backward(my_stage, x, y, module=stage)      # then: optimizer.step()

    Each rank gives the function of its own stage. `forward(received, *micro_batch)` gets what the stage before returned (None on
    the first stage) and this rank's part of the batch; what it returns goes to the next stage, and may be tensors, numbers,
    None, nested in anything Python can pickle. The last stage returns the loss of the micro batch, a mean over its rows;
    gradients are those of the mean over the whole batch. Ranks may be given different batches or none, but the same number of
    rows. With `pipeline.num_chunks` = v, `forward` (and `module`) are lists of v, for stages rank, rank + p, rank + 2p, …

    Args:
        forward: the function of this rank's stage, or a list of them when interleaved.
        batch: cut into `pipeline.num_micro_batch` micro batches along dim 0 of every tensor.
        module: what holds the stage's parameters: needed to reduce gradients over replicas, to join tied weights
            (`epl.parallel.tie`), and for norms over the whole pipeline.
        backward: called instead of autograd with (what forward returned, its gradients in the same structure).
    """
    pipeline = Pipeline.of(Env.get(), "epl.forward_backward")
    functions = _functions("epl.forward_backward", forward, pipeline)
    modules = _modules(module, pipeline)
    if backward is not None and Env.get().config.pipeline.strategy == "ZeroBubble":
        raise UsageError(
            "epl.forward_backward: a backward of your own makes the gradients of inputs and weights at once, and "
            "pipeline.strategy = 'ZeroBubble' makes them apart. Use 'PreferBackward' with it."
        )
    if backward is not None and not callable(backward):
        raise UsageError(
            f"epl.forward_backward: backward is a function (output, gradient) or None, found {type(backward).__name__}"
        )
    return pipeline.train(functions, batch, modules, backward)


def forward_eval(forward: Functions, *batch: object) -> list[object]:
    """What the last stage returned for each micro batch, on every rank; without gradients. Functions as in `forward_backward`."""
    pipeline = Pipeline.of(Env.get(), "epl.forward_eval")
    return pipeline.evaluate(_functions("epl.forward_eval", forward, pipeline), batch)


def _functions(what: str, forward: Functions, pipeline: Pipeline) -> list[Forward]:
    functions = list(forward) if isinstance(forward, Sequence) else [forward]
    problems = [f"found {type(f).__name__} where a function is expected" for f in functions if not callable(f)]
    if len(functions) != pipeline.num_chunks:
        problems.append(
            f"pipeline.num_chunks = {pipeline.num_chunks}, so {pipeline.num_chunks} stage functions are expected on each rank, "
            f"for stages {', '.join(map(str, pipeline.programs))}; found {len(functions)}"
        )
    if problems:
        raise UsageError(list_problems(what, problems))
    return functions


def _modules(module: nn.Module | Sequence[nn.Module] | None, pipeline: Pipeline) -> list[nn.Module]:
    """One module for each stage of this rank."""
    if module is None:
        return []
    if isinstance(module, nn.Module) and not (
        isinstance(module, nn.ModuleList) and len(module) == pipeline.num_chunks > 1
    ):
        return [module] * pipeline.num_chunks
    modules = list(module)
    strange = [type(m).__name__ for m in modules if not isinstance(m, nn.Module)]
    if strange or len(modules) != pipeline.num_chunks:
        raise UsageError(
            f"epl.forward_backward: module is an nn.Module, or a list of {pipeline.num_chunks} of them; found {len(modules)} "
            f"{strange or 'modules'}"
        )
    return modules
