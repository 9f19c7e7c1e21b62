"""What bypasses torch functions inside and around split parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from epl.errors import SplitError
from epl.parallel.split.choose import choose
from epl.parallel.split.part import SplitPart
from epl.parallel.split.value import SplitTensor, gather_all, shard, whole
from epl.plan.split.cut import Axis, Cut
from tests.parallel.split import cases
from tests.parallel.split.cases import MLP, Case, alone
from tests.parallel.split.parity import check, close, plans_of, split_copy
from tests.parallel.split.threads import ThreadRanks, run_threads


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def equal(module: nn.Module, *shape: int) -> list[str]:
    """Compare with one device, on two threads; the collectives of a step."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return check(alone(module.double(), x(*(shape or (4, 8)))), 2)


# ---- checkpoint


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), reentrant

    def inner(self, h: torch.Tensor) -> Any:
        return self.norm(self.b(torch.relu(h)))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, self.a(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant: bool) -> None:
    equal(Checkpointed(reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # on one device, too
def test_a_reentrant_checkpoint_of_what_does_not_learn_gives_no_gradients() -> None:
    # Inside a part it is carried out as the other kind, which gave the gradients that one device does not have.
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
            self.head = nn.Linear(8, 6)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(checkpoint(self.inner, ids, use_reentrant=True))

    check(alone(Ids().double(), torch.arange(6).view(2, 3)), 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(reentrant: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = MLP(8, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    module = Around().double()
    check(Case(module, [module.part], lambda m, i: (m(i),), x(4, 8)), 2)


def test_backward_may_go_through_a_checkpoint_twice() -> None:
    # As with ZeroBubble (gradients of inputs, then of weights), or with two losses: what surrounds the computing again could be entered once.
    # And what was computed again for `autograd.grad(loss, [a cut parameter])` did not know split values: torch asked no subclasses then.
    module = Checkpointed(False).double()
    given = x(4, 8).requires_grad_()
    wanted = torch.autograd.grad(module(given).square().sum(), [given, module.a.weight])
    plan = choose(module, 2, (given,))

    def on_rank(ranks: ThreadRanks) -> None:
        own, h = copy.deepcopy(module), given.detach().clone().requires_grad_()
        part = SplitPart(own, plan, ranks)
        out = whole(own(h)).square().sum()
        (first,) = torch.autograd.grad(out, [h], retain_graph=True)
        (second,) = torch.autograd.grad(out, [dict(own.named_parameters())["a.weight"]])
        close(first, wanted[0], "the input's")
        close(second, plan.layouts()["a.weight"].take(wanted[1], ranks.rank), "the weight's")
        part.undo()

    run_threads(on_rank, 2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")  # what people call
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_hugging_face(reentrant: bool) -> None:
    case = cases.make_case("llama_layers")
    with cases.in_double(case.model):
        plans = plans_of(case, 2)
        case.model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        case.model.enable_input_require_grads()  # type: ignore[operator]
        check(case, 2, plans)


# ---- functions


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(x, SplitTensor)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_a_users_autograd_function_gathers() -> None:
    # It asks no tensor subclass: with a split value it would run without a graph, and gradients vanish in silence.
    class Own(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return self.b(Square.apply(self.a(x)))  # type: ignore[no-untyped-call]

    equal(Own(8, 16))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_function_gathers() -> None:
    @torch.jit.script  # type: ignore[untyped-decorator]
    def act(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)

    class Scripted(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return self.b(act(self.a(x)))

    equal(Scripted(8, 16))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # on one device, too
def test_a_compiled_inner_function_runs_as_written() -> None:
    act = torch.compile(lambda h: torch.relu(h) * 2, backend="eager")

    class Compiled(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return self.b(act(self.a(x)))

    equal(Compiled(8, 16))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_part_runs_as_written() -> None:
    # Traced, rules were given sizes and dims as tensors: "only integer tensors can be converted to an index".
    def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.compile(model, backend="eager")(x),)

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
    case = Case(layer, [layer], lambda m, i: (m(i),), x(2, 3, 8))
    check(case._replace(run=run), 2, plans_of(case, 2))


# ---- torch's fast paths


def padding() -> torch.Tensor:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return mask


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layers_alone", [False, True])
def test_encoder_in_evaluation_with_padding(layers_alone: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 48, 0.0, batch_first=True), 2).double()
    case = Case(encoder, list(encoder.layers) if layers_alone else [encoder], lambda m, i: (m(i),), x(2, 5, 24))
    plans = plans_of(case, 2)
    encoder.eval()
    with torch.no_grad():
        expected = encoder(case.x, src_key_padding_mask=padding())

    def body(ranks: ThreadRanks) -> None:
        split, parts = split_copy(case, plans, ranks)
        with torch.no_grad():
            found = whole(split.model(case.x, src_key_padding_mask=padding()))
        close(found[~padding()], expected[~padding()], "output")
        assert split.model.use_nested_tensor
        for part in parts.values():
            part.undo(gather=False)

    run_threads(body, 2)


# ---- what bends parameters


def test_weight_norm() -> None:
    module = MLP(8, 16)
    module.a = torch.nn.utils.parametrizations.weight_norm(module.a)
    equal(module)


def test_recurrent_layers_stay_whole() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.mlp = nn.LSTM(8, 8, batch_first=True), MLP(8, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.mlp(self.lstm(x)[0])

    equal(Recurrent(), 2, 5, 8)


def test_changes_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.a(x)
            h.mul_(2).add_(1)
            h = self.act(h)
            o = self.b(h)
            o += x
            o.clamp_(-1, 1)
            y = x.clone()
            y += self.b(h)
            y.add_(self.b(h))
            return o + y

    equal(InPlace())


def test_code_that_reads_shapes() -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            b, t, _ = x.shape
            q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
            n = q.shape[1]
            slopes = (2.0 ** (-torch.arange(1, n + 1, dtype=q.dtype))).view(1, n, 1, 1)
            at = torch.arange(q.shape[-2], dtype=q.dtype)
            scores = q @ q.transpose(-1, -2) + slopes * (at[None] - at[:, None])
            mask = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf")) + torch.zeros(scores.shape, dtype=scores.dtype)
            return self.o((scores.softmax(-1) @ q).transpose(1, 2).reshape(b, t, n * 4))

    equal(Slopes(), 2, 5, 8)


class Products(nn.Module):
    """Rows of every kind of product: a bias is added after the sum over ranks, in the precision of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.conv = MLP(32, 64), nn.Sequential(nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((32, 64), (64, 32), (32,)))

    def forward(self, x: torch.Tensor) -> Any:
        h = (x @ self.a).relu()
        images = self.conv(x.view(4, 2, 4, 4))
        return self.mlp(x), torch.addmm(self.c, h, self.b), images, (self.mlp(x) + images.flatten(1)).softmax(-1)


def test_autocast() -> None:
    torch.manual_seed(0)
    module, given = Products(), torch.randn(4, 32)
    plan = choose(module, 2, (given,))
    assert not [name for name in plan.whole if len(plan.shapes[name]) > 1]
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(module)(given)

    def body(ranks: ThreadRanks) -> None:
        part = SplitPart(copy.deepcopy(module), plan, ranks)
        with torch.autocast("cpu", torch.bfloat16):
            found = [whole(out) for out in part.module(given)]
        # What softmax gives is torch's choice, not alike on all machines.
        assert [out.dtype for out in found] == [out.dtype for out in expected]
        assert [out.dtype for out in found[:3]] == [torch.bfloat16] * 3
        sum(out.float().pow(2).sum() for out in found).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in part.module.parameters())
        for one, other in zip(found, expected, strict=True):
            assert float((one.float() - other.float()).abs().max().detach()) < 0.02
        part.undo(gather=False)

    run_threads(body, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            q = self.q(x).view(2, 5, 4, 4).transpose(1, 2)
            return self.o(flex_attention(q, q, q).transpose(1, 2).reshape(2, 5, 16))

    torch.manual_seed(0)
    module, given = Flex().double().requires_grad_(False), x(2, 5, 8)
    plan = choose(module, 2, (given,))
    expected = module(given)

    def body(ranks: ThreadRanks) -> None:
        part = SplitPart(copy.deepcopy(module), plan, ranks)
        close(whole(part.module(given)), expected, "output")
        learning = shard(x(2, 2, 5, 4).requires_grad_(), 1, Cut(Axis("heads", 4, 2)), ranks)
        with pytest.raises(SplitError, match="use scaled_dot_product_attention"):
            gather_all(flex_attention, (learning, learning, learning), {})
        part.undo(gather=False)

    run_threads(body, 2)


def test_foreach_optimizers_and_scalers() -> None:
    torch.manual_seed(0)
    module, given = MLP(8, 16), torch.randn(4, 8)
    plan = choose(module, 2, (given,))

    def step(model: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        scaler.scale(whole(model(given)).pow(2).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    expected = copy.deepcopy(module)
    step(expected)

    def body(ranks: ThreadRanks) -> None:
        part = SplitPart(copy.deepcopy(module), plan, ranks)
        step(part.module)
        for name, p in part.module.named_parameters():
            assert torch.allclose(part.gather(name, p), expected.get_parameter(name).detach(), atol=1e-5)
        part.undo(gather=False)

    run_threads(body, 2)


def test_dropout_of_zero_draws_nothing() -> None:
    class Still(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return self.b(F.dropout(self.act(self.a(x)), 0.0))

    equal(Still(8, 16))
