"""Arguments of split parts that the running forward leaves out, and the recorded one did not.

Hugging Face builds no attention mask where all of it is ones, or none is given; while a forward is recorded nobody can know that, and it
is built. Where ranks have rows of their own, some may have padding and others none, and a part is to be the same operations on all of
them. So it is called as recorded: where the forward gives None for a tensor that follows from the inputs of the model alone, that
tensor is computed from this rank's inputs. What else differs from the recording is refused (ownrows.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from epl.graph.record import RecordedCall, steps
from epl.graph.record.peek import Peek, peek
from epl.graph.record.tree import children_of
from epl.parallel.split.rows import Batched

Questions = Mapping[fx.Node, Peek]
"""By the tensors that parts are given: how they follow from the inputs of the model."""


def questions_of(recorded: RecordedCall, arguments: Iterable[fx.Node], inputs: Sequence[torch.Tensor]) -> Questions:
    """Of these arguments of parts, those that the code between modules computes from the inputs of the model alone."""
    asked = {
        node: peek(_itself, (node,), {}, inputs)
        for node in dict.fromkeys(arguments)
        if node.op == "call_function" and not node.meta["spec"].requires_grad
    }
    return {node: question for node, question in asked.items() if question is not None}


class LeftOut:
    """What one call of the model, or one micro batch of it, leaves out."""

    def __init__(
        self,
        questions: Questions,
        inputs: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        cut: tuple[int, int] | None = None,
    ) -> None:
        """`inputs`: of the whole call. `cut`: the rows of the micro batch among them."""
        self._questions = questions
        needed = {number for question in questions.values() for number in question.inputs}  # and no other is kept alive
        self._inputs = {number: inputs[number] for number in needed}
        self._cut = cut
        self._values: dict[fx.Node, torch.Tensor] = {}

    def of_micro_batch(self, start: int, stop: int) -> LeftOut:
        """The same for some of the rows."""
        return LeftOut(self._questions, self._inputs, (start, stop))

    def put_in(self, node: fx.Node, carries: Mapping[fx.Node, Batched], given: Any) -> tuple[Any, tuple[fx.Node, ...]]:
        """(args, kwargs) of a part with all that is left out in its place, and what that is. `node`: the recorded call."""
        added: list[fx.Node] = []

        def walk(recorded: Any, found: Any) -> Any:
            if found is None:
                if not isinstance(recorded, fx.Node) or recorded not in self._questions:
                    return None
                how = carries[recorded]
                if self._cut is not None and (len(how.inners) > 1 if how.dim is not None else how.coupled):
                    return None  # made from the rows of the whole call, or all of them in sections: not that of a micro batch
                added.append(recorded)
                return self._value(recorded, how)
            if isinstance(found, torch.Tensor):
                return found
            if isinstance(recorded, fx.Node):
                if recorded.target is not steps.rebuild:
                    return found
                recorded = recorded.args[1]
            inner = children_of(found)
            if inner is None or not isinstance(recorded, (tuple, list, dict)):
                return found
            recorded = list(recorded.values()) if isinstance(recorded, dict) else recorded
            if len(recorded) != len(inner[0]):
                return found
            parts = [walk(a, b) for a, b in zip(recorded, inner[0], strict=True)]
            same = all(a is b for a, b in zip(parts, inner[0], strict=True))
            return found if same else inner[1](parts)

        whole = walk((node.args, dict(node.kwargs)), given) if self._questions else given
        return whole, tuple(added)

    def _value(self, node: fx.Node, how: Batched) -> torch.Tensor:
        if node not in self._values:
            value: torch.Tensor = self._questions[node](self._inputs)
            if self._cut is not None and how.dim is not None:
                start, stop = self._cut
                (inner,) = how.inners
                value = value.narrow(how.dim, start * inner, (stop - start) * inner)
            self._values[node] = value
        return self._values[node]


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
