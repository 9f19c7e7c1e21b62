"""Draws the schedules that the guide shows: `python docs/images/draw.py` (part of `make docs`)."""

from __future__ import annotations

from pathlib import Path

from epl.plan.schedule import SCHEDULES, make_schedule

DEVICES, MICRO_BATCHES, CHUNKS = 4, 8, 2


def drawings() -> dict[str, str]:
    """The drawings by file name: every schedule, with two stages per device where it has several."""
    made = {}
    for name in SCHEDULES:
        schedule = make_schedule(name, DEVICES, MICRO_BATCHES, CHUNKS if name == "Interleaved" else 1)
        made[f"{name}.svg"] = schedule.timeline(svg=True)
    return made


if __name__ == "__main__":
    for name, text in drawings().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
