"""docs/config.md, written from the declarations: `python -m epl.config.reference docs/config.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from epl.config.config import LAUNCHER_VARIABLES
from epl.config.sections import SECTIONS, SETTINGS
from epl.config.setting import Setting

_TOP = """\
# Settings

<!-- Written by `make docs` from the declarations in epl/config/sections.py. Do not edit by hand. -->

A job's settings are one immutable `epl.Config`, made before `epl.init` and handed to it. Keys are `"section.name"`; the
value is read as an attribute:

```python
import epl

config = epl.Config({"communication.max_splits": 3, "io.slicing": True})
assert config.communication.max_splits == 3
assert config.communication.num_communicators == 2  # a default
print(config)  # only what differs from the defaults
```

## Where a value comes from

1. the dictionary (or file) given to `Config`,
2. else the environment variable `EPL_SECTION_NAME`, read once, when the `Config` is made,
3. else the default.

```python
import os

import epl

os.environ["EPL_COMMUNICATION_MAX_SPLITS"] = "3"
assert epl.Config().communication.max_splits == 3
assert epl.Config({"communication.max_splits": 8}).communication.max_splits == 8
del os.environ["EPL_COMMUNICATION_MAX_SPLITS"]
```

In a variable, a yes or no is `true` or `false` in any case (not `1`), a number is written as in Python.

A file ends in `.toml`, `.yaml` or `.yml`. Its keys are nested by section, or flat:

```python
import tempfile
from pathlib import Path

import epl

with tempfile.TemporaryDirectory() as folder:
    nested = Path(folder, "job.toml")
    nested.write_text("[communication]\\nmax_splits = 3\\n")
    flat = Path(folder, "job.yaml")
    flat.write_text("communication.max_splits: 3\\n")
    assert epl.Config.from_file(nested) == epl.Config.from_file(flat)
```

## What is accepted

Words are accepted in any case and kept in the spelling of the tables (`"MEAN"` becomes `"mean"`); a directory keeps its
own. An integer will do for a number; `True` will not do for an integer, nor will `"4"`.

An unknown key, an unknown `EPL_*` variable, a wrong type or a value out of range is refused with
`epl.errors.ConfigError`, all of them in one message:

```python
import epl

try:
    epl.Config({"communication.max_split": 3, "io.uneven_tail": "keep"})
except epl.errors.ConfigError as error:
    print(error)
```

{variables} are set by `epl-launch` for its children; they are the only `EPL_*` variables that are no settings.

A setting marked "not yet" names a capability that this version does not have: its default is accepted, any other value
is refused with `epl.errors.NotBuiltError`, never taken and ignored.

A `Config` cannot be changed. To vary one, make another: `epl.Config(config.to_dict() | {"io.slicing": True})`.

In the tables, "manual" is a key of EPL's manual, "ours" one that this library adds; an asterisk marks a word that it
adds to a key of the manual.
"""


def render() -> str:
    """The whole reference page."""
    variables = " and ".join(f"`{name}`" for name in sorted(LAUNCHER_VARIABLES, reverse=True))
    parts = [_TOP.replace("{variables}", variables)]
    for name, section in SECTIONS.items():
        rows = [_row(setting) for setting in SETTINGS.values() if setting.section == name]
        head = ["| key | variable | type | default | allowed | meaning | from | built |", "|---" * 8 + "|"]
        parts.append("\n".join([f"## {name}", "", section.__doc__ or "", "", *head, *rows, ""]))
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    about = setting.about
    cells = [
        f"`{setting.key}`",
        f"`{setting.variable}`",
        setting.type_name,
        f"`{_show(setting.default)}`",
        _allowed(setting),
        about.meaning,
        "ours" if about.ours else "manual",
        "yes" if about.built else "not yet",
    ]
    return "| " + " | ".join(cells) + " |"


def _allowed(setting: Setting) -> str:
    if len(setting.words) > 1:
        marked = {word: "\\*" if word in setting.about.our_words else "" for word in setting.words}
        return ", ".join(f"`{_show(word)}`{mark}" for word, mark in marked.items())
    return setting.expected(as_text=False)


def _show(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
