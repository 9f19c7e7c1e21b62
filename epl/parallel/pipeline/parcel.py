"""One value on one edge of the pipeline as one flat buffer of bytes.

    buffer:  | preamble, 64 bytes | tensor 0 | tensor 1 | …        each tensor at a multiple of 64 bytes

What the bytes mean (the *form*: containers, plain Python values, shapes, dtypes, which tensors need a gradient) is told once and
then assumed, so that in the steady state one message is all. The form travels as a pickle that stops at every tensor and
writes its number, so containers need no code of ours (dicts, dataclasses, Hugging Face's outputs).
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from epl.cluster.pickling import FAILURES, dump_around_tensors, load_around_tensors
from epl.errors import UsageError

PREAMBLE, ALIGN = 64, 64


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Form:
    """Everything about a value but the numbers in its tensors."""

    structure: bytes
    """The value, pickled with numbers in the place of tensors."""
    tensors: tuple[TensorForm, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and where the last one ends."""
        found, position = [], PREAMBLE
        for tensor in self.tensors:
            found.append(position)
            position += -(-tensor.nbytes // ALIGN) * ALIGN
        return (*found, position)

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.offsets[-1]

    def describes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have this form."""
        return len(tensors) == len(self.tensors) and all(
            t.shape == f.shape and t.dtype == f.dtype and t.requires_grad == f.needs_gradient
            for t, f in zip(tensors, self.tensors, strict=True)
        )

    @cached_property
    def gradient(self) -> Form:
        """The form of what comes back: the gradients of those tensors that need one."""
        return Form(b"", tuple(TensorForm(t.shape, t.dtype, False) for t in self.tensors if t.needs_gradient))

    def encode(self) -> bytes:
        return pickle.dumps((self.structure, [(t.shape, t.dtype, t.needs_gradient) for t in self.tensors]))

    @staticmethod
    def decode(data: bytes) -> Form:
        structure, tensors = pickle.loads(data)
        return Form(structure, tuple(TensorForm(*t) for t in tensors))

    def pack(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
        """The buffer with these tensors; a None leaves its room unused."""
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        for form, offset, tensor in zip(self.tensors, self.offsets, tensors, strict=False):
            if tensor is not None and form.nbytes:
                self._room(buffer, form, offset).copy_(tensor)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in the buffer, as views of it."""
        return [self._room(buffer, f, o) for f, o in zip(self.tensors, self.offsets, strict=False)]

    @staticmethod
    def _room(buffer: torch.Tensor, form: TensorForm, offset: int) -> torch.Tensor:
        return buffer[offset : offset + form.nbytes].view(form.dtype).view(form.shape)


SINGLE = pickle.dumps(("one tensor",))
"""The structure of the commonest value, a bare tensor; it is not pickled each time."""


def take_apart(value: object, assumed: Form | None = None) -> tuple[Form, list[torch.Tensor]]:
    """The form of a value, and its tensors in the order of the form.

    Where the form is the assumed one, that very object is returned: what it has worked out is worked out once.
    """
    structure, tensors = SINGLE, [value]
    if type(value) is not torch.Tensor:
        structure, tensors = _pickle(value)  # type: ignore[assignment]
    found = cast("list[torch.Tensor]", tensors)
    if assumed is not None and assumed.structure == structure and assumed.describes(found):
        return assumed, found
    return Form(structure, tuple(_form_of(t) for t in found)), found


def _pickle(value: object) -> tuple[bytes, list[torch.Tensor]]:
    try:
        return dump_around_tensors(value)
    except FAILURES as error:
        raise UsageError(
            "what a stage returns must be able to travel to the next one: tensors, and what Python can pickle (numbers, "
            f"strings, None, dicts, lists, tuples, dataclasses); found {type(value).__name__} with something else in it: {error}"
        ) from error


def put_together(form: Form, tensors: Sequence[torch.Tensor | None]) -> object:
    """The value that `take_apart` was given, with these tensors."""
    return tensors[0] if form.structure == SINGLE else load_around_tensors(form.structure, tensors)


def in_words(value: object, depth: int = 4) -> str:
    """What a value is made of, for errors: its containers, and dtype and shape of every tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    if depth:
        if dataclasses.is_dataclass(value):
            fields = [(f"{f.name}=", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
            return f"{type(value).__name__}({_listed(fields, depth)})"
        if isinstance(value, dict):
            name = "" if type(value) is dict else type(value).__name__
            return f"{name}{{{_listed([(f'{key!r}: ', v) for key, v in dict.items(value)], depth)}}}"
        if isinstance(value, list | tuple):
            name = "" if type(value) in (list, tuple) else type(value).__name__
            listed = _listed([("", v) for v in value], depth)
            return (
                f"{name}[{listed}]" if isinstance(value, list) else f"{name}({listed}{',' if len(value) == 1 else ''})"
            )
    return type(value).__name__


def _listed(parts: Sequence[tuple[str, object]], depth: int) -> str:
    texts = [f"{name}{in_words(value, depth - 1)}" for name, value in parts[:12]]
    return ", ".join([*texts, f"… {len(parts) - 12} more"] if len(parts) > 12 else texts)


def enter_stage(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves as the user's code gets them: tensors that it may change in place, as on one device (`nn.ReLU(inplace=True)`)."""
    return [_Enter.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """The same numbers behind a node: autograd allows no change in place of a leaf, nor of a view of one."""

    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _form_of(tensor: torch.Tensor) -> TensorForm:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise UsageError(
            f"a stage returned a {tensor.layout} tensor on {tensor.device}; only ordinary dense ones can travel to the next"
        )
    return TensorForm(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
