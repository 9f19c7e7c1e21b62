"""Whoever waits for long is told how far it is."""

from __future__ import annotations

import logging

import pytest

from epl.report import log


def test_tells_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    told: list[str] = []
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    monkeypatch.setattr(logging.getLogger("epl"), "info", told.append)
    patience = log.Patience(seconds=2)
    for now in (101.0, 103.0, 104.0, 107.0, 108.0):  # noqa: B007 - read by the clock
        patience.tell(lambda: "half done")
    assert told == ["half done, after 3 s", "half done, after 7 s"]
