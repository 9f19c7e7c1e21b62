"""Sending a batch to the other ranks of a group: any nesting of containers, tensors as tensors, the rest by pickle."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from epl.cluster.communication import Job, speaking
from epl.cluster.pickling import FAILURES, dump_around_tensors, load_around_tensors
from epl.errors import UsageError

T = TypeVar("T")
_Form = tuple[tuple[int, ...], torch.dtype]


def broadcast_batch(batch: T | None, group: dist.ProcessGroup, job: Job) -> T:
    """The batch of the group's first rank, on every rank of the group, with its tensors on the rank's device.

    What is received does not require gradients and is contiguous. Other ranks' `batch` is not looked at.

    Raises:
        UsageError: on every rank of the group, if the batch holds something that cannot be sent.
    """
    header: list[Any] = [None]
    tensors: list[torch.Tensor] = []
    sends = dist.get_rank(group) == 0
    if sends:
        try:
            structure, tensors = pack(batch, job.device)
            header = [(structure, [(tuple(t.shape), t.dtype) for t in tensors])]
        except UsageError as error:
            header = [str(error)]  # the others are waiting: they must hear of it too
    with speaking(job, "broadcast_in_model_group"), torch.no_grad():
        dist.broadcast_object_list(header, group=group, group_src=0)
        if isinstance(header[0], str):
            raise UsageError(header[0])
        structure, forms = cast(tuple[bytes, list[_Form]], header[0])
        if not sends:
            tensors = [torch.empty(shape, dtype=dtype, device=job.device) for shape, dtype in forms]
        _broadcast_all(tensors, group)
    return cast(T, load_around_tensors(structure, tensors))


def pack(batch: object, device: torch.device) -> tuple[bytes, list[torch.Tensor]]:
    """The batch as a pickle with numbers in the place of tensors, and these tensors, contiguous on the device.

    Raises:
        UsageError: if something in it can neither be pickled nor sent as a tensor.
    """
    try:
        structure, tensors = dump_around_tensors(batch)
    except FAILURES as error:
        raise UsageError(
            "a batch to broadcast may hold tensors and whatever Python can pickle (numbers, strings, dicts, lists, "
            f"named tuples, dataclasses of a module); found something else: {type(error).__name__}: {error}. "
            "Send the tensors in a dict and build the rest on each rank."
        ) from error
    return structure, [_plain(tensor, device) for tensor in tensors]


def _plain(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor as bytes in a row can represent it."""
    kind = type(tensor).__name__
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise UsageError(
            "a batch to broadcast may hold ordinary tensors; found a sparse, quantized, nested or meta one: "
            f"{kind}, {tensor.layout}, {tensor.dtype}, on {tensor.device}. Make it dense first, with .to_dense()."
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(
            f"a batch to broadcast may hold ordinary tensors; found the subclass {kind}, whose own facts would be "
            "lost. Send tensor.as_subclass(torch.Tensor) and rebuild it on each rank."
        )
    return tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()


def _broadcast_all(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    # As bytes: not every backend knows every dtype.
    works = [
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=0, async_op=True)
        for tensor in tensors
        if tensor.numel()
    ]
    for work in works:
        assert work is not None
        work.wait()
