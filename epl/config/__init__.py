"""Every setting of epl: `Config`, and the table of settings it is made from.

setting.py    what one setting is: its type, range, meaning; how a value or a text is judged
sections.py   the declarations, one frozen dataclass per section: the only place that names a key
config.py     Config: dictionary over environment over default, all problems at once
files.py      TOML and YAML files as flat keys
reference.py  docs/config.md, written from the declarations (`python -m epl.config.reference docs/config.md`)
"""

from __future__ import annotations

from epl.config.config import LAUNCHER_VARIABLES, Config
from epl.config.sections import SETTINGS
from epl.config.setting import Setting

__all__ = ["LAUNCHER_VARIABLES", "SETTINGS", "Config", "Setting"]
