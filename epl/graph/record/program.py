"""Nodes of a recording as one Python function, so that replaying them costs no more than the calls themselves.

def program(env):
    v0 = env[n0]                                       # made elsewhere
    v3 = m3(v0); as_foreseen(v3, n3)                   # a module; compared, if it was never looked at with such sizes
    t3 = tensors_of(v3); v4 = t3[1]                    # a part of its result
    v5 = env[n5] = f5(v4, c5_0, dim=1)                 # used outside these nodes: kept
    del v4
"""

from __future__ import annotations

import itertools
import keyword
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from epl.errors import RecordingError
from epl.graph.context import Context
from epl.graph.record import steps
from epl.graph.record.fakes import Held
from epl.graph.record.tree import tensors_of

Env = dict[fx.Node, Any]
_SELF = "__epl_program__"
_serial = itertools.count()


class Program:
    """Carries nodes out: `program(env)` takes what they need from env and puts there what others need of them."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        keep: set[fx.Node],
        modules: dict[str, nn.Module],
        held: dict[fx.Node, Held],
        ambient: Context,
    ) -> None:
        """`keep`: whose values go into env. `ambient`: the context in force when it is called."""
        self._file = f"<epl replay {next(_serial)}>"
        self._lines: list[str] = ["def program(env):"]
        self._nodes_of_lines: dict[int, fx.Node] = {}
        self._names: dict[str, Any] = {
            "tensors_of": tensors_of,
            "as_foreseen": as_foreseen,
            "checkpoint": checkpoint,
            _SELF: self,
        }
        self._modules, self._held, self._ambient = modules, held, ambient
        self._flat: dict[fx.Node, str] = {}
        self._number = {node: i for i, node in enumerate(_with_inputs(nodes))}
        self._write(nodes, keep)
        exec(compile("\n".join([*self._lines, "    return"]), self._file, "exec"), self._names)
        self._run: Callable[[Env], None] = self._names["program"]

    def __call__(self, env: Env) -> None:
        """Carry the nodes out, in order."""
        try:
            self._run(env)
        except Exception as error:
            self._blame(error)
            raise

    def node_at(self, line: int) -> fx.Node:
        """The node that a line of the function carries out."""
        return self._nodes_of_lines[line]

    def _blame(self, error: Exception) -> None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                node = self._nodes_of_lines[trace.tb_lineno]
                name = node.target if isinstance(node.target, str) else node.name
                error.add_note(f"in {name}, written at {node.meta['where'] or 'an unknown line'}")
            trace = trace.tb_next

    # ---- writing the function ----------------------------------------------------------------------------------------

    def _write(self, nodes: Sequence[fx.Node], keep: set[fx.Node]) -> None:
        made = {node for node in nodes if not _is_fed(node)}
        last = {value: node for node in nodes for value in node.all_input_nodes}
        loaded: set[fx.Node] = set()
        for node in nodes:
            if node not in made:
                continue
            for value in node.all_input_nodes:
                if value not in made and value not in loaded:
                    loaded.add(value)
                    self._line(f"{self._name(value)} = env[{self._constant(value)}]", node)
            ambient = node.meta["context"] == self._ambient
            if not ambient:
                self._line(f"with {self._constant(node.meta['context'])}.restored():", node)
            for line in self._call(node):
                self._line(line if ambient else f"    {line}", node)
            if node in keep:
                self._line(f"env[{self._constant(node)}] = {self._name(node)}", node)
            done = [value for value in node.all_input_nodes if last[value] is node] + [node] * (node not in last)
            dead = [self._name(value) for value in done] + [self._flat[value] for value in done if value in self._flat]
            if dead:
                self._line(f"del {', '.join(dead)}", node)

    def _call(self, node: fx.Node) -> list[str]:
        v = self._name(node)
        if node.op == "get_attr":
            if "value" in node.meta:
                return [f"{v} = {self._constant(node.meta['value'])}"]
            held = self._held[node]
            return [f"{v} = getattr({self._constant(held.owner)}, {held.name!r})"]
        if node.op == "call_module":
            module = self._constant(self._modules[str(node.target)])
            check = [f"as_foreseen({v}, {self._constant(node)})"] * node.meta["foreseen"]
            if node.meta["checkpoint"]:
                return [f"{v} = checkpoint({module}, {self._arguments(node, 'use_reentrant=False')})", *check]
            return [f"{v} = {module}({self._arguments(node)})", *check]
        if node.target is steps.part:
            source, index = node.args
            assert isinstance(source, fx.Node)
            if source in self._flat:
                return [f"{v} = {self._flat[source]}[{index}]"]
            flat = self._flat[source] = f"t{self._number[source]}"
            return [f"{flat} = tensors_of({self._name(source)})", f"{v} = {flat}[{index}]"]
        return [f"{v} = {self._constant(node.target)}({self._arguments(node)})"]

    def _arguments(self, node: fx.Node, *more: str) -> str:
        words = [self._expression(each) for each in node.args]
        if all(name.isidentifier() and not keyword.iskeyword(name) for name in node.kwargs):
            words += [f"{name}={self._expression(each)}" for name, each in node.kwargs.items()]
        else:
            words.append(f"**{self._expression(dict(node.kwargs))}")
        return ", ".join([*words, *more])

    def _expression(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if type(value) in (int, bool, str, type(None)):
            return repr(value)
        if isinstance(value, tuple) and type(value).__name__ in ("tuple", "immutable_tuple"):
            return "(" + "".join(self._expression(each) + ", " for each in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._expression, value)) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._expression(k)}: {self._expression(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        return self._constant(value)

    def _name(self, node: fx.Node) -> str:
        return f"v{self._number[node]}"

    def _constant(self, value: Any) -> str:
        name = f"c{id(value)}"
        self._names[name] = value
        return name

    def _line(self, line: str, node: fx.Node) -> None:
        self._lines.append(f"    {line}")
        self._nodes_of_lines[len(self._lines)] = node


def as_foreseen(value: Any, node: fx.Node) -> None:
    """Raise if what a module returned is not what follows from the sizes at which it was looked at."""
    single = "spec" in node.meta
    expected = [node.meta["spec"].shape] if single else [spec.shape for spec in node.meta["specs"]]
    found = [tensor.shape for tensor in tensors_of(value)]
    # Among several there may be those of a key-value cache, which was empty when the module was not run.
    if found != expected and (single or len(found) == len(expected)):
        raise RecordingError(
            f"the module {node.target} returns {' and '.join(str(tuple(each)) for each in found) or 'no tensor'} here, and "
            f"{' and '.join(str(tuple(each)) for each in expected)} would follow from what it returns at other sizes of its inputs: its code "
            "does something else at this one. A module that runs as a whole is not run for every new size before it is needed; code "
            "between modules is. Annotate the module's parts instead of the module, or keep such sizes away from it (pad the batch)"
        )


def _is_fed(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or steps.is_drawn(node)


def _with_inputs(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes))
        found[node] = None
    return found


def running_node() -> fx.Node | None:
    """The node that a program is carrying out now, if the caller runs inside one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        program = frame.f_globals.get(_SELF)
        if program is not None:
            node: fx.Node = program.node_at(frame.f_lineno)
            return node
        frame = frame.f_back
    return None
