"""Tags on modules, parameters and buffers, and the hooks that put them there while something is being annotated.

A tag lives in the module's own `__dict__`, never on a tensor: there it survives `deepcopy`, `to_empty`, the
materialisation of lazy modules, parametrisation and pickling, none of which keep attributes of a parameter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from epl.graph.taskgraph import Tag

_MODULE_TAG = "_epl_tag"
_TENSOR_TAGS = "_epl_tensor_tags"


def module_tag(module: nn.Module) -> Tag | None:
    """The tag of the module itself, or None."""
    tag = module.__dict__.get(_MODULE_TAG)
    return tag if isinstance(tag, Tag) else None


def tensor_tags(module: nn.Module) -> dict[str, Tag]:
    """Tags of the module's own parameters and buffers that were registered under another annotation than itself."""
    tags = module.__dict__.get(_TENSOR_TAGS)
    return dict(tags) if isinstance(tags, dict) else {}


def tag_module(module: nn.Module, tag: Tag) -> None:
    """Give the module this tag; its own parameters and buffers follow it."""
    # Not by setattr: it would be open to a module's own `__setattr__`.
    module.__dict__[_MODULE_TAG] = tag
    module.__dict__.pop(_TENSOR_TAGS, None)


def tag_tensor(module: nn.Module, name: str, tag: Tag) -> None:
    """Give the module's parameter or buffer `name` this tag."""
    # A new dict each time: a shallow copy of the module shares the old one.
    tags = {**tensor_tags(module), name: tag}
    if module_tag(module) == tag:
        del tags[name]
    if tags:
        module.__dict__[_TENSOR_TAGS] = tags
    else:
        module.__dict__.pop(_TENSOR_TAGS, None)


class Tagger:
    """Tags whatever is built while it is on, with what `current()` says at that moment; off, torch is as it was.

    `acquire` and `release` count, since a default strategy and the scopes of several threads overlap.
    """

    def __init__(self, current: Callable[[], Tag | None]) -> None:
        self._current = current
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., None] | None = None
        self._patched: Callable[..., None] | None = None
        self._handles: list[RemovableHandle] = []

    def acquire(self) -> None:
        """Turn tagging on, or keep it on for one more user."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()

    def release(self) -> None:
        """Undo one `acquire`; the last one takes the hooks out of torch."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _install(self) -> None:
        original = nn.Module.__init__

        @functools.wraps(original)
        def tagging_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            tag = self._current()
            if tag is not None:
                module.__dict__[_MODULE_TAG] = tag

        self._original, self._patched = original, tagging_init
        nn.Module.__init__ = tagging_init  # type: ignore[method-assign, assignment]
        self._handles = [
            register_module_parameter_registration_hook(self._tensor_registered),
            register_module_buffer_registration_hook(self._tensor_registered),
        ]

    def _remove(self) -> None:
        # If someone patched over us in the meantime, what they hold stays in place and tags nothing any more.
        if nn.Module.__init__ is self._patched and self._original is not None:
            nn.Module.__init__ = self._original  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()
        self._original = self._patched = None
        self._handles = []

    def _tensor_registered(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        tag = self._current()
        if tag is None or tensor is None:
            return
        # Under a default, a buffer that a forward assigns anew stays where it was built.
        if not tag.explicit and isinstance(getattr(module, name, None), torch.Tensor):
            return
        tag_tensor(module, name, tag)


def watch_calls(before_call: Callable[[nn.Module], None]) -> RemovableHandle:
    """Have `before_call(module)` called before every module call, until the handle is removed."""

    def hook(module: nn.Module, _: object) -> None:
        before_call(module)

    return register_module_forward_pre_hook(hook)
