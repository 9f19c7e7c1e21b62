"""`epl.add_to_collection` and `epl.get_collection`: values of the step, merged over micro batches and replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from epl import _torch
from epl.cluster.communication import Job, speaking
from epl.data.active import active_batches
from epl.env import Env
from epl.errors import UsageError, list_problems
from epl.graph.collections import Collected, CollectingCall, Collections, GraphKeys, Moment, key_of, listener
from epl.graph.record.program import running_node
from epl.graph.record.where import inside_checkpoint
from epl.parallel.split.value import whole
from epl.train.lazy import LazyTensor, node_of
from epl.train.lazy.meeting import asks, meet
from epl.train.lazy.protocol import Call
from epl.train.lazy.read import read
from epl.train.lazy.whole import compute
from epl.train.merge import PartForm, Rank, Told, counted, merge_all, problems

_ALIGN = 16


def add_to_collection(
    tensor: torch.Tensor | Sequence[torch.Tensor] | str, key: torch.Tensor | Sequence[torch.Tensor] | str
) -> None:
    """Set a value of this step aside, to be merged over micro batches and replicas when `get_collection` is called.

        epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)

    In the loop, or inside the model's forward, on every rank alike. TensorFlow's order, (key, tensor), works too, and so does
    a list of tensors. The value is taken as it is now, without its gradient.
    """
    given, name = (key, tensor) if isinstance(tensor, str) else (tensor, key)
    found = key_of(name)
    values: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for value in values:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            kind = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(f"epl.add_to_collection takes a dense tensor, or a list of them, found {kind}")
    heard = listener()
    for value in values:
        if heard is not None:
            heard(collect, value, found)
        else:
            collect(value, found)


def collect(value: torch.Tensor, key: GraphKeys) -> None:
    """Add a value now; a forward that was written down calls this wherever the user's calls `add_to_collection`."""
    if _torch.backward_id() != -1 and inside_checkpoint():
        return  # a forward that is computed again for its backward has added it already
    if _torch.fake_mode_is_on():
        return  # a forward that is tried without numbers, to see what it costs or how it is split
    _process.watch()
    node = running_node()
    _process.collections.add(key, value.detach().clone(), None if node is None else node.meta["number"])


def collecting(rows: int, call: Call | None = None) -> CollectingCall:
    """Say that a model is called with so many rows, and will run in micro batches; `call`, if that may be later."""
    _process.watch()  # a rank whose stage adds nothing counts calls and steps like the others
    return _process.collections.call(rows, call)


def get_collection(key: str) -> list[torch.Tensor]:
    """One merged value for each object in a collection, in the order in which they were added; all ranks call it together.

    A collection holds the values of the current step: the first one that is added after an optimizer step, or after the loader
    has yielded its next batch, begins anew. Reading does not.
    """
    name = key_of(key)
    what = f"epl.get_collection({name.value})"
    env = Env.get()
    _process.watch()
    _run_calls(what)
    objects = _process.collections.objects(name)
    values = _real(objects, what)
    seats, own = _seats(env), env.cluster.rank
    scope = [n for n, seat in enumerate(seats) if name.is_global or seat[0] == seats[own][0]]
    told = tuple(Told.of(each) for each in objects)
    if len(scope) > 1:
        everyone: Any = env.job(what).gather(what, told)
        ranks = [Rank(*seat, objects) for seat, objects in zip(seats, everyone, strict=True)]
    else:
        ranks, scope, own = [Rank(*seats[own], told)], [0], 0
    found = problems(name.how, ranks, apart=not name.is_global)
    if found:
        raise UsageError(list_problems(what, found))
    # What a split left cut: its ranks have all of it alike, and of those of a stage only the first would gather it below.
    values = [[whole(value, what) for value in parts] for parts in values]
    if not _must_travel(ranks, scope):
        return merge_all(name.how, [ranks[own]], lambda rank, number, part: values[number][part])
    group = _process.group(env.job(what), ranks, scope)
    arrived = _exchange(env.job(what), what, group, [ranks[n] for n in scope], scope.index(own), values)
    return merge_all(name.how, [ranks[n] for n in scope], lambda *place: arrived[place])


def _seats(env: Env) -> list[tuple[int, int]]:
    """Of every rank, its replica and its share of the rows."""
    if env.plan is not None:
        return [(share.replica, share.replica * share.parts + share.part) for share in env.plan.data_shares]
    replicas = env.topology.all_groups("model") if env.topology is not None else []
    place = {rank: number for number, ranks in enumerate(replicas) for rank in ranks}
    numbers = [place.get(rank, rank) for rank in range(env.cluster.world_size)]
    return list(zip(numbers, numbers, strict=True))


def _run_calls(what: str) -> None:
    """What the modules add is there once they have run: a model that was called, and not yet used, runs now."""
    for caller in _process.collections.callers():
        call = cast("Call", caller)
        if call.state == "new" and call.nodes:
            asked = meet(call.carrier, what, call.nodes, ask=asks(call.carrier, call.nodes))
            compute(call.nodes, f"{what} is called before backward", asked=asked)


def _real(objects: Sequence[Collected], what: str) -> list[list[torch.Tensor]]:
    """The values of all parts; what the loop added before it was computed is computed now."""
    lazy = [part.value for each in objects for part in each.parts if isinstance(part.value, LazyTensor)]
    numbers = iter(read([node_of(value) for value in lazy], what) if lazy else [])
    return [
        [next(numbers) if isinstance(part.value, LazyTensor) else part.value for part in each.parts] for each in objects
    ]


def _must_travel(ranks: Sequence[Rank], scope: Sequence[int]) -> bool:
    """Whether a rank lacks something: what another stage has added, or other shares. All ranks decide alike."""
    if len({ranks[n].share for n in scope}) > 1:
        return any(rank.objects for rank in ranks)
    return len(scope) > 1 and any(each.on_stage for rank in ranks for each in rank.objects)


def _exchange(
    job: Job,
    what: str,
    group: dist.ProcessGroup | None,
    ranks: Sequence[Rank],
    own: int,
    values: Sequence[Sequence[torch.Tensor]],
) -> dict[tuple[int, int, int], torch.Tensor]:
    """Every part that counts, by (rank, object, part), on every rank of the group: one message."""
    places = list(counted(ranks))
    offsets: dict[tuple[int, int, int], int] = {}
    sizes = [0] * len(ranks)
    for rank, number, part in places:
        offsets[rank, number, part] = sizes[rank]
        sizes[rank] += -(-_nbytes(ranks[rank].objects[number].parts[part]) // _ALIGN) * _ALIGN
    everyone = torch.empty(len(ranks), max(_ALIGN, *sizes), dtype=torch.uint8, device=job.device)

    def room(place: tuple[int, int, int]) -> torch.Tensor:
        form = ranks[place[0]].objects[place[1]].parts[place[2]]
        flat = everyone[place[0], offsets[place] : offsets[place] + _nbytes(form)]
        return flat.view(form.dtype).view(form.shape)

    for place in places:
        if place[0] == own:
            room(place).copy_(values[place[1]][place[2]])
    with speaking(job, what):
        dist.all_gather_single(everyone.view(-1), everyone[own].clone(), group=group)
    return {place: room(place) for place in places}


def _nbytes(form: PartForm) -> int:
    return math.prod(form.shape) * form.dtype.itemsize


class _Process:
    """The collections of this process, and what they hear of."""

    def __init__(self) -> None:
        self.collections = Collections(_moment)
        self._env: Env | None = None
        self._steps: RemovableHandle | None = None
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def watch(self) -> None:
        """Hear of every optimizer's steps, and forget what was before `epl.init`."""
        found = Env.get()
        env = found if found.initialized else None
        if env is not self._env:
            self.forget()
            self._env = env
            found.at_close(self.forget)
        if self._steps is None:
            self._steps = register_optimizer_step_post_hook(lambda *_: self.collections.end_step())

    def group(self, job: Job, ranks: Sequence[Rank], scope: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks of `scope`: all, or one of the replicas, whose groups all ranks make together."""
        if len(scope) == len(ranks):
            return None
        replicas: dict[int, list[int]] = {}
        for number, rank in enumerate(ranks):
            replicas.setdefault(rank.replica, []).append(number)
        key = tuple(map(tuple, replicas.values()))
        if key not in self._groups:
            with speaking(job, "making process groups"):
                made = dist.new_subgroups_by_enumeration(list(map(list, key)), timeout=job.timeout)  # type: ignore[no-untyped-call]
            self._groups[key] = made[0]
        return self._groups[key]

    def forget(self) -> None:
        """Begin as if nothing had ever been added."""
        self.collections.clear()
        self._groups.clear()
        self._env = None
        if self._steps is not None:
            self._steps.remove()
            self._steps = None


def _moment() -> Moment:
    batches = active_batches()
    share = batches.share()
    return Moment(batches.number(), share.rows if share is not None else None)


_process = _Process()
