"""Reading the environment variables that a starter sets, with one error for everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping

from epl.errors import ClusterError, list_problems


class VariableReader:
    """Reads variables and remembers everything that is wrong with them, for one error at the end."""

    def __init__(self, environ: Mapping[str, str], who: str, remedy: str) -> None:
        self.environ, self._who, self._remedy = environ, who, remedy
        self._problems: list[str] = []
        self._unread: set[str] = set()

    @property
    def good(self) -> bool:
        """True as long as nothing is wrong."""
        return not self._problems

    def problem(self, text: str) -> None:
        """Remember one more thing that is wrong."""
        self._problems.append(text)

    def first(self, *names: str) -> str:
        """The first of several names that is set; the first of all if none is."""
        return next((name for name in names if name in self.environ), names[0])

    def integer(self, name: str, *, minimum: int = 0, default: int | None = None) -> int:
        """The whole number in a variable, or the default if it is not set; any number if it is wrong."""
        text = self.environ.get(name, "").strip()
        if not text and default is not None:
            return default
        if text.isascii() and text.isdecimal() and int(text) >= minimum:
            return int(text)
        self._unread.add(name)
        self.problem(
            f"{name} must be a whole number from {minimum} on, found {text!r}" if text else f"{name} is missing"
        )
        return minimum

    def port(self, default: int | None = None) -> int:
        """The port in MASTER_PORT."""
        port = self.integer("MASTER_PORT", minimum=1, default=default)
        if port > 65535:
            self.problem(f"MASTER_PORT must be at most 65535, found {port}")
        return port

    def compare(self, name: str, index: int, count_name: str, count: int) -> None:
        """An index must be below its count. Silent if one of them could not be read: that is reported already."""
        if index >= count and not {name, count_name} & self._unread:
            self.problem(f"{name} = {index} must be below {count_name} = {count}")

    def finish(self) -> None:
        """Raise a ClusterError with all problems, if there are any."""
        if self._problems:
            raise ClusterError(
                list_problems(f"this process was {self._who}, but", self._problems) + f"\nRemedy: {self._remedy}."
            )
