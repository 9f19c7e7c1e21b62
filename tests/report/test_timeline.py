"""Drawings of schedules."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from epl.plan.schedule import (
    SCHEDULES,
    Schedule,
    forward_only,
    interleaved,
    make_schedule,
    prefer_backward,
    simulate,
    zero_bubble,
)
from epl.report import timeline as timeline_module
from epl.report.timeline import timeline_svg, timeline_text

SVG = "{http://www.w3.org/2000/svg}"


def test_text() -> None:
    assert timeline_text(prefer_backward(2, 3)).splitlines() == [
        "PreferBackward: 2 stages on 2 devices, 3 micro batches",
        "0 | F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "1 | .  F0 B0--- F1 B1--- F2 B2--- .  .",
        "bubble 25.0 %, makespan 12, live micro batches at most 2 1",
    ]


def test_the_picture_in_the_source_is_true() -> None:
    assert timeline_text(prefer_backward(2, 3)) in (timeline_module.__doc__ or "")


def test_text_of_several_stages_per_device_names_the_stage() -> None:
    assert timeline_text(simulate(interleaved(2, 2, 2), weight=0.0)).splitlines()[1:] == [
        "0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1",
        "1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .",
        "bubble 20.0 %, makespan 10, live micro batches at most 4 3",
    ]


def test_text_with_other_times() -> None:
    """Devices that differ are told one by one; a link shows as a gap."""
    assert timeline_text(simulate(forward_only(2, 2), forward=[1.0, 2.0], link=1.0)).splitlines()[1:] == [
        "0 | F0 F1 .  .  .  .",
        "1 | .  .  F0--- F1---",
        "bubble 50.0 % (66.7 33.3), makespan 6, live micro batches at most 1 1",
    ]


def test_text_shows_every_computation_whatever_the_times() -> None:
    simulation = simulate(zero_bubble(3, 11), forward=[1.0, 1.37, 0.71], backward=2.2, weight=0.9, link=0.33)
    for device, row in enumerate(timeline_text(simulation).splitlines()[1:-1]):
        drawn = [word for word in re.split(r"[-.\s]+", row.partition("| ")[2]) if word]
        assert drawn == [str(action).removeprefix(str(device)) for action in simulation.schedule.actions[device]]


def test_messages_and_reductions_change_no_drawing() -> None:
    schedule = prefer_backward(3, 4)
    full = schedule.with_communication().with_reduce()
    assert timeline_text(full) == timeline_text(schedule)
    assert timeline_svg(full) == timeline_svg(schedule)


def test_computations_that_take_no_time_are_left_out() -> None:
    assert "W" not in timeline_text(simulate(zero_bubble(2, 2), weight=0.0)).partition("\n")[2]
    nothing = simulate(forward_only(1, 1), forward=0.0)
    assert timeline_text(nothing).splitlines()[1] == "0 |"
    assert "NaN" not in timeline_svg(nothing)
    assert "inf" not in timeline_svg(nothing)


def test_a_computation_far_shorter_than_the_others_does_not_blow_up_the_drawing() -> None:
    simulation = simulate(forward_only(2, 2), forward=[1.0, 1e-6])
    assert max(map(len, timeline_text(simulation).splitlines())) < 200
    assert float(ET.fromstring(timeline_svg(simulation)).attrib["width"]) < 2000


def test_schedules_draw_themselves() -> None:
    schedule = prefer_backward(2, 2)
    assert schedule.timeline() == timeline_text(schedule)
    assert schedule.timeline(svg=True) == timeline_svg(schedule)


def schedules() -> list[Schedule]:
    made = [make_schedule(name, 4, 8, 2 if name == "Interleaved" else 1) for name in SCHEDULES]
    return [*made, forward_only(3, 2), prefer_backward(12, 1)]


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: s.name)
def test_svg(schedule: Schedule) -> None:
    text = timeline_svg(schedule)
    assert text == timeline_svg(schedule)
    root = ET.fromstring(text)
    simulation = simulate(schedule)

    boxes = root.findall(f"{SVG}g")
    titles = [box.findtext(f"{SVG}title") for box in boxes]
    assert titles == [
        f"{timed.action}: {timed.start:g} to {timed.end:g}" for actions in simulation.devices for timed in actions
    ]
    assert all(box.find(f"{SVG}text") is not None for box in boxes), "every box has its number"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    scale = None
    for box, timed in zip(boxes, [t for actions in simulation.devices for t in actions], strict=True):
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        scale = scale or w / (timed.end - timed.start)
        assert w == pytest.approx(scale * (timed.end - timed.start))
        assert 0 < x < x + w < width
        assert 0 < y < y + h < height

    words = " ".join(root.itertext())
    assert str(schedule).partition("\n")[0] in words
    assert f"bubble {simulation.bubble * 100:.1f} %" in words
    assert f"live micro batches at most {' '.join(map(str, simulation.peak_live))}" in words
    assert "href" not in text, "it needs nothing from outside"


def test_svg_escapes_names() -> None:
    schedule = Schedule.parse("a<b & c: 1 stage on 1 device, 1 micro batch\n0: 0F0")
    assert "a<b & c: 1 stage" in " ".join(ET.fromstring(timeline_svg(schedule)).itertext())
