"""Rows of ready batches: nested tuples, lists and mappings whose tensors (or arrays) carry the rows along dim 0."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TypeGuard

import numpy as np
import torch

from epl.errors import DataError

Rowed = torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def count_rows(batch: object) -> int:
    """The number of rows of a ready batch: the length along dim 0 on which all its tensors agree."""
    found = {int(leaf.shape[0]) for leaf in _leaves(batch) if _is_rowed(leaf)}
    if len(found) != 1:
        what = f"lengths {sorted(found)} along dim 0" if found else "no tensor with a dim 0"
        raise DataError(
            "with batch_size=None every item is a ready batch; expected tensors that all have the rows along dim 0, "
            f"found {what} in a {type(batch).__name__}. Let the loader make the batches (batch_size=…), or have the "
            "dataset return tensors, in tuples, lists or mappings."
        )
    return found.pop()


def cut_rows(batch: object, start: int, stop: int) -> object:
    """The rows from `start` to `stop` of a ready batch; what has no rows (numbers, flags) stays."""
    rows = count_rows(batch)

    def cut(leaf: object) -> object:
        if _is_rowed(leaf) or (_is_row_list(leaf) and len(leaf) == rows):
            return leaf[start:stop]
        return leaf

    return _rebuild([batch], lambda leaves: cut(leaves[0]))


def join_rows(batches: Sequence[object]) -> object:
    """Ready batches put together to one, along the rows."""
    return batches[0] if len(batches) == 1 else _rebuild(batches, _join)


_SAMPLED = 16  # elements of each tensor


def sample_digest(tensors: Iterable[torch.Tensor]) -> str:
    """A fingerprint of a few elements of each of these tensors: what differs as a whole (noise, another batch) differs in it.

    Cheap enough for every step on the CPU; of tensors elsewhere, where it would wait for the device, only shapes count.
    """
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.numel():
            steps = [slice(None, None, max(1, size // 4)) for size in tensor.shape[:2]]
            few = tensor.detach()[tuple(steps)].reshape(-1) if tensor.ndim else tensor.detach().reshape(1)
            few = few[:: max(1, few.numel() // _SAMPLED)][:_SAMPLED]
            state.update(few.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def digest(sample: object) -> str:
    """A fingerprint of the values in a sample or batch; objects of unknown kinds count by their type only."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(sample):
        if isinstance(leaf, torch.Tensor):
            state.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            if leaf.layout == torch.strided:
                state.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            state.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float, complex, bool, np.generic, type(None))):
            state.update(repr(leaf).encode())
        else:
            state.update(type(leaf).__qualname__.encode())
    return state.hexdigest()


def _join(leaves: list[object]) -> object:
    first = leaves[0]
    if all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        shapes = {tuple(leaf.shape[1:]) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(shapes) == 1:
            return torch.cat([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        raise _cannot_join(f"tensors of shapes {[tuple(getattr(leaf, 'shape', ())) for leaf in leaves]}")
    if all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        return np.concatenate([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])
    if all(_is_row_list(leaf) for leaf in leaves):
        joined = [value for leaf in leaves if isinstance(leaf, (list, tuple)) for value in leaf]
        return tuple(joined) if isinstance(first, tuple) else joined
    if all(type(leaf) is type(first) and _same(leaf, first) for leaf in leaves):
        return first
    raise _cannot_join(f"values {[_short(leaf) for leaf in leaves]}")


def _rebuild(batches: Sequence[object], combine: Callable[[list[object]], object]) -> object:
    """Walk batches of one structure side by side and put `combine` of their leaves in the leaves' place."""
    first = batches[0]
    if not _is_container(first):
        return combine(list(batches))
    if any(type(b) is not type(first) or not _is_container(b) for b in batches):
        raise _cannot_join(f"parts of kinds {[type(b).__name__ for b in batches]}")
    if isinstance(first, Mapping):
        mappings = [b for b in batches if isinstance(b, Mapping)]
        if any(m.keys() != first.keys() for m in mappings):
            raise _cannot_join(f"mappings with keys {[list(m) for m in mappings]}")
        values = {key: _rebuild([m[key] for m in mappings], combine) for key in first}
        if isinstance(first, MutableMapping):
            # A mapping of the user's may carry more than its items (as Hugging Face's do): a copy keeps that.
            clone = copy.copy(first)
            clone.update(values)
            return clone
        return values
    sequences = [b for b in batches if isinstance(b, (list, tuple))]
    if any(len(s) != len(sequences[0]) for s in sequences):
        raise _cannot_join(f"sequences of lengths {[len(s) for s in sequences]}")
    items = [_rebuild(list(parts), combine) for parts in zip(*sequences, strict=True)]
    if isinstance(first, tuple):
        return first._make(items) if hasattr(first, "_make") else tuple(items)
    return items


def _leaves(batch: object) -> Iterator[object]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, list, tuple)) and not _is_row_list(value)


def _is_rowed(leaf: object) -> TypeGuard[Rowed]:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def _is_row_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    """A list of plain values (captions, ids): one for each row, not a structure."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and not hasattr(value, "_fields")
        and all(isinstance(v, (str, bytes, int, float)) for v in value)
    )


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(np.all(a == b))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def _cannot_join(found: str) -> DataError:
    return DataError(
        "with batch_size=None and pipeline.num_micro_batch > 1 the items of a step are put together along dim 0; "
        f"expected items of one structure with tensors of equal shapes but for dim 0, found {found}. Let the loader "
        "make the batches (batch_size=…), or set pipeline.num_micro_batch to 1."
    )
