"""A pipeline schedule as a picture: devices as rows, time to the right, as text and as SVG.

PreferBackward: 2 stages on 2 devices, 3 micro batches
0 | F0 F1 .  .  B0--- F2 B1--- .  B2---
1 | .  F0 B0--- F1 B1--- F2 B2--- .  .
bubble 25.0 %, makespan 12, live micro batches at most 2 1
"""

from __future__ import annotations

from html import escape

from epl.plan.schedule import Action, ActionKind, Schedule, Simulation, TimedAction, simulate

_FINEST = 20
"""A computation this many times shorter than the longest one still gets room for its label; a shorter one does not."""


def timeline_text(what: Schedule | Simulation) -> str:
    """The schedule as text: computations where they happen, dots where a device idles, the bubble below.

    A schedule is drawn with unit times (a whole backward takes two); `timeline_text(simulate(schedule, forward=2))` draws it
    with others.
    """
    simulation = _in_time(what)
    schedule = simulation.schedule
    slot = max((len(_label(schedule, timed.action)) for timed in _computations(simulation)), default=1) + 1
    per_column = _shortest(simulation) / slot
    end = round(simulation.makespan / per_column)
    margin = len(str(schedule.num_devices - 1))
    rows = []
    for device, actions in enumerate(simulation.devices):
        row = ""
        for timed in actions:
            start, stop = round(timed.start / per_column), round(timed.end / per_column)
            if timed.action.is_compute and stop > start:
                row += _dots(start - len(row), slot)
                row += _cell(_label(schedule, timed.action), stop - start, slot)
        rows.append(f"{device:>{margin}} | {row}{_dots(end - len(row), slot)}".rstrip())
    return "\n".join([_heading(schedule), *rows, _summary(simulation)])


def _cell(label: str, columns: int, slot: int) -> str:
    """A label in its room; longer than one slot, it is drawn out with dashes."""
    drawn = label.ljust(columns - 1, "-") if columns > slot else label[: max(columns - 1, 1)]
    return drawn.ljust(columns)


def _dots(columns: int, slot: int) -> str:
    return "".join("." if column % slot == 0 else " " for column in range(columns))


def _in_time(what: Schedule | Simulation) -> Simulation:
    return simulate(what) if isinstance(what, Schedule) else what


def _heading(schedule: Schedule) -> str:
    return str(schedule).partition("\n")[0]


def _summary(simulation: Simulation) -> str:
    bubble = f"bubble {simulation.bubble:.1%}".replace("%", " %")
    if len({f"{each:.3f}" for each in simulation.bubbles}) > 1:
        bubble += f" ({' '.join(f'{each * 100:.1f}' for each in simulation.bubbles)})"
    live = " ".join(map(str, simulation.peak_live))
    return f"{bubble}, makespan {simulation.makespan:g}, live micro batches at most {live}"


def _label(schedule: Schedule, action: Action) -> str:
    """The action's text; without the stage when the device says it already."""
    return str(action) if schedule.num_stages > schedule.num_devices else f"{action.kind.value}{action.micro_batch}"


def _computations(simulation: Simulation) -> list[TimedAction]:
    return [t for actions in simulation.devices for t in actions if t.action.is_compute and t.end > t.start]


def _shortest(simulation: Simulation) -> float:
    """The time that gets room for one label."""
    lengths = [timed.end - timed.start for timed in _computations(simulation)]
    return max(min(lengths), max(lengths) / _FINEST) if lengths else 1.0


# The SVG, in pixels, from top to bottom: title, summary, one row per device, axis, legend.
_ROW, _GAP, _TOP, _LEFT, _RIGHT, _BOX = 30, 6, 84, 84, 132, 26
_DIGIT = 7.0
_KINDS = {
    ActionKind.FORWARD: ("forward", "#4c78a8", "#ffffff"),
    ActionKind.BACKWARD: ("backward", "#3d8741", "#ffffff"),
    ActionKind.INPUT_GRAD: ("input gradient", "#8cc084", "#17330f"),
    ActionKind.WEIGHT_GRAD: ("weight gradient", "#f2b45c", "#4a2f00"),
}
_STYLE = """
  text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #333333 }
  .title { font-size: 16px; font-weight: 600; fill: #111111 }
  .head, .tick { font-size: 11px; fill: #666666 }
  .mid { text-anchor: middle } .end { text-anchor: end }
  .box { stroke: #ffffff; stroke-width: 1 } .idle { fill: #eeeeee } .grid { stroke: #dddddd; stroke-width: 1 }
"""


def timeline_svg(what: Schedule | Simulation) -> str:
    """The schedule as one self-contained SVG: computations as numbered boxes, idle time grey, bubble and live micro batches
    beside each device. What is drawn is chosen as in `timeline_text`."""
    simulation = _in_time(what)
    schedule = simulation.schedule
    widest = max((len(_box_text(schedule, timed.action)) for timed in _computations(simulation)), default=1)
    scale = max(_BOX, widest * _DIGIT + 8) / _shortest(simulation)
    plot = max(simulation.makespan * scale, 420.0)
    bottom = _TOP + schedule.num_devices * (_ROW + _GAP)
    width, height = _LEFT + plot + _RIGHT, bottom + 66
    title, summary = escape(_heading(schedule)), escape(_summary(simulation))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{title}; {summary}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text class="title" x="16" y="28">{title}</text>',
        f'<text x="16" y="50">{summary}</text>',
        *_axis(simulation, scale, bottom),
        *_columns(simulation, plot),
    ]
    for device, actions in enumerate(simulation.devices):
        y = _TOP + device * (_ROW + _GAP)
        parts.append(
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{simulation.makespan * scale:g}" height="{_ROW}"/>'
        )
        parts += [
            _box(schedule, timed, scale, y) for timed in actions if timed.action.is_compute and timed.end > timed.start
        ]
    return "\n".join([*parts, *_legend(simulation, bottom + 48), "</svg>", ""])


def _box_text(schedule: Schedule, action: Action) -> str:
    """The micro batch; with several stages on a device also the stage."""
    several = schedule.num_stages > schedule.num_devices
    return f"{action.stage}:{action.micro_batch}" if several else str(action.micro_batch)


def _box(schedule: Schedule, timed: TimedAction, scale: float, y: float) -> str:
    action = timed.action
    _, fill, ink = _KINDS[action.kind]
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    text = _box_text(schedule, action)
    # Later chunks of the model are drawn paler, so that the rounds of an interleaved schedule can be seen.
    chunks, chunk = -(-schedule.num_stages // schedule.num_devices), action.stage // schedule.num_devices
    opacity = 1 - 0.5 * chunk / (chunks - 1) if chunks > 1 else 1
    pale, ink = (f' fill-opacity="{opacity:g}"', "#111111") if opacity < 1 else ("", ink)
    number = f'<text class="mid" x="{x + width / 2:g}" y="{y + _ROW / 2 + 4:g}" style="fill:{ink}">{text}</text>'
    return (
        f"<g><title>{action}: {timed.start:g} to {timed.end:g}</title>"
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{_ROW}" rx="3" fill="{fill}"{pale}/>'
        f"{number if width >= len(text) * _DIGIT + 2 else ''}</g>"
    )


def _axis(simulation: Simulation, scale: float, bottom: float) -> list[str]:
    """Grid lines at round times, about 60 pixels or more apart."""
    step = next(s for k in range(-9, 19) for s in (10.0**k, 2 * 10.0**k, 5 * 10.0**k) if s * scale >= 60)
    parts = []
    for tick in range(int(simulation.makespan / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        parts.append(f'<line class="grid" x1="{x:g}" y1="{_TOP - 6}" x2="{x:g}" y2="{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x:g}" y="{bottom + 14}">{tick * step:g}</text>')
    return parts


def _columns(simulation: Simulation, plot: float) -> list[str]:
    """The device's name on the left; its bubble and its live micro batches on the right."""
    bubble, live = _LEFT + plot + 56, _LEFT + plot + 112
    parts = [
        f'<text class="head end" x="{bubble:g}" y="{_TOP - 10}">bubble</text>',
        f'<text class="head end" x="{live:g}" y="{_TOP - 10}">live</text>',
    ]
    for device in range(simulation.schedule.num_devices):
        y = _TOP + device * (_ROW + _GAP) + _ROW / 2 + 4
        parts.append(f'<text class="end" x="{_LEFT - 10}" y="{y:g}">device {device}</text>')
        parts.append(f'<text class="end" x="{bubble:g}" y="{y:g}">{simulation.bubbles[device] * 100:.1f} %</text>')
        parts.append(f'<text class="end" x="{live:g}" y="{y:g}">{simulation.peak_live[device]}</text>')
    return parts


def _legend(simulation: Simulation, y: float) -> list[str]:
    schedule = simulation.schedule
    several = schedule.num_stages > schedule.num_devices
    entries = [(name, fill) for kind, (name, fill, _) in _KINDS.items() if schedule.has([kind])]
    parts, x = [], float(_LEFT)
    for name, fill in [*entries, ("idle", "#eeeeee")]:
        parts.append(f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="3" fill="{fill}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y:g}">{name}</text>')
        x += 20 + len(name) * _DIGIT + 22
    numbers = "numbers are stage:micro batch" if several else "numbers are micro batches"
    return [*parts, f'<text class="head" x="{x:g}" y="{y:g}">{numbers}</text>']
