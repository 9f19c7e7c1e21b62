"""Small tensors count as large here, and pieces are small, so that every tensor has several."""

from __future__ import annotations

import pytest

from epl.graph import registry
from epl.graph.deferred import recipe, scope
from epl.report import log


@pytest.fixture(autouse=True)
def two_devices(no_annotations: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "LEAST", 1024)
    monkeypatch.setattr(recipe, "PIECE", 2048)
    monkeypatch.setattr(recipe, "ALIGNMENT", 64)
    registry.devices = 2
    log._said.clear()
