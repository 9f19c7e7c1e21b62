"""Clipping over ranks against torch's function on one device with all parameters; torch's functions on sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils as utils
from torch import nn

# Imported before anything is patched, as scripts do.
from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as early_clip_grad_value_
from torch.nn.utils import get_total_norm as early_get_total_norm

from epl import _torch
from epl.errors import NonFiniteNormError, UsageError
from epl.parallel import clip_grad_norm_
from epl.parallel.clip import total_norm
from epl.parallel.clip_torch import install_clipping
from tests.harness import rank_errors, run_ranks

NORMS = (1.0, 2.0, 3.0, math.inf)
MAX_NORM = 0.7


def _parameter(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.randn(shape, dtype=dtype, generator=generator)
    return parameter


def _sparse_parameter(seed: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    """Its gradient has two rows of the same index: the norm is that of their sum."""
    parameter = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    values = torch.randn(3, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    parameter.grad = torch.sparse_coo_tensor([[1, 1, 4]], values, (5, 3), check_invariants=True)
    assert not parameter.grad.is_coalesced()
    return parameter


def _without_gradient() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def _of_rank(rank: int) -> list[nn.Parameter]:
    """Different parameters on every rank: three kinds on rank 0, no gradient at all on rank 1, a sparse one on rank 2."""
    if rank == 0:
        return [_parameter(0, 3, 2), _parameter(1, 4, dtype=torch.complex128), _parameter(2, 0), _parameter(3, 3, 3)]
    return [_without_gradient()] if rank == 1 else [_sparse_parameter(4), _parameter(5, 7)]


def _dense_gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]


def _reference(parameters: list[nn.Parameter], norm_type: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """torch's norm, and its clipped gradients, on dense ones without empty ones."""
    plain = []
    for gradient in _dense_gradients(parameters):
        if gradient.numel():
            plain.append(nn.Parameter(torch.zeros_like(gradient)))
            plain[-1].grad = gradient.clone()
    norm = utils.clip_grad_norm_(plain, MAX_NORM, norm_type)
    return norm, [p.grad for p in plain if p.grad is not None]


def _clip_on_rank() -> list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    dist.init_process_group("gloo")
    results = []
    for norm_type in NORMS:
        parameters = _of_rank(dist.get_rank())
        kept = [p.grad for p in parameters]
        only_norm = total_norm([g for g in kept if g is not None], norm_type, [dist.group.WORLD])
        norm = clip_grad_norm_((p for p in parameters), MAX_NORM, [dist.group.WORLD], norm_type=norm_type)
        assert all(p.grad is g for p, g in zip(parameters, kept, strict=True)), "gradients are scaled in place"
        results.append((norm, [g for g in _dense_gradients(parameters) if g.numel()], only_norm))
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_torch_with_all_parameters_on_one_device(ranks: int) -> None:
    everything = [p for rank in range(ranks) for p in _of_rank(rank)]
    by_rank = run_ranks(_clip_on_rank, ranks)
    for n, norm_type in enumerate(NORMS):
        norm, gradients = _reference(everything, norm_type)
        assert norm > MAX_NORM
        for results in by_rank:
            tolerance = 1e-12 if results[n][0].dtype == torch.float64 else 1e-6  # no gradient: float32
            torch.testing.assert_close(results[n][0].double(), norm, rtol=tolerance, atol=0)
            torch.testing.assert_close(results[n][2], results[n][0], rtol=0, atol=0)
        torch.testing.assert_close([g for results in by_rank for g in results[n][1]], gradients, rtol=1e-12, atol=0)


def _clip_on_mesh() -> tuple[torch.Tensor, torch.Tensor]:
    """2 × 2: other parameters along both axes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    parameter = _parameter(rank, 3 + rank)
    norm = clip_grad_norm_(parameter, MAX_NORM, [rows[rank // 2], columns[rank % 2]])
    dist.destroy_process_group()
    return norm, parameter.grad


def test_several_groups() -> None:
    norm, gradients = _reference([_parameter(rank, 3 + rank) for rank in range(4)], 2.0)
    for rank, (found, gradient) in enumerate(run_ranks(_clip_on_mesh, 4)):
        torch.testing.assert_close((found, gradient), (norm, gradients[rank]), rtol=1e-12, atol=0)


def _clip_nonfinite(value: float, norm_type: float, error: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dist.init_process_group("gloo")
    parameter = _parameter(0, 3)
    assert parameter.grad is not None
    if dist.get_rank() == 0:
        parameter.grad[1] = value
    norm = clip_grad_norm_([parameter], MAX_NORM, [dist.group.WORLD], norm_type=norm_type, error_if_nonfinite=error)
    dist.destroy_process_group()
    return norm, parameter.grad


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nonfinite_raises_alike_on_every_rank(norm_type: float) -> None:
    for kind, text in rank_errors(_clip_nonfinite, 2, math.nan, norm_type, True):
        assert kind == NonFiniteNormError.__name__
        assert f"the total norm of order {norm_type:g} of the gradients is nan" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_scales_as_torch_if_allowed(value: float) -> None:
    parameters = [_parameter(0, 3), _parameter(0, 3)]
    assert parameters[0].grad is not None
    parameters[0].grad[1] = value
    norm = utils.clip_grad_norm_(parameters, MAX_NORM, math.inf)
    for rank, (found, gradient) in enumerate(run_ranks(_clip_nonfinite, 2, value, math.inf, False)):
        torch.testing.assert_close((found, gradient), (norm, parameters[rank].grad), equal_nan=True)


# ---- one process, no group -----------------------------------------------------------------------------------------


def test_alone_it_is_torchs_function() -> None:
    for norm_type in NORMS:
        ours, theirs = ([_parameter(0, 3), _parameter(1, 2, 2), _without_gradient()] for _ in range(2))
        norm = clip_grad_norm_(ours, MAX_NORM, norm_type=norm_type)
        torch.testing.assert_close(norm, utils.clip_grad_norm_(theirs, MAX_NORM, norm_type), rtol=1e-14, atol=0)
        for p, q in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-14, atol=0)


def test_small_norms_are_left_alone() -> None:
    parameter = _parameter(0, 3)
    before = parameter.grad.clone()
    clip_grad_norm_(parameter, 1e6)
    assert torch.equal(parameter.grad, before)


def test_mixed_dtypes() -> None:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
    parameters = [_parameter(n, 50, dtype=dtype) for n, dtype in enumerate(kinds)] + [
        _sparse_parameter(9, torch.float32)
    ]
    wide = [g.to(torch.complex128) for g in _dense_gradients(parameters)]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wide]))
    norm = clip_grad_norm_(parameters, MAX_NORM)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0)
    assert [p.grad.dtype for p in parameters] == [*kinds, torch.float32]
    for gradient, before in zip(_dense_gradients(parameters), wide, strict=True):
        tolerance = 1e-2 if gradient.dtype == torch.bfloat16 else 1e-3
        scaled = before * (MAX_NORM / expected)
        torch.testing.assert_close(gradient.to(torch.complex128), scaled, rtol=tolerance, atol=1e-6)


def test_norm_is_at_least_float32() -> None:
    assert total_norm([_parameter(0, 3, dtype=torch.bfloat16).grad]).dtype == torch.float32
    assert total_norm([]).dtype == torch.float32
    assert total_norm([]) == 0


def test_a_parameter_listed_twice_counts_once() -> None:
    tied, once = _parameter(0, 3), _parameter(0, 3)
    assert clip_grad_norm_([tied, tied], MAX_NORM) == clip_grad_norm_([once], MAX_NORM)
    assert torch.equal(tied.grad, once.grad)


def test_empty_sparse_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3))
    parameter.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 3), (5, 3), check_invariants=True)
    assert clip_grad_norm_(parameter, MAX_NORM, norm_type=math.inf) == 0


def test_bad_input_is_named() -> None:
    with pytest.raises(UsageError, match=r"pass model\.parameters\(\)"):
        clip_grad_norm_(nn.Linear(2, 2), MAX_NORM)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes tensors, found str among them"):
        clip_grad_norm_(["weight"], MAX_NORM)  # type: ignore[list-item]
    with pytest.raises(UsageError) as caught:
        clip_grad_norm_([], MAX_NORM, ["pipe"], norm_type=-1)  # type: ignore[list-item]
    assert "2 problems" in str(caught.value)
    assert "norm_type must be positive or infinite, found -1" in str(caught.value)
    assert "groups must be process groups that this rank is in, found str" in str(caught.value)


# ---- torch's own functions -----------------------------------------------------------------------------------------


@pytest.fixture
def patched() -> Iterator[None]:
    undo = install_clipping()
    yield
    undo()


def test_torch_still_keeps_its_functions_in_one_cell() -> None:
    """The canary of `clipping_seams`: one cell each, and every name leads to it."""
    norm, value, clip = _torch.clipping_seams()
    names = [cell.cell_contents.__name__ for cell in (norm, value, clip)]
    assert names == ["_get_total_norm", "clip_grad_value_", "clip_grad_norm_"]
    assert early_clip_grad_norm_.__closure__ == (clip,)
    assert early_get_total_norm.__closure__ == (norm,)
    assert early_clip_grad_value_.__closure__ == (value,)
    assert utils.get_total_norm is early_get_total_norm
    with pytest.raises(NotImplementedError):  # once this passes, the patch can go
        early_clip_grad_norm_(_sparse_parameter(0), MAX_NORM)
    with pytest.raises(NotImplementedError):
        early_clip_grad_value_(_sparse_parameter(0), 0.1)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", NORMS)
def test_torchs_functions_take_sparse_gradients(norm_type: float, foreach: bool | None) -> None:
    parameters = [_sparse_parameter(0), _parameter(1, 4), _without_gradient(), _sparse_parameter(2)]
    norm, gradients = _reference(parameters, norm_type)
    held = [p.grad for p in parameters if p.grad is not None]
    torch.testing.assert_close(early_get_total_norm(held, norm_type, foreach=foreach), norm)
    torch.testing.assert_close(early_clip_grad_norm_(iter(parameters), MAX_NORM, norm_type, foreach=foreach), norm)
    assert [g.is_sparse for g in held] == [True, False, True]
    torch.testing.assert_close(_dense_gradients(parameters), gradients)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_by_value_takes_sparse_gradients(foreach: bool | None) -> None:
    parameters = [_sparse_parameter(0), _parameter(1, 4), _without_gradient()]
    expected = [g.clamp(-0.1, 0.1) for g in _dense_gradients(parameters)]
    held = parameters[0].grad
    early_clip_grad_value_(iter(parameters), 0.1, foreach=foreach)
    early_clip_grad_value_(parameters[0], 0.1, foreach=foreach)
    assert parameters[0].grad is held
    torch.testing.assert_close(_dense_gradients(parameters), expected)


def test_dense_gradients_are_torchs_business() -> None:
    norms, gradients = [], []
    for install in (False, True):
        undo = install_clipping() if install else None
        parameters = [_parameter(0, 3, dtype=torch.bfloat16), _parameter(1, 2)]
        norms += [early_clip_grad_norm_(parameters[:1], MAX_NORM), early_clip_grad_norm_(parameters, MAX_NORM)]
        early_clip_grad_value_(parameters, 0.1)
        gradients.append(_dense_gradients(parameters))
        with pytest.raises(RuntimeError, match="non-finite"):
            early_clip_grad_norm_(_infinite(), MAX_NORM, error_if_nonfinite=True)
        with pytest.warns(UserWarning, match="empty generator"):
            early_clip_grad_norm_((p for p in ()), MAX_NORM)
        if undo is not None:
            undo()
    torch.testing.assert_close(norms[:2], norms[2:], rtol=0, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def _infinite() -> nn.Parameter:
    parameter = _parameter(0, 3)
    parameter.grad = torch.full((3,), math.inf, dtype=torch.float64)
    return parameter


def test_undone_with_the_last_one() -> None:
    before = [cell.cell_contents for cell in _torch.clipping_seams()]
    first, second = install_clipping(), install_clipping()
    first()
    first()
    early_clip_grad_norm_(_sparse_parameter(0), MAX_NORM)
    second()
    assert [cell.cell_contents for cell in _torch.clipping_seams()] == before
