"""Each private torch name that epl leans on still behaves as epl/_torch.py says; a new torch release must pass these first."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch import nn

from epl import _torch
from epl.graph.spec import Spec


def test_callbacks_run_once_when_backward_ends():
    order: list[str] = []
    p = nn.Parameter(torch.ones(2))

    def hook(parameter):
        order.append("hook")
        _torch.when_backward_ends(lambda: order.append("end"))

    p.register_post_accumulate_grad_hook(hook)
    assert _torch.backward_id() == -1
    (p * 2).sum().backward()
    assert order == ["hook", "end"]


def test_backward_ids_tell_nested_passes_apart():
    seen: list[int] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(_torch.backward_id())
            with torch.enable_grad():
                q = nn.Parameter(torch.ones(1))
                q.register_hook(lambda g: seen.append(_torch.backward_id()))
                (q * 2).sum().backward()
            return gradient

    Nested.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert len(set(seen)) == 2
    assert -1 not in seen


def test_a_hook_before_accumulation_comes_after_the_users_and_may_replace_the_gradient():
    p, order = nn.Parameter(torch.ones(1)), []
    accumulator = _torch.gradient_accumulator(p)
    accumulator.register_prehook(lambda g: (order.append("ours"), (g[0] * 3,))[1])
    p.register_hook(lambda g: order.append("user's"))
    (p * 2).sum().backward()
    assert order == ["user's", "ours"]
    assert p.grad.item() == 6
    p.requires_grad_(False).requires_grad_(True)
    p.grad = None
    (p * 2).sum().backward()
    assert p.grad.item() == 6  # the node survives freezing


def test_versions_count_changes_in_place():
    t = torch.zeros(2)
    before = _torch.version_of(t)
    t.add_(1)
    assert _torch.version_of(t) == before + 1


def test_views_are_known():
    t = torch.zeros(2)
    assert _torch.is_view(t[:1])
    assert not _torch.is_view(t)
    assert not _torch.is_view(t.detach())


def test_batch_norm_writes_its_statistics_without_counting():
    # Why BufferKeeper compares small buffers by value; if this fails, it need not any more.
    norm = nn.BatchNorm1d(2)
    before = _torch.version_of(norm.running_mean)
    norm(torch.randn(4, 2))
    assert _torch.version_of(norm.running_mean) == before


def test_the_users_module_under_torch_compile():
    inner = nn.Linear(1, 1)
    assert _torch.module_without_compile(torch.compile(inner, backend="eager")) is inner
    assert _torch.module_without_compile(inner) is inner


def test_trees():
    tree = {"a": [1, (2, None)], "b": 3}
    assert _torch.tree_leaves(tree) == [1, 2, None, 3]


def test_gradient_hooks_can_be_taken_off_and_given_back():
    parameter, seen = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(lambda gradient: seen.append("before"))
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    assert _torch.count_hooks(parameter) == 2
    hooks = _torch.take_hooks(parameter)
    parameter.sum().backward()
    assert seen == []
    _torch.give_hooks(parameter, hooks)
    parameter.sum().backward()
    assert seen == ["before", "after"]
    handle.remove()
    assert _torch.count_hooks(parameter) == 1
    torch.autograd.backward([parameter], [torch.ones(2)])  # on a leaf itself: hooks run and the gradient is added
    assert seen == ["before", "after", "before"]
    assert parameter.grad.tolist() == [3, 3]


def test_operations_are_seen_by_name_with_their_arguments_also_without_numbers():
    for mode in (torch.enable_grad(), _torch.fake_mode()):
        seen: list[tuple[str, list[tuple[int, ...]]]] = []
        layer = nn.Linear(3, 2)

        def note(operation, args, seen=seen):
            seen.append((operation.name(), [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))

        with mode, _torch.OperationWatch(note):
            layer(torch.ones(4, 3))
        assert ("aten::addmm", [(2,), (4, 3), (3, 2)]) in seen


def test_an_error_raised_while_an_operation_is_noted_is_what_the_caller_gets():
    error = ValueError("seen")

    def note(operation, args):
        raise error

    with pytest.raises(ValueError, match="seen") as caught, _torch.OperationWatch(note):
        torch.ones(2).add(1)
    assert caught.value is error


def test_subclasses_are_not_asked_inside_no_tensor_subclass():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("asked")

    loud = torch.ones(2).as_subclass(Loud)
    with _torch.no_tensor_subclass():
        assert tuple(loud.shape) == (2,)
        with pytest.raises(AssertionError, match="asked"), _torch.tensor_subclasses_asked():
            loud + 1
        assert tuple(loud.shape) == (2,)
    with pytest.raises(AssertionError, match="asked"):
        loud + 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_functions_are_seen_when_they_are_applied_also_through_a_name_bound_earlier():
    apply, seen = Twice.apply, []

    def note(owner, original, args, kwargs):
        seen.append(owner)
        return original(*args, **kwargs)

    with _torch.function_applications(note):
        assert apply(torch.ones(1)).item() == 2
        with _torch.function_applications(lambda owner, original, args, kwargs: "inner"):
            assert apply(torch.ones(1)) == "inner"
        assert Twice.apply(torch.ones(1)).item() == 2
    assert apply(torch.ones(1)).item() == 2
    assert seen == [Twice, Twice]


def test_a_wrapper_tensor_has_a_shape_and_no_memory():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    spec = Spec(torch.Size([3, 10**9]), (10**9, 1), torch.float64, torch.device("cpu"), True)
    wrapper = _torch.wrapper_tensor(Wrapper, spec)
    assert type(wrapper) is Wrapper
    assert wrapper.shape == spec.shape
    assert wrapper.requires_grad


def test_whether_a_backward_keeps_its_graph_is_known_inside_it():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: seen.append(_torch.backward_keeps_graph()))
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_the_same_memory_may_be_changed_in_place_and_is_differentiable():
    leaf = torch.ones(3, requires_grad=True)
    other = _torch.same_memory(leaf)
    assert other.data_ptr() == leaf.data_ptr()
    other.mul_(2.0)
    other[0] = 0.0
    other.sum().backward()
    assert leaf.grad.tolist() == [0.0, 2.0, 2.0]


def test_functions_that_functional_borrows_have_a_place_of_their_own():
    assert any(getattr(space, "softplus", None) is nn.functional.softplus for space in _torch.function_spaces())


def test_l1_loss_forgets_its_weight_on_the_way_to_a_subclass():
    """If this fails, torch is mended, and `weight_of_l1_loss` can go."""
    seen = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(kwargs or {})

    nn.functional.l1_loss(torch.ones(1).as_subclass(Asked), torch.ones(1), weight=torch.ones(1))
    assert "weight" not in seen[0]


def test_even_autograd_grad_runs_the_hooks_of_a_leaf():
    p = nn.Parameter(torch.ones(1))
    p.register_hook(lambda g: 10 * g)
    assert torch.autograd.grad((2 * p).sum(), p)[0].item() == 20
    assert torch.autograd.grad(p, p, torch.ones(1))[0].item() == 10


def test_a_parameter_may_change_its_class_and_keep_its_accumulator():
    class Other(nn.Parameter):
        pass

    p = nn.Parameter(torch.ones(2))
    accumulator = _torch.gradient_accumulator(p)
    p.__class__ = Other
    p.data = torch.zeros(1).expand(2)
    p.__class__ = nn.Parameter
    p.data = torch.ones(2)
    assert _torch.gradient_accumulator(p) is accumulator


def test_fake_tensors_have_shapes_and_no_numbers():
    mode = _torch.fake_mode()
    with mode:
        x = torch.ones(2, 3)
        assert _torch.is_fake(x)
        assert (x @ x.T).shape == (2, 2)
        made = _torch.make_fake(mode, torch.Size([4, 3]), (1, 4), torch.float32, torch.device("cpu"))
        assert ((made @ x.T).shape, made.stride(), made.device.type) == ((4, 2), (1, 4), "cpu")
        for read in (lambda: x.sum().item(), lambda: x.nonzero()):
            with pytest.raises(_torch.NEEDS_DATA):
                read()
        with _torch.without_fake_mode():
            assert torch.ones(2).sum().item() == 2
    assert not _torch.is_fake(torch.ones(1))
    assert issubclass(_torch.NO_FAKE_KERNEL, RuntimeError)


def test_fake_tensors_that_share_memory_are_known():
    with _torch.fake_mode():
        x = torch.ones(4, 4)
        assert _torch.memory_of(x) == _torch.memory_of(x[1:].T)
        assert _torch.memory_of(x) != _torch.memory_of(x + 1)
        assert _torch.memory_of(x) != _torch.memory_of(torch.ones(4, 4))


def test_a_fake_mode_that_fails_can_be_kept_quiet(caplog):
    with _torch.fake_mode():
        a, b = torch.ones(2, 4, 4), torch.ones(2, 4, 4)
        for _ in range(2):
            with _torch.fake_failures_unsaid(), pytest.raises(RuntimeError, match="BF16"):
                torch.nn.functional.grouped_mm(a, b)
    assert caplog.records == []


def test_functions_are_seen_however_they_are_called():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    bound, seen = Double.apply, []

    def apply(owner, original, args, kwargs):
        seen.append(owner)
        return original(*args, **kwargs)

    with _torch.function_applications(apply):
        assert bound(torch.ones(1)).item() == 2
        assert Double.apply(torch.ones(1)).item() == 2
    assert Double.apply(torch.ones(1)).item() == 2
    assert seen == [Double, Double]


def test_torch_function_modes_are_counted_and_left_alone():
    before = _torch.count_function_modes()
    with torch.device("meta"):
        assert _torch.count_function_modes() == before + 1
        assert torch.ones(1).device.type == "meta"
        with _torch.no_torch_function():
            assert torch.ones(1).device.type == "cpu"


def test_containers_known_to_torch_are_taken_apart_and_rebuilt():
    children, rebuild = _torch.tree_children({"a": 1, "b": 2})
    assert (children, rebuild([3, 4])) == ([1, 2], {"a": 3, "b": 4})
    found = torch.ones(2, 2).max(0)
    children, rebuild = _torch.tree_children(found)
    assert len(children) == 2
    assert type(rebuild(children)) is type(found)
    assert _torch.tree_children(object()) is None


def test_losses_of_torch_have_a_class_in_common():
    assert _torch.is_loss(nn.CrossEntropyLoss())
    assert _torch.is_loss(nn.MSELoss())
    assert not _torch.is_loss(nn.Linear(1, 1))


def test_operations_are_watched_below_modules_and_modes():
    seen = []
    with _torch.fake_mode():
        x, layer = torch.ones(2, 2), nn.Linear(2, 2)
        with _torch.OperationWatch(lambda operation, args: seen.extend(args)), _torch.no_torch_function():
            layer(x)
    assert any(each is x for each in seen)


def test_a_scaler_unscales_by_what_replaces_its_own_way():
    p, seen = nn.Parameter(torch.ones(1)), []
    optimizer, scaler = torch.optim.SGD([p], 1.0), torch.amp.GradScaler("cpu", init_scale=8.0)

    def make(original):
        def unscale(own, held, *more):
            seen.append(held)
            found = original(own, held, *more)
            assert [flag.item() for flag in found.values()] == [0.0]
            return {device: torch.ones_like(flag) for device, flag in found.items()}

        return unscale

    undo = _torch.replace_unscaling(make)
    try:
        for explicitly in (True, False):
            scaler.scale((p * 2).sum()).backward()
            if explicitly:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    finally:
        undo()
    assert seen == [optimizer] * 2
    assert p.item() == 1.0
    assert scaler.get_scale() == 2.0


def test_a_tensor_on_the_meta_device_is_given_memory_under_the_same_object():
    with torch.device("meta"):
        layer = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    seen, weak = [], weakref.ref(layer.weight)
    layer.weight.register_hook(seen.append)
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    layer.bias.requires_grad_(False)
    _torch.give_memory(layer.weight, torch.zeros(4, 3))
    _torch.give_memory(layer.bias, torch.zeros(1).expand(4))
    assert weak() is layer.weight
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.device.type == "cpu"
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, torch.full((4, 3), -2.0))
    assert len(seen) == 2


def test_modules_of_torch_fill_themselves_anew():
    for module in (nn.Linear(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1), nn.Embedding(2, 2), nn.GRU(2, 2)):
        assert _torch.resets_of(module), type(module)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.data.fill_(77)
        for reset in _torch.resets_of(module):
            reset()
        assert all((t != 77).all() for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)])


def test_lbfgs_steps_the_parameters_of_its_list():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 3.0))
    optimizer = torch.optim.LBFGS([p], max_iter=2)
    assert _torch.lbfgs_parameters(optimizer) == [p]

    def closure():
        _torch.set_lbfgs_parameters(optimizer, [q])
        q.grad = 2 * q.detach()
        return q.detach().pow(2).sum()

    optimizer.step(closure)
    assert p.tolist() == [1.0, 1.0]
    assert q.max().item() < 3.0
    assert list(optimizer.state) == [p]


def test_a_functional_call_is_seen_from_inside():
    seen = []

    class Asks(nn.Linear):
        def forward(self, x):
            seen.append(_torch.inside_functional_call())
            return super().forward(x)

    module, x = Asks(2, 2), torch.ones(1, 2)
    module(x)
    torch.func.functional_call(module, {"weight": torch.zeros(2, 2)}, (x,))
    module(x)
    assert seen == [False, True, False]


def test_a_mode_sees_factories_and_what_it_gives_is_taken():
    seen = []

    def answer(operation, args, kwargs):
        seen.append(operation.name())
        return operation(*args, **kwargs)

    with _torch.OperationMode(answer):
        torch.randn(2)
        with _torch.without_operation_modes():
            torch.zeros(2)
        nn.Parameter(torch.Tensor(3)).data.uniform_()
    assert seen[0] == "aten::randn"
    assert "aten::zeros" not in seen
    assert {"aten::detach", "aten::uniform_"} <= set(seen)
    with _torch.fake_mode() as mode:
        assert _torch.current_fake_mode() is mode
        with _torch.without_operation_modes():
            assert not _torch.is_fake(torch.ones(1))
    assert _torch.current_fake_mode() is None


def test_a_parameter_becomes_another_class_and_back_with_its_gradient_and_hooks():
    class Bare(torch.Tensor):
        __torch_function__ = _torch.NO_TORCH_FUNCTION

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func.name())

    p, calls = nn.Parameter(torch.ones(2)), []
    watch = weakref.ref(p)
    p.register_hook(calls.append)
    p.grad = torch.full((2,), 3.0)
    twin = torch.empty(4, device="meta")[2:]
    _torch.become(p, Bare, _torch.storageless(Bare, twin, torch.device("cpu")))
    assert (type(p), isinstance(p, nn.Parameter), p.requires_grad, p.device.type) == (Bare, True, True, "cpu")
    assert (p.shape, p.storage_offset()) == ((2,), 2)
    with pytest.raises(NotImplementedError, match="aten::mul"):
        p * 2
    with torch.no_grad(), _torch.seen_as_plain():
        p.unsqueeze_(0)
    assert (p.shape, p.storage_offset()) == ((1, 2), 2)
    _torch.become(p, nn.Parameter, torch.ones(2))
    assert type(p) is nn.Parameter
    assert "_is_param" not in vars(p)
    (p * 2).sum().backward()
    assert p.grad.tolist() == [5, 5]
    assert len(calls) == 1
    assert watch() is p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["uniform_", "normal_", "random_", "log_normal_", "cauchy_"])
def test_random_numbers_may_be_drawn_in_pieces(name, dtype):
    """As epl/graph/deferred/recipe.py says: pieces begin at multiples of 16 and end in one of at least 16 elements."""
    for size in (32, 33, 48, 63, 4099):
        torch.manual_seed(1)
        whole = getattr(torch.empty(size, dtype=dtype), name)()
        after = torch.rand(3)
        torch.manual_seed(1)
        pieces = [getattr(torch.empty(length, dtype=dtype), name)() for length in (16, size - 16)]
        assert torch.equal(torch.cat(pieces), whole)
        assert torch.equal(torch.rand(3), after)


def test_compiled_functions_of_nn_dispatch_as_those_of_their_namespace():
    seen: list[object] = []

    class Watch(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    nn.functional.gelu(torch.ones(2).as_subclass(Watch))
    assert seen[0] is _torch.nn_functions().gelu or seen[0] is nn.functional.gelu
    assert callable(_torch.nn_functions().scaled_dot_product_attention)


def test_a_wrapper_subclass_shows_a_shape_that_it_does_not_hold():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("nothing is computed")

    made = _torch.wrapper_subclass(Wrapper, torch.Size((1_000_000, 1_000_000)), torch.ones(2, dtype=torch.float64))
    assert type(made) is Wrapper
    assert made.shape == (1_000_000, 1_000_000)
    assert made.dtype is torch.float64
    made.note = 1  # attributes stay
    assert made.note == 1


def test_compiled_functions_run_as_written_where_asked():
    import torch._dynamo.eval_frame  # what is loaded by torch.compile

    traced: list[bool] = []

    @torch.compile(backend="eager")
    def double(x):
        traced.append(torch.compiler.is_compiling())
        return x * 2

    undo = _torch.compiled_unless(lambda: True)
    try:
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    finally:
        undo()
    assert traced == [False]
    traced.clear()
    double(torch.ones(2))
    assert traced == [True]


def test_optimizers_ask_the_class_of_a_parameter_before_they_step_many_in_one_call() -> None:
    from torch.optim import optimizer

    class Own(nn.Parameter):
        pass

    assert Own not in optimizer._foreach_supported_types
    _torch.allow_foreach(Own)
    try:
        assert Own in optimizer._foreach_supported_types
        assert "_foreach_supported_types" in inspect.getsource(optimizer._default_to_fused_or_foreach)
    finally:
        optimizer._foreach_supported_types.remove(Own)


def test_gradient_hooks_are_replaced_where_they_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    handle = parameter.register_hook(lambda g: g * 3)
    _torch.change_gradient_hooks(parameter, lambda hook: lambda g: hook(g) + 1)
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4.0, 4.0]
    handle.remove()
    assert _torch.count_hooks(parameter) == 0


def test_frames_between_a_function_that_dynamo_leaves_alone_and_its_caller():
    @_torch.without_dynamo
    def between() -> list[str]:
        return [frame.filename for frame in inspect.stack()[1:]]

    found = between()
    caller = next(n for n, name in enumerate(found) if name == __file__)
    assert all(name.startswith(_torch.files_of_dynamo()) for name in found[:caller])
    assert caller > 0
