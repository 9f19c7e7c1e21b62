"""The units of a model that automatic stages are made of: its repeated blocks, and what is called around them.

A list of modules (`ModuleList`, `Sequential`) with children of equal structure is a *family* of blocks. Modules are opened
from the top until every block is a unit of its own; what holds none of the blocks is a unit as a whole:

    GPT2LMHeadModel                 opened
      transformer                   opened: there are blocks in it
        wte, wpe, drop              units
        h                           a family: h.0 ... h.11 are units, and what repeats inside them is not looked for
        ln_f                        unit
      lm_head                       unit
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    """Paths and modules of the units; every module with parameters is in exactly one, or is opened.

    If there are fewer than `num_stages`, or one that is no block holds more than its share of the parameters, the
    largest that can be opened are opened further.
    """
    return _Units(model).opened_for(num_stages)


class _Units:
    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._sizes = {id(module): _numel(module) for module in model.modules()}
        self._blocks: set[str] = set()
        self._units: dict[str, nn.Module] = {}
        self._total = _dense(model)
        self._open("", model)

    def opened_for(self, num_stages: int) -> dict[str, nn.Module]:
        while True:
            few = len([path for path, unit in self._units.items() if self._sizes[id(unit)]]) < num_stages
            closed = [path for path, unit in self._units.items() if next(unit.children(), None) is not None]
            heavy = [p for p in closed if p not in self._blocks and _dense(self._units[p]) * num_stages > self._total]
            candidates = closed if few else heavy
            if not candidates:
                return dict(self._units)
            path = max(candidates, key=self._size)
            unit = self._units.pop(path)
            self._seen.discard(id(unit))
            self._open(path, unit)

    def _size(self, path: str) -> int:
        return self._sizes[id(self._units[path])]

    def _open(self, path: str, module: nn.Module) -> None:
        """Make units of the children, or of what is in them."""
        is_family = isinstance(module, _LISTS) and _is_family(module)
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            if is_family:
                self._blocks.add(inner)
                self._units[inner] = child
            elif isinstance(child, _LISTS) or self._is_made_of_blocks(child):
                self._open(inner, child)
            else:
                self._units[inner] = child

    def _is_made_of_blocks(self, module: nn.Module) -> bool:
        """Whether there are families inside whose blocks have parts themselves, or that hold most of its parameters."""
        families = [part for part in module.modules() if isinstance(part, _LISTS) and _is_family(part)]
        if any(next(block.children(), None) is not None for family in families for block in family.children()):
            return True
        inside: set[int] = set()
        for family in families:
            inside.update(id(parameter) for parameter in family.parameters())
        held = sum(_count(p) for p in module.parameters() if id(p) in inside)
        return 2 * held > self._sizes[id(module)]


def _is_family(module: nn.Module) -> bool:
    """Whether two of the children are alike, and more than an activation."""
    kinds = [structure_of(child) for child in module.children() if _numel(child)]
    return len(set(kinds)) < len(kinds)


def structure_of(module: nn.Module) -> tuple[object, ...]:
    """A value that is equal for modules of the same class with the same shapes of parameters, name by name."""
    shapes = tuple((name, None if is_lazy(p) else p.shape, p.dtype) for name, p in module.named_parameters())
    return type(module), shapes


def _numel(module: nn.Module) -> int:
    return sum(map(_count, module.parameters()))


def _dense(module: nn.Module) -> int:
    """Parameters that are computed with as a whole; of an embedding only a few rows are looked up."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))}
    return sum(_count(parameter) for parameter in module.parameters() if id(parameter) not in tables)


def _count(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
