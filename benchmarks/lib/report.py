"""What a benchmark is asked, and what it says in the end: a line per bar, an exit code, a table and a plot."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .ratio import Ratio

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Bar:
    """A ratio that is to stay within a limit. Short only if the whole interval is beyond it: noise alone is not enough.

    And only of enough pairs: below that no interval has the confidence (`lib/ratio.py`).
    """

    name: str
    ratio: Ratio
    limit: float

    @property
    def short(self) -> bool:
        return self.ratio.low > self.limit and self.ratio.sure

    def __str__(self) -> str:
        return f"bar {self.name} {self.ratio.value:.3f} {self.limit:.3f} {'short' if self.short else 'ok'}"


@dataclass(frozen=True)
class Row:
    """One line of the report: a ratio, and what it is made of in words ("412 ms / 409 ms")."""

    name: str
    ratio: Ratio
    made_of: str
    limit: float | None = None


@dataclass(frozen=True)
class Section:
    """Rows that belong together: one table and one panel of the plot."""

    title: str
    columns: tuple[str, str]
    """What a row is, what its ratio is made of."""
    rows: Sequence[Row]


def quick_wanted(description: str | None) -> bool:
    """Whether `--quick` is on the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: less than a minute")
    return parser.parse_args().quick


def bars_of(sections: Iterable[Section]) -> list[Bar]:
    """The rows that have a limit."""
    rows = [row for section in sections for row in section.rows]
    return [Bar(row.name, row.ratio, row.limit) for row in rows if row.limit is not None]


def finish(bars: Sequence[Bar]) -> int:
    """Print a line for each bar; the exit code: 1 if any is short."""
    for bar in bars:
        print(bar, flush=True)
    return int(any(bar.short for bar in bars))


def write(name: str, title: str, notes: Iterable[str], sections: Sequence[Section], *, folder: Path = RESULTS) -> None:
    """Write `name`.md and `name`.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(title, [*notes, f"![plot]({name}.svg)"], sections))
    plot(folder / f"{name}.svg", title, sections)


def markdown(title: str, notes: Iterable[str], sections: Iterable[Section]) -> str:
    """The report as a page."""
    parts = [f"# {title}", *notes]
    for section in sections:
        lines = [
            f"| {section.columns[0]} | ratio | 95 % interval | pairs | limit | {section.columns[1]} |",
            "|---|---|---|---|---|---|",
        ]
        for row in section.rows:
            limit = "" if row.limit is None else f"{row.limit:.2f}"
            r = row.ratio
            lines.append(
                f"| {row.name} | {r.value:.3f} | {r.low:.3f} – {r.high:.3f} | {r.pairs} | {limit} | {row.made_of} |"
            )
        parts += [f"## {section.title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def plot(path: Path, title: str, sections: Sequence[Section]) -> None:
    """The ratios as dots with their intervals, limits as short lines; the same numbers give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 9}):
        heights = [len(section.rows) + 1.5 for section in sections]
        figure, axes = pyplot.subplots(
            len(sections), 1, figsize=(8, 0.3 * sum(heights) + 0.8), height_ratios=heights, squeeze=False
        )
        for axis, section in zip(axes[:, 0], sections, strict=True):
            for place, row in enumerate(section.rows):
                ratio = row.ratio
                axis.plot([ratio.low, ratio.high], [place, place], color="tab:blue", linewidth=2, alpha=0.5)
                axis.plot([ratio.value], [place], "o", color="tab:blue", markersize=5)
                if row.limit is not None:
                    axis.plot([row.limit] * 2, [place - 0.4, place + 0.4], color="tab:red", linewidth=1.5)
            axis.axvline(1.0, color="gray", linewidth=0.8, zorder=0)
            axis.set_yticks(range(len(section.rows)), [row.name for row in section.rows])
            axis.set_ylim(len(section.rows) - 0.5, -0.5)
            axis.set_title(section.title, loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def machine() -> str:
    """What it was measured on and how busy that was, without names."""
    cores = len(os.sched_getaffinity(0))
    gpu = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
    return (
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{cores} cores, {gpu}, {load()} before the start."
    )


def load() -> str:
    """How busy the machine is; above the number of ranks, others are at work on it and times say less."""
    return f"load {os.getloadavg()[0]:.1f}"
