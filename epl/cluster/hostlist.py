"""Slurm's short forms written out: host lists such as `gpu[01-03,07],login2` and task counts such as `4(x2),3`."""

from __future__ import annotations

import re
from itertools import product

_PIECE = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(hostlist: str) -> list[str]:
    """Every host name of a Slurm host list, in order, without asking `scontrol`.

    Raises:
        ValueError: if the text is not a host list.
    """
    return [host for entry in _entries(hostlist) for host in _expand_entry(entry, hostlist)]


def expand_counts(counts: str) -> list[int]:
    """The number of tasks on every node from Slurm's form: `4(x2),3` gives 4, 4, 3.

    Raises:
        ValueError: if the text has another form.
    """
    found: list[int] = []
    for entry in counts.split(","):
        match = _COUNT.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"{counts!r} is no list of task counts such as 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _entries(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    outside = re.split(r",(?![^\[]*\])", hostlist.strip())
    if any(not entry.strip() for entry in outside):
        raise ValueError(f"{hostlist!r} is no host list: an entry is empty")
    return [entry.strip() for entry in outside]


def _expand_entry(entry: str, hostlist: str) -> list[str]:
    texts = _PIECE.split(entry)  # text, inside of brackets, text, ...
    if any(sign in text for text in texts[::2] for sign in "[]"):
        raise ValueError(f"{hostlist!r} is no host list: brackets do not match in {entry!r}")
    choices = [
        [text] if at % 2 == 0 else [number for part in text.split(",") for number in _expand_range(part, hostlist)]
        for at, text in enumerate(texts)
    ]
    return ["".join(chosen) for chosen in product(*choices)]


def _expand_range(part: str, hostlist: str) -> list[str]:
    match = _RANGE.fullmatch(part.strip())
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ValueError(f"{hostlist!r} is no host list: {part!r} is neither a number nor a range")
    width = len(match[1])  # leading zeros are part of the name
    return [str(number).zfill(width) for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
