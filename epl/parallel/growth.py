"""Notices, cheaply, that some module somewhere got a new parameter, buffer or part.

Walking all parameters of a large model before every step costs milliseconds; torch tells of every registration, so the walk is
only made when something was registered since the last time.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle


class Growth:
    """`count` goes up whenever a parameter, a buffer or a module is registered anywhere, as long as somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._watchers = 0
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Begin to count."""
        self._watchers += 1
        if self._watchers == 1:
            self._handles = [
                register_module_parameter_registration_hook(self._grown),
                register_module_buffer_registration_hook(self._grown),
                register_module_module_registration_hook(self._grown),
            ]

    def unwatch(self) -> None:
        """The last watcher to go takes the hooks off."""
        self._watchers -= 1
        if self._watchers == 0:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _grown(self, module: nn.Module, name: str, part: object) -> None:
        self.count += part is not None  # a loss that a forward makes for itself registers that it has no weights


growth = Growth()
