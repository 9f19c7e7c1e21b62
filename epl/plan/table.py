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


def size(count: float) -> str:
    """A number of bytes for a reader: `312 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
