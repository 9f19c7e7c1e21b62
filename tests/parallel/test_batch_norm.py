"""Synchronised batch norm against one process that sees the rows of all ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.errors import DataError, UsageError
from epl.graph import registry, taskgraphs_of
from epl.graph.owners import owners_of
from epl.graph.record import Recordings
from epl.parallel import GradientReducer, sync_batch_norm
from tests.harness import rank_errors, run_ranks


@pytest.fixture(autouse=True)
def compiler_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's compiler, once imported (checkpoints do), sets this variable if nobody else has."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class NormAct(nn.BatchNorm2d):
    """A subclass whose forward adds something, as people's do."""

    def forward(self, x):
        return super().forward(x).tanh()


class SyncAct(nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x).tanh()


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x).tanh() * 2)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 2), NormAct(3)
    )


def _frozen(norm: nn.Module) -> nn.Module:
    norm.requires_grad_(False)
    return norm


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (_cnn, (3, 5, 5)),
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d with length": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "torch's synchronised": (lambda: nn.SyncBatchNorm(3), (3, 2, 2)),
    "subclass": (lambda: NormAct(3), (3, 2, 2)),
    "subclass of torch's synchronised": (lambda: SyncAct(3), (3, 2, 2)),
    "no affine": (lambda: nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
    "no bias": (lambda: nn.BatchNorm2d(3, bias=False), (3, 2, 2)),
    "frozen affine": (lambda: _frozen(nn.BatchNorm2d(3)), (3, 2, 2)),
    "cumulative average": (lambda: nn.BatchNorm2d(3, momentum=None, eps=1e-2), (3, 2, 2)),
    "untracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    "double use": (lambda: Twice(nn.BatchNorm2d(3)), (3, 2, 2)),
    "checkpoint": (lambda: Checkpointed(nn.BatchNorm2d(3), reentrant=False), (3, 2, 2)),
    "reentrant checkpoint": (lambda: Checkpointed(nn.BatchNorm2d(3), reentrant=True), (3, 2, 2)),
    "other norms": (
        lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.InstanceNorm2d(3, track_running_stats=False)),
        (3, 2, 2),
    ),
}
ROWS = {"even": (4, 4), "uneven": (3, 2, 1), "four": (1, 3, 2, 2), "padding only": (3, 0, 2)}


def _net(name: str) -> nn.Module:
    torch.manual_seed(5)
    net = NETS[name][0]().double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def _batch(name: str, rows: int) -> torch.Tensor:
    shape = (rows, *NETS[name][1])
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) * 3 + 7


def _run_net(name: str, net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two forwards, then one backward of a mean over rows; all that comes of it."""
    x = x.clone().requires_grad_()
    first, second = net(x), net(x.square() + 1)
    loss = sum((h.sin() * h.cumsum(1)).flatten(1).sum(1).mean() for h in (first, second))
    loss.backward()
    assert x.grad is not None
    found = {"first": first.detach(), "second": second.detach(), "x.grad": x.grad}
    found |= {f"{n}.grad": p.grad for n, p in net.named_parameters() if p.grad is not None}
    return found | {n: b.clone() for n, b in net.named_buffers()}


def _plain(net: nn.Module) -> nn.Module:
    """The same net without torch's own synchronisation, which refuses a CPU; the references'."""
    if isinstance(net, nn.SyncBatchNorm):
        plain = nn.BatchNorm2d(3).double()
        plain.load_state_dict(net.state_dict())
        return nn.Sequential(plain, nn.Tanh()) if isinstance(net, SyncAct) else plain
    return net


def _synced_on_rank(rows: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    rank, ranks, total = dist.get_rank(), len(rows), sum(rows)
    factor = ranks * rows[rank] / total
    results = {}
    for name in NETS:
        net = _net(name)
        sync_batch_norm(net, factor=lambda: factor, counted=lambda: rows[rank] > 0)
        start = sum(rows[:rank])
        whole = _batch(name, total)
        x = whole[start : start + rows[rank]] if rows[rank] else whole[:1] * 100
        found = _run_net(name, net, x)
        found["x.grad"] *= factor / ranks
        for parameter in net.parameters():
            if parameter.grad is not None:  # what the reducer does
                parameter.grad *= factor / ranks
                dist.all_reduce(parameter.grad)
        results[name] = found
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_equals_one_process_on_the_whole_batch(rows: tuple[int, ...]) -> None:
    by_rank = run_ranks(_synced_on_rank, len(rows), rows)
    for name in NETS:
        expected = _run_net(name, _plain(_net(name)), _batch(name, sum(rows)))
        expected = {key.removeprefix("0."): v for key, v in expected.items()} if name.startswith("sub") else expected
        for rank, results in enumerate(by_rank):
            found = results[name]
            assert found.keys() == expected.keys(), name
            start = sum(rows[:rank])
            for key, value in expected.items():
                per_row = key in ("first", "second", "x.grad")
                if per_row and not rows[rank]:
                    if key == "x.grad":
                        assert not found[key].any(), name
                    continue
                wanted = value[start : start + rows[rank]] if per_row else value
                torch.testing.assert_close(
                    found[key], wanted, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
                )


def _train_on_rank(rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """With the reducer of epl, and batch norm on a group of its own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    factor = lambda: len(rows) * rows[rank] / sum(rows)  # noqa: E731
    net = _net("cnn")
    reducer = GradientReducer(net, factor=factor)
    sync_batch_norm(net, dist.new_group(), factor=factor, counted=lambda: rows[rank] > 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        start = sum(rows[:rank])
        whole = _batch("cnn", sum(rows))
        optimizer.zero_grad()
        net(whole[start : start + rows[rank]] if rows[rank] else whole[:1]).square().flatten(1).sum(1).mean().backward()
        optimizer.step()
    reducer.close()
    state = copy.deepcopy(net.state_dict())
    dist.destroy_process_group()
    return state


def test_trains_with_the_reducer_as_one_process() -> None:
    rows = (3, 0, 2)
    net = _net("cnn")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net(_batch("cnn", sum(rows))).square().flatten(1).sum(1).mean().backward()
        optimizer.step()
    for state in run_ranks(_train_on_rank, len(rows), rows):
        torch.testing.assert_close(state, net.state_dict(), rtol=1e-10, atol=1e-10)


def _kinds_on_rank() -> dict[str, object]:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    torch.manual_seed(0)
    whole = torch.randn(8, 3, 4, 4) * 2 + 1
    own = whole.chunk(2)[rank]

    def run(name: str, norm: nn.Module, x: torch.Tensor, **autocast: object) -> None:
        handle = sync_batch_norm(norm)
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
            y = norm(x)
        (y.float() * x.detach().float()).sum().backward()
        handle.undo()
        found[name] = {"y": y.detach(), "x.grad": x.grad, **norm.state_dict()}

    run("float32", nn.BatchNorm2d(3), own)
    run("bfloat16", nn.BatchNorm2d(3).bfloat16(), own.bfloat16())
    run("bfloat16, float32 parameters", nn.BatchNorm2d(3), own.bfloat16())
    run("autocast", nn.BatchNorm2d(3), own.bfloat16(), on=True)
    run("channels last", nn.BatchNorm2d(3), own.contiguous(memory_format=torch.channels_last))
    run("far from zero", nn.BatchNorm2d(3), own + 10_000)
    found["layout kept"] = found["channels last"]["y"].is_contiguous(memory_format=torch.channels_last)

    empty = nn.BatchNorm2d(3)
    sync_batch_norm(empty)
    x = own[: 4 * (1 - rank)].clone().requires_grad_()  # rank 1 has no row at all
    y = empty(x)
    y.square().sum().backward()
    found["empty"] = {"shapes": (tuple(y.shape), tuple(x.grad.shape)), **empty.state_dict()}

    # Evaluation runs where it is called: rank 0 alone, with and without running statistics.
    for tracked in (True, False):
        norm = nn.BatchNorm2d(3, track_running_stats=tracked)
        sync_batch_norm(norm)
        norm.eval()
        if rank == 0:
            torch.testing.assert_close(norm(own), nn.BatchNorm2d(3, track_running_stats=tracked).eval()(own))
    # Under no_grad training statistics are still those of all ranks.
    norm = nn.BatchNorm2d(3)
    sync_batch_norm(norm)
    with torch.no_grad():
        norm(own)
    found["no_grad"] = norm.state_dict()
    # A copy is local: rank 0 runs it alone, in training mode.
    if rank == 0:
        local, reference = copy.deepcopy(norm), nn.BatchNorm2d(3)
        reference.load_state_dict(norm.state_dict())
        torch.testing.assert_close(local(own), reference(own))
    dist.destroy_process_group()
    return found


def test_dtypes_layouts_and_modes() -> None:
    torch.manual_seed(0)
    whole = torch.randn(8, 3, 4, 4) * 2 + 1

    def reference(norm: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        (y.float() * x.detach().float()).sum().backward()
        return {"y": y.detach(), "x.grad": x.grad, **norm.state_dict()}

    plain = reference(nn.BatchNorm2d(3), whole)
    mixed = reference(nn.BatchNorm2d(3), whole.bfloat16())
    expected = {
        "float32": plain,
        "bfloat16": reference(nn.BatchNorm2d(3).bfloat16(), whole.bfloat16()),
        "bfloat16, float32 parameters": mixed,
        "autocast": mixed,
        "channels last": plain,
        "far from zero": reference(nn.BatchNorm2d(3), whole + 10_000),
    }
    for rank, found in enumerate(run_ranks(_kinds_on_rank, 2)):
        for name, values in expected.items():
            for key, value in values.items():
                wanted = value.chunk(2)[rank] if key in ("y", "x.grad") else value
                half, far = wanted.dtype == torch.bfloat16, name == "far from zero"
                tolerance = 2e-2 if half else 1e-2 if far else 1e-5
                assert found[name][key].dtype == wanted.dtype, (name, key)
                torch.testing.assert_close(found[name][key], wanted, rtol=tolerance, atol=tolerance)
        assert found["layout kept"]
        first_half = reference(nn.BatchNorm2d(3), whole[:4])
        assert found["empty"]["shapes"] == (((4, 3, 4, 4),) * 2, ((0, 3, 4, 4),) * 2)[rank]
        torch.testing.assert_close(found["empty"]["running_var"], first_half["running_var"])
        torch.testing.assert_close(found["no_grad"]["running_var"], plain["running_var"])


def _uncounted_on_rank() -> torch.Tensor:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(3).double()
    sync_batch_norm(norm, counted=lambda: rank == 0)
    x = _batch("1d", 6).chunk(2)[rank].clone().requires_grad_()
    norm(x).pow(3).sum(1).mean().backward()
    dist.destroy_process_group()
    assert x.grad is not None
    return x.grad / 2  # of J = (L_0 + L_1) / 2


def test_rows_that_do_not_count_but_weigh_are_normalised_with_the_others_statistics() -> None:
    x = _batch("1d", 6).requires_grad_()
    variance, mean = torch.var_mean(x[:3], 0, correction=0)
    ((x - mean) / (variance + 1e-5).sqrt()).pow(3).sum(1).mean().backward()
    assert x.grad is not None
    torch.testing.assert_close(torch.cat(run_ranks(_uncounted_on_rank, 2)), x.grad, rtol=1e-10, atol=1e-10)


def _too_few() -> None:
    dist.init_process_group("gloo")
    norm = nn.BatchNorm1d(3)
    sync_batch_norm(norm, counted=lambda: dist.get_rank() == 0)
    norm(torch.randn(1, 3))


def test_one_value_per_channel_raises_on_every_rank() -> None:
    for kind, text in rank_errors(_too_few, 2):
        assert kind == "DataError"
        assert "found 1 over 2 ranks, input size (1, 3)" in text


# ---- one process: what happens to the modules ----------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time statistics are gathered."""
    calls: list[int] = []
    gather = dist.all_gather_single

    def counting(*args, **kwargs):
        calls.append(1)
        return gather(*args, **kwargs)

    monkeypatch.setattr(dist, "all_gather_single", counting)
    return calls


def test_modules_stay_the_users(group: dist.ProcessGroup, gathers: list[int]) -> None:
    net = _cnn()
    modules, names, state, text = list(net.modules()), [n for n, _ in net.named_modules()], net.state_dict(), repr(net)
    seen: list[str] = []
    net[1].register_forward_hook(lambda *_: seen.append("hook"))
    attributes = set(vars(net[1]))

    handle = sync_batch_norm(net, group)

    assert handle.modules == [net[1], net[4]]
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    assert ([n for n, _ in net.named_modules()], list(net.state_dict()), repr(net)) == (names, list(state), text)
    assert isinstance(net[1], nn.BatchNorm2d)
    assert isinstance(net[4], NormAct)
    assert set(vars(net[1])) == attributes
    net(torch.randn(2, 3, 5, 5))
    assert (len(gathers), seen) == (2, ["hook"])

    handle.undo()
    handle.undo()
    assert [type(m) for m in (net[1], net[4])] == [nn.BatchNorm2d, NormAct]
    net(torch.randn(2, 3, 5, 5))
    assert len(gathers) == 2


def _saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, _saved, *(lambda n, p=p: pickle.loads(pickle.dumps(n, p)) for p in (0, 2, 5))],
    ids=["deepcopy", "copy", "torch.save", "pickle 0", "pickle 2", "pickle 5"],
)
def test_copies_are_local_and_of_the_users_class(duplicate, group: dist.ProcessGroup, gathers: list[int]) -> None:
    for cls in (nn.BatchNorm2d, NormAct, nn.SyncBatchNorm, SyncAct):
        norm = cls(3)
        handle = sync_batch_norm(norm, group)
        norm(torch.randn(2, 3, 2, 2))
        before = len(gathers)
        twin = duplicate(norm)
        assert type(twin) is cls
        torch.testing.assert_close(twin.state_dict(), norm.state_dict())
        if not issubclass(cls, nn.SyncBatchNorm):  # which wants a GPU
            twin(torch.randn(2, 3, 2, 2))
        assert len(gathers) == before
        norm(torch.randn(2, 3, 2, 2))
        assert len(gathers) == before + 1, "the original stays synchronised"
        handle.undo()


def test_a_second_time_over_the_same_group_changes_nothing(group: dist.ProcessGroup, gathers: list[int]) -> None:
    net = _cnn()
    first, second = sync_batch_norm(net, group), sync_batch_norm(net, group)
    assert second.modules == []
    second.undo()
    net(torch.randn(2, 3, 5, 5))
    assert len(gathers) == 2
    first.undo()
    assert type(net[1]) is nn.BatchNorm2d


def test_what_cannot_be_synchronised_is_refused_all_at_once(group: dist.ProcessGroup) -> None:
    taken, forwarded = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    sync_batch_norm(taken, dist.new_group())
    forwarded.forward = forwarded.forward
    net = nn.ModuleDict(
        {"taken": taken, "lazy": nn.LazyBatchNorm2d(), "forwarded": forwarded, "good": nn.BatchNorm1d(3)}
    )
    with pytest.raises(UsageError) as caught:
        sync_batch_norm(net, group)
    text = str(caught.value)
    assert "3 problems" in text
    assert "taken (BatchNorm1d) is synchronised over another process group" in text
    assert "lazy (LazyBatchNorm2d) does not know its size yet" in text
    assert "forwarded (BatchNorm1d) has a forward set on the object" in text
    assert type(net["good"]) is nn.BatchNorm1d
    with pytest.raises(UsageError, match=r"takes an nn\.Module first, found list"):
        sync_batch_norm([net], group)  # type: ignore[arg-type]


def test_needs_a_process_group() -> None:
    with pytest.raises(UsageError, match=r"call epl\.init\(\) first"):
        sync_batch_norm(nn.BatchNorm1d(3))


def test_statistics_by_hand_are_noticed(group: dist.ProcessGroup) -> None:
    class ByHand(nn.BatchNorm1d):
        def forward(self, x):
            return (x - x.mean(0)) / x.std(0)

    norm = ByHand(3)
    sync_batch_norm(norm, group)
    with pytest.warns(UserWarning, match=r"ByHand did not call torch\.nn\.functional\.batch_norm"):
        norm(torch.randn(4, 3))
    norm.eval()
    norm(torch.randn(4, 3))


class Looking(nn.BatchNorm1d):
    """Reads numbers, so it cannot be recorded on fake tensors."""

    def forward(self, x):
        return super().forward(x) * float(bool(x.sum() < torch.inf))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: torch.device("cpu")])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Looking])
def test_a_recorded_forward_neither_talks_nor_warns(
    kind: type[nn.Module], mode: Any, group: dist.ProcessGroup, gathers: list[int]
) -> None:
    # A forward is recorded again for rows of another number, by now with synchronised batch norms. Torch functions are off then, so
    # it was said that statistics are those of this rank alone; with a mode of the user's own on, they were gathered, of nothing.
    model = nn.Sequential(nn.Linear(2, 3), kind(3))
    sync_batch_norm(model, group)
    recordings = Recordings(model, owners_of(model, taskgraphs_of(model, registry)), device=torch.device("cpu"))
    with warnings.catch_warnings(record=True) as said, mode():
        warnings.simplefilter("always")
        recordings.of((torch.randn(4, 2),), {}, 1)
    assert [str(each.message) for each in said] == []
    assert not gathers
    model(torch.randn(4, 2))
    assert gathers


def test_checks_of_torch_remain(group: dist.ProcessGroup) -> None:
    norm = nn.BatchNorm2d(3)
    sync_batch_norm(norm, group)
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.randn(4, 3))
    with pytest.raises(DataError, match="more than 1 value per channel"):
        norm(torch.randn(1, 3, 1, 1))


def test_second_derivatives_are_refused(group: dist.ProcessGroup) -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    sync_batch_norm(norm, group)
    (dx,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_under_torch_compile(group: dist.ProcessGroup, gathers: list[int]) -> None:
    net = _cnn()
    reference = copy.deepcopy(net)
    sync_batch_norm(net, group)
    x = torch.randn(4, 3, 5, 5)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert len(gathers) == 2
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
