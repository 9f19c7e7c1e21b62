"""The drawings in docs/images are those that the sources make today, and the guide shows each."""

from __future__ import annotations

import runpy

from epl.plan.schedule import SCHEDULES, make_schedule, simulate
from tests.harness import ROOT

IMAGES = ROOT / "docs/images"
GUIDE = (ROOT / "docs/guide.md").read_text()


def test_drawings_are_fresh_and_shown() -> None:
    made = runpy.run_path(str(IMAGES / "draw.py"))["drawings"]()
    found = {path.name: path.read_text(encoding="utf-8") for path in IMAGES.glob("*.svg")}
    assert found == made, "stale: run `make docs`, or python docs/images/draw.py"
    assert [name for name in made if f"](images/{name})" not in GUIDE] == []


def test_numbers_and_text_in_the_guide_are_true() -> None:
    for name in SCHEDULES:
        simulation = simulate(make_schedule(name, 4, 8, 2 if name == "Interleaved" else 1))
        (row,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{name}`")]
        assert f" {simulation.bubble * 100:.1f} %, {' '.join(map(str, simulation.peak_live))} " in row
    for line in make_schedule("PreferBackward", 4, 8).timeline().splitlines():
        assert f"    {line}\n" in GUIDE
