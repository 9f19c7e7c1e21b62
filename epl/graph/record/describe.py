"""How messages speak of what a node makes: in the user's words, never by the names of our own steps."""

from __future__ import annotations

from torch import fx

from epl.graph.record import steps


def describe(node: fx.Node) -> str:
    """A node's value, with the user's line that made it."""
    if node.op == "call_module":
        return f"what the module {node.target} returns{_line(node)}"
    if node.op == "placeholder":
        return "an input of the model"
    if node.op == "get_attr":
        return "a tensor made outside the forward" if "value" in node.meta else f"the model's {node.target}"
    if node.target is steps.drawn:
        return f"a number drawn at random{_line(node)}"
    source = _source(node)
    if isinstance(source, fx.Node) and steps.is_part(node):
        return f"a part of {describe(source)}"
    if isinstance(source, fx.Node) and node.target is steps.changed:
        by = node.all_input_nodes[-1]
        return f"{describe(source)}, after {'the module ' * (by.op == 'call_module')}{name_of(by)}{_line(by)} has changed it"
    if isinstance(source, (steps.Template, steps.Pristine)):
        return f"the {source.title} that is handed on{_line(node)}"
    return f"the value of {name_of(node)}{_line(node)}"


def name_of(node: fx.Node) -> str:
    """In short what made a node's value: a module, a function, a type."""
    source = _source(node)
    if isinstance(source, fx.Node) and steps.is_part(node):
        return f"part of {name_of(source)}"
    if isinstance(source, fx.Node) and node.target is steps.changed:
        return f"{name_of(source)} after {name_of(node.all_input_nodes[-1])}"
    if isinstance(source, (steps.Template, steps.Pristine)):
        return source.title
    return str(getattr(node.target, "__name__", node.target))


def _source(node: fx.Node) -> object:
    """Its first argument; of something changed many times over (a table that a loop fills), what it was at first."""
    while (
        node.target is steps.changed and isinstance(source := node.args[0], fx.Node) and source.target is steps.changed
    ):
        node = source
    return node.args[0] if node.args else None


def _line(node: fx.Node) -> str:
    return f" at {node.meta['where']}" if node.meta.get("where") else ""
