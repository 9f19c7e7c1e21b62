"""Every test here begins without annotations, and ends with torch as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from epl.graph import registry


@pytest.fixture(autouse=True)
def no_annotations() -> Iterator[None]:
    init = nn.Module.__init__
    registry.reset()
    yield
    registry.reset()
    assert nn.Module.__init__ is init, "nn.Module.__init__ is still patched"
