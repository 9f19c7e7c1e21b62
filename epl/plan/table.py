"""Plain text tables, the same on every terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

_SHOWN = 6


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows as aligned columns, the first row as heading; columns in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(rows[0]), line(["-" * width for width in widths]), *map(line, rows[1:])])


def compact_numbers(numbers: Sequence[int]) -> str:
    """Numbers with their runs shortened: `0-3,8`."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def compact_names(names: Sequence[str]) -> str:
    """Module names with numbered neighbours joined (`layers.0-5`) and long lists cut short."""
    texts = []
    for (stem, numbered), run in groupby(names, key=_stem):
        group = list(run)
        if numbered:
            texts.append(f"{stem}{compact_numbers([int(name[len(stem) :]) for name in group])}")
        else:
            texts += [name or "(whole model)" for name in group]
    if len(texts) > _SHOWN:
        texts = [*texts[: _SHOWN - 1], f"… {len(texts) - _SHOWN + 1} more"]
    return ", ".join(texts)


def _stem(name: str) -> tuple[str, bool]:
    """What precedes the number of a numbered module, with its dot; else the name."""
    last = name.rpartition(".")[2]
    numbered = last.isascii() and last.isdigit()
    return (name[: len(name) - len(last)], True) if numbered else (name, False)


def compact_paths(names: Sequence[str]) -> list[tuple[str, str]]:
    """The names with those that differ in one number only joined (`layers.0-5.up.weight`), each with the first that is in it."""
    groups: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    taken: set[str] = set()
    order = {name: n for n, name in enumerate(names)}
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isascii() and part.isdigit():
                groups.setdefault((*parts[:place], "#", *parts[place + 1 :]), []).append((int(part), name))
    found: dict[str, str] = {}
    for frame, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        members = [(number, name) for number, name in sorted(group) if name not in taken]
        if len(members) > 1:
            taken.update(name for _, name in members)
            numbers = compact_numbers([number for number, _ in members])
            first = min((name for _, name in members), key=order.__getitem__)
            found[first] = ".".join(numbers if part == "#" else part for part in frame)
    return [(found.get(name, name), name) for name in names if name in found or name not in taken]


def size(count: float) -> str:
    """A number of bytes for a reader: `312 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
