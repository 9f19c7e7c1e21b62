"""Settings files: TOML or YAML, nested by section or with flat dotted keys, read as flat keys."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from epl.config.sections import SECTIONS
from epl.errors import ConfigError


def read_settings(path: str | os.PathLike[str]) -> dict[object, object]:
    """The settings in a file by flat key, values not yet judged; ConfigError if the file cannot be read as settings."""
    file = Path(path)
    if file.suffix.lower() not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"{file}: expected a file that ends in .toml, .yaml or .yml, found {file.suffix or 'no suffix'!r}"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: the settings file cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: expected a text file in UTF-8: {error}") from error
    try:
        tree = tomllib.loads(text) if file.suffix.lower() == ".toml" else _load_yaml(text)
        return _flatten(tree)
    except (ValueError, yaml.YAMLError) as error:  # ValueError: also a date that does not exist, in YAML
        raise ConfigError(f"{file}: the settings file is malformed: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice: YAML itself would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:index]):
                problem = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep=deep)


def _load_yaml(text: str) -> object:
    return yaml.load(text, _StrictLoader)


def _flatten(tree: object) -> dict[object, object]:
    if tree is None:  # an empty YAML file
        return {}
    if not isinstance(tree, Mapping):
        raise ValueError(f"expected sections with keys, found {tree!r} ({type(tree).__name__})")
    flat: dict[object, object] = {}
    for name, value in tree.items():
        if name in SECTIONS and value is None:  # a YAML section whose lines are all commented out
            continue
        nested = name in SECTIONS and isinstance(value, Mapping)
        entries = {f"{name}.{key}": leaf for key, leaf in value.items()} if nested else {name: value}
        for key in entries.keys() & flat.keys():
            raise ValueError(f"{key!r} is there twice, nested and flat")
        flat |= entries
    return flat
