"""Decisions about single parameters that are given beforehand: by a user's rule, by Hugging Face's tp_plan, by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epl.plan.split.decisions import Choice, Decisions

if TYPE_CHECKING:
    from epl.parallel.split.choose.options import Option


@dataclass(frozen=True)
class Fixed:
    """A parameter is cut along `dim`, made of so many equal `sections` one after another; None: whole."""

    dim: int | None
    sections: int = 1
    source: str = "given"
    """Who said so, for the plan's table."""

    def decide(self, decisions: Decisions, name: str, options: Sequence[Option], reason: str) -> None:
        """Take the option that agrees with this; together with another value's cut, if that is one."""
        reason = f"{self.source}: {reason}"
        if self.dim is None:
            decisions.leave_whole(name, reason if reason.startswith("whole") else f"whole, {reason}")
            return
        for option in options:
            if isinstance(option, tuple) and option[0] == self.dim:
                cut = option[1]
                if self.sections in (1, len(cut.inners)):
                    decisions.cut_along(name, Choice(self.dim, cut.axis.name, cut.inners), reason)
                    return
        decisions.cut_alone(name, self.dim, reason, self.sections)
