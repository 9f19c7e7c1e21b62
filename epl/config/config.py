"""`Config`: the settings of a job, from a dictionary or file, the environment and the defaults, in this order."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from epl.config.files import read_settings
from epl.config.sections import SECTIONS, SETTINGS, Sections
from epl.config.setting import Setting
from epl.errors import ConfigError, NotBuiltError, UsageError, list_problems

# epl-launch marks its children with these; they are no settings.
LAUNCHER_VARIABLES = frozenset({"EPL_LAUNCH_NUM_WORKERS", "EPL_LAUNCH_GPU_PER_WORKER"})

_VARIABLES = {setting.variable: setting for setting in SETTINGS.values()}


@dataclass(frozen=True, init=False, repr=False)
class Config(Sections):
    """Immutable settings: `Config({"communication.max_splits": 3}).communication.max_splits` is 3.

    What the dictionary does not give is taken from the environment (`EPL_COMMUNICATION_MAX_SPLITS`), read once, here;
    what neither gives has its default. Every key: docs/config.md. All mistakes are reported in one `ConfigError`.
    """

    def __init__(self, param_dict: Mapping[str, object] | None = None) -> None:
        if param_dict is not None and not isinstance(param_dict, Mapping):
            raise UsageError(
                "epl.Config: expected a dictionary of flat keys such as {'communication.max_splits': 3}, "
                f"found {param_dict!r} ({type(param_dict).__name__}); a file is read by epl.Config.from_file(path)"
            )
        self._fill(resolve((param_dict or {}).items(), os.environ, title="epl.Config"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """The settings in a .toml, .yaml or .yml file, nested by section or flat; they rank like the dictionary's."""
        config = cls.__new__(cls)
        config._fill(
            resolve(read_settings(path).items(), os.environ, title=f"epl.Config.from_file({os.fspath(path)!r})")
        )
        return config

    def to_dict(self) -> dict[str, object]:
        """Every setting by its flat key; `Config(config.to_dict()) == config`, over any EPL_* variable."""
        return {key: getattr(getattr(self, s.section), s.name) for key, s in SETTINGS.items()}

    def __repr__(self) -> str:
        changed = {key: value for key, value in self.to_dict().items() if value != SETTINGS[key].default}
        return f"Config({changed or ''})"

    def _fill(self, values: Mapping[str, object]) -> None:
        for section, make in SECTIONS.items():
            own = {s.name: values[key] for key, s in SETTINGS.items() if s.section == section}
            object.__setattr__(self, section, make(**own))  # the one moment before it is frozen


def resolve(given: Iterable[tuple[object, object]], environ: Mapping[str, str], *, title: str) -> dict[str, object]:
    """The value of every key: given over environment over default. Raises once, with everything that is wrong."""
    problems: list[str] = []
    named: dict[str, tuple[object, str]] = {}  # key -> value, and the variable it comes from, if any
    for name, text in sorted(environ.items()):
        if name.startswith("EPL_") and name not in LAUNCHER_VARIABLES:
            _take_variable(name, text, named, problems)
    for key, value in given:
        _take_key(key, value, named, problems)
    unbuilt = [
        _refuse_unbuilt(SETTINGS[key], value, origin)
        for key, (value, origin) in named.items()
        if not SETTINGS[key].about.built and value != SETTINGS[key].default
    ]
    if problems:
        raise ConfigError(list_problems(title, problems + unbuilt))
    if unbuilt:
        raise NotBuiltError(list_problems(title, unbuilt))
    defaults = {key: setting.default for key, setting in SETTINGS.items()}
    return defaults | {key: value for key, (value, _) in named.items()}


def _take_variable(name: str, text: str, named: dict[str, tuple[object, str]], problems: list[str]) -> None:
    setting = _VARIABLES.get(name)
    if setting is None:
        problems.append(
            f"the environment variable {name} is no setting of epl; the nearest is {_nearest(name, _VARIABLES)}"
        )
        return
    try:
        named[setting.key] = (setting.parse(text), f" (from {name})")
    except ValueError:
        problems.append(f"the environment variable {name} must be {setting.expected(as_text=True)}, found {text!r}")


def _take_key(key: object, value: object, named: dict[str, tuple[object, str]], problems: list[str]) -> None:
    setting = SETTINGS.get(key) if isinstance(key, str) else None
    if setting is None:
        problems.append(_refuse_key(key))
        return
    try:
        named[setting.key] = (setting.accept(value), "")
    except ValueError:
        problems.append(f"{key!r} must be {setting.expected(as_text=False)}, found {value!r} ({type(value).__name__})")


def _refuse_key(key: object) -> str:
    if not isinstance(key, str):
        return f"a key must be a string such as 'communication.max_splits', found {key!r} ({type(key).__name__})"
    if key in SECTIONS:
        keys = ", ".join(repr(each) for each in SETTINGS if each.startswith(f"{key}."))
        return f"{key!r} is a section, not a key; its keys are {keys}"
    return f"{key!r} is no setting of epl; the nearest is {_nearest(key, SETTINGS)!r}"


def _refuse_unbuilt(setting: Setting, value: object, origin: str) -> str:
    return (
        f"{setting.key!r} = {value!r}{origin} asks for what this version of epl does not have yet; "
        f"leave it out or at {setting.default!r}. What works today: {setting.today}"
    )


def _nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name most like this one, upper and lower case aside; the common prefix EPL_ does not count."""
    bare = {each.removeprefix("EPL_").lower(): each for each in valid}
    return bare[difflib.get_close_matches(name.removeprefix("EPL_").lower(), bare, n=1, cutoff=0)[0]]
