"""What one setting is, and how a value given for it is judged.

A section declares a field as `name: Annotated[type, About("meaning", ...)] = default`; `read_section` turns that into
`Setting`s. The type itself says what is allowed: `bool`, `int`, `float`, `str`, `Literal[...]` for a choice of words,
and unions of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form a free string must have: how to say it, and how to bring it to its one spelling (None if it cannot)."""

    expected: str
    normalise: Callable[[str], str | None]


@dataclass(frozen=True)
class About:
    """What a declaration says beside type and default."""

    meaning: str
    ours: bool = False  # False: a key of EPL's manual
    built: bool = True  # False: any value but the default is refused, with the section's `today`
    our_words: tuple[str, ...] = ()  # words the manual does not have, of a key that it has
    at_least: int | None = None
    above: int | None = None
    form: Form | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key: all that validation, environment variables, suggestions and the docs table need to know of it."""

    section: str
    name: str
    default: object
    kinds: tuple[type, ...]  # of bool, int, float, str, NoneType
    words: tuple[str, ...]
    about: About
    today: str  # what works as long as it is not built

    @property
    def key(self) -> str:
        """The flat key: `pipeline.num_micro_batch`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable of this key."""
        return "EPL_" + self.key.upper().replace(".", "_")

    @property
    def type_name(self) -> str:
        """The type as it is written in the docs: `int or None`."""
        names = ["None" if kind is NoneType else kind.__name__ for kind in self.kinds]
        return " or ".join(names + (["str"] if self.words else []))

    def expected(self, *, as_text: bool) -> str:
        """What may be given, in words: as Python values, or as the text of an environment variable."""
        phrases = []
        for kind in self.kinds:
            if kind is bool:
                phrases.append("true or false" if as_text else "True or False")
            elif kind is int:
                phrases.append("an integer" + self._range())
            elif kind is float:
                phrases.append("a number" + self._range())
            elif kind is str:
                phrases.append(self.about.form.expected if self.about.form else "a string")
            elif not as_text:  # an environment variable cannot say None; leaving it out does
                phrases.append("None")
        quoted = [f'"{word}"' for word in self.words]
        if len(quoted) > 1:
            phrases.append("one of " + ", ".join(quoted))
        else:
            phrases.extend(quoted)
        return " or ".join(phrases)

    def accept(self, value: object) -> object:
        """The value in its one spelling and declared type; ValueError if it cannot be one of this setting."""
        if value is None and NoneType in self.kinds:
            return None
        if isinstance(value, bool):  # before int: True is no number of anything
            return self._require(value, bool in self.kinds)
        if isinstance(value, int) and int in self.kinds:
            return self._require(value, self._in_range(value))
        if isinstance(value, int | float) and float in self.kinds:
            number = _to_float(value)
            return self._require(number, math.isfinite(number) and self._in_range(number))
        if isinstance(value, str):
            return self._accept_string(value)
        raise ValueError

    def parse(self, text: str) -> object:
        """What the text of an environment variable stands for, judged like any other value."""
        if bool in self.kinds and text.lower() in ("true", "false"):
            return self.accept(text.lower() == "true")
        for kind in (int, float):
            if kind in self.kinds:
                try:
                    number = kind(text)
                except ValueError:
                    continue
                return self.accept(number)
        return self.accept(text)

    def _accept_string(self, value: str) -> str:
        for word in self.words:
            if word.lower() == value.lower():
                return word
        if str not in self.kinds:
            raise ValueError
        normalised = self.about.form.normalise(value) if self.about.form else value
        if normalised is None:
            raise ValueError
        return normalised

    def _range(self) -> str:
        if self.about.at_least is not None:
            return f" >= {self.about.at_least}"
        return f" > {self.about.above}" if self.about.above is not None else ""

    def _in_range(self, number: float) -> bool:
        at_least, above = self.about.at_least, self.about.above
        return (at_least is None or number >= at_least) and (above is None or number > above)

    @staticmethod
    def _require(value: object, condition: bool) -> object:
        if not condition:
            raise ValueError
        return value


def read_section(name: str, section: type) -> list[Setting]:
    """The settings that a section's dataclass declares, in its order."""
    hints = get_type_hints(section, include_extras=True)
    settings = []
    for declared in fields(section):
        assert get_origin(hints[declared.name]) is Annotated, f"{name}.{declared.name} has no About"
        annotation, about = get_args(hints[declared.name])
        kinds, words = _read_type(annotation)
        settings.append(
            Setting(
                section=name,
                name=declared.name,
                default=declared.default,
                kinds=kinds,
                words=words,
                about=about,
                today=getattr(section, "today", ""),
            )
        )
    return settings


def _read_type(annotation: object) -> tuple[tuple[type, ...], tuple[str, ...]]:
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
    return tuple(member for member in members if isinstance(member, type)), words


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return math.inf
