"""Packing a batch: any nesting, tensors apart from the rest, and what cannot be sent."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import threading
from typing import NamedTuple

import pytest
import torch

from epl.cluster.batch import pack
from epl.cluster.pickling import load_around_tensors as unpack
from epl.errors import UsageError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    more: dict[str, object]


class Encoding(collections.UserDict[str, torch.Tensor]):
    """Like a tokenizer's own batch class."""


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_a_tensor_returns_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype)
    structure, tensors = pack([tensor], CPU)
    (found,) = unpack(structure, tensors)  # type: ignore[misc]
    assert found.dtype == dtype
    assert found.shape == shape
    assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_containers_keep_their_types() -> None:
    batch = {
        "pair": Pair(torch.ones(2), "cat"),
        "sample": Sample(torch.zeros(1), {"ids": [1, None, (torch.ones(3), 2.5)]}),
        "encoding": Encoding(ids=torch.tensor([1, 2])),
        "ordered": collections.OrderedDict(b=1, a=torch.ones(1)),
        "none": None,
        "flag": True,
    }
    structure, tensors = pack(batch, CPU)
    found = unpack(structure, tensors)
    assert isinstance(found, dict)
    assert [type(value) for value in found.values()] == [type(value) for value in batch.values()]
    assert found["pair"].label == "cat"
    assert torch.equal(found["sample"].more["ids"][2][0], torch.ones(3))
    assert found["encoding"]["ids"].tolist() == [1, 2]
    assert list(found["ordered"]) == ["b", "a"]
    assert len(tensors) == 5


def test_no_tensor_is_pickled() -> None:
    structure, tensors = pack({"x": torch.zeros(10_000)}, CPU)
    assert len(structure) < 100
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        pickle.loads(structure)
    assert tensors[0].numel() == 10_000


def test_a_tensor_that_occurs_twice_is_sent_once() -> None:
    tensor = torch.ones(2)
    structure, tensors = pack([tensor, {"again": tensor}], CPU)
    assert len(tensors) == 1
    found = unpack(structure, tensors)
    assert found[0] is found[1]["again"]  # type: ignore[index]


def test_strange_strides_and_gradients_are_straightened() -> None:
    batch = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.cfloat).conj(),
    ]
    _, tensors = pack(batch, CPU)
    assert all(t.is_contiguous() and not t.requires_grad and not t.is_conj() for t in tensors)
    assert torch.equal(tensors[0], batch[0])


def test_the_device_is_the_ranks() -> None:
    _, tensors = pack([torch.ones(2)], torch.device("meta"))
    assert tensors[0].device.type == "meta"


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ([torch.eye(2).to_sparse()], "torch.sparse_coo"),
        ([torch.ones(2, device="meta")], "on meta"),
        ([torch.ones(2).as_subclass(Labelled)], "subclass Labelled"),
        ([lambda: 0], "lambda"),
        ([threading.Lock()], "lock"),
    ],
)
def test_refused_with_what_was_found(batch: list[object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        pack(batch, CPU)
