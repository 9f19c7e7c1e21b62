"""Nodes of a recording as one Python function, so that replaying them costs no more than the calls themselves.

def program(env):
    v0 = env[n0]                                       # made elsewhere
    v3 = m3(v0)                                        # a module
    t3 = tensors_of(v3); v4 = t3[1]                    # a part of its result
    v5 = env[n5] = f5(v4, c5_0, dim=1)                 # used outside these nodes: kept
    del v4
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from epl.graph.context import Context
from epl.graph.record import steps
from epl.graph.record.fakes import Held
from epl.graph.record.tree import tensors_of

Env = dict[fx.Node, Any]
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
        self._names: dict[str, Any] = {"tensors_of": tensors_of, "checkpoint": checkpoint}
        self._modules, self._held, self._ambient = modules, held, ambient
        self._flat: set[fx.Node] = set()
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

    def _blame(self, error: Exception) -> None:
        trace = error.__traceback__
        while trace is not None:
            node = self._nodes_of_lines.get(trace.tb_lineno)
            if trace.tb_frame.f_code.co_filename == self._file and node is not None:
                error.add_note(
                    f"in {node.target if isinstance(node.target, str) else node.name}, written at {node.meta['where']}"
                )
            trace = trace.tb_next

    # ---- writing the function ----------------------------------------------------------------------------------------

    def _write(self, nodes: Sequence[fx.Node], keep: set[fx.Node]) -> None:
        here = set(nodes)
        last = {value: node for node in nodes for value in node.all_input_nodes}
        parts = {node.args[0]: node for node in nodes if node.op == "call_function" and node.target is steps.part}
        for value, node in parts.items():  # the list of a result's tensors lives as long as its parts are taken
            last[value] = node  # type: ignore[index]
        context = self._ambient
        for node in nodes:
            if node.op in ("placeholder", "output") or steps.is_drawn(node):
                continue
            for value in node.all_input_nodes:
                if value not in here or value.op == "placeholder" or steps.is_drawn(value):
                    self._load(value)
            if node.meta["context"] != context:
                context = node.meta["context"]
            indent = "    "
            if context != self._ambient:
                self._line(f"    with {self._constant(context)}.restored():", node)
                indent = "        "
            for line in self._call(node):
                self._line(indent + line, node)
            v = self._name(node)
            if node in keep:
                self._line(f"    env[{self._constant(node)}] = {v}", node)
            done = [value for value in node.all_input_nodes if last[value] is node]
            if node not in last:
                done.append(node)
            dead = [self._name(value) for value in done] + [f"t{self._number[v]}" for v in done if v in self._flat]
            if dead:
                self._line("    del " + ", ".join(dead), node)
                for value in done:
                    self._loaded.discard(value)

    _loaded: set[fx.Node]

    def _load(self, value: fx.Node) -> None:
        if not hasattr(self, "_loaded"):
            self._loaded = set()
        if value not in self._loaded:
            self._loaded.add(value)
            self._line(f"    {self._name(value)} = env[{self._constant(value)}]", value)

    def _call(self, node: fx.Node) -> list[str]:
        v = self._name(node)
        if node.op == "get_attr":
            if "value" in node.meta:
                return [f"{v} = {self._constant(node.meta['value'])}"]
            held = self._held[node]
            return [f"{v} = getattr({self._constant(held.owner)}, {held.name!r})"]
        if node.op == "call_module":
            module = self._constant(self._modules[str(node.target)])
            if node.meta["checkpoint"]:
                return [f"{v} = checkpoint({module}, {self._arguments(node, 'use_reentrant=False')})"]
            return [f"{v} = {module}({self._arguments(node)})"]
        if node.target is steps.part:
            source, index = node.args
            assert isinstance(source, fx.Node)
            flat = f"t{self._number[source]}"
            lines = [] if source in self._flat else [f"{flat} = tensors_of({self._name(source)})"]
            self._flat.add(source)
            return [*lines, f"{v} = {flat}[{index}]"]
        return [f"{v} = {self._constant(node.target)}({self._arguments(node)})"]

    def _arguments(self, node: fx.Node, *more: str) -> str:
        words = [self._expression(each) for each in node.args]
        names = all(name.isidentifier() for name in node.kwargs)
        if names:
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
        self._lines.append(line)
        self._nodes_of_lines[len(self._lines)] = node


def _with_inputs(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes))
        found[node] = None
    return found
