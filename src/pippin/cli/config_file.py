"""`pippin.toml`: which file is read, and its settings with their lines. Knows no command.

Its keys are the options of `pippin serve`, by the same names: `max-running = 8` is --max-running 8.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from pippin.errors import ConfigError

NAME = "pippin.toml"
MODELS = "models"  # the only table: see `model_table.py`
SECRETS = {"api-key", "admin-key"}  # never printed, nor read from a file that other users can read


@dataclass(frozen=True)
class Setting:
    name: str  # as the option is spelt, without its dashes
    value: Any
    place: str  # file:line
    places: Mapping[tuple[str, str], str] = field(default_factory=dict)  # of a models table's keys


def default_paths() -> list[Path]:
    """Candidate files in order; only the first one that exists is read."""
    return [Path(NAME), user_config_path("pippin") / NAME]


def find_config_file(named: str | None) -> Path | None:
    """The file that was named, which must exist, or the first of the default ones that does."""
    if named is None:
        return next((path for path in default_paths() if path.is_file()), None)
    path = Path(named).expanduser()
    if path.is_dir():
        raise ConfigError(f"--config {path} is a directory: give a file such as {path / NAME}")
    return path


def read_config_file(
    path: Path, known: Mapping[str, str], sections: Collection[str] = ()
) -> list[Setting]:
    """Its settings in order; `known` has the option that each key sets, `sections`
    are tables beside [models].

    A key or a line that cannot be read is an error that names its place.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read()
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    settings: dict[str, Setting] = {}
    for key, value in table.items():
        spelt = key.replace("_", "-")
        place = f"{path}:{_line_of(key, text)}"
        if spelt == MODELS and isinstance(value, dict):
            settings[MODELS] = Setting(MODELS, value, place, dict(_places(path, value, text)))
            continue
        if spelt in sections:
            settings[spelt] = Setting(spelt, value, place)
            continue
        if spelt not in known or isinstance(value, dict):
            raise ConfigError(f"{place}: {_unknown(spelt, value, known, sections)}")
        name = known[spelt]
        if name in settings:
            raise ConfigError(
                f"{place}: {name} is already set at {settings[name].place}: remove one of them"
            )
        if name in SECRETS and mode & 0o077:
            raise ConfigError(
                f"{place}: other users can read the value of {name} in this file (mode {mode:o}): "
                f"run `chmod 600 {path}`, or put the keys into a separate file and set {name}-file"
            )
        settings[name] = Setting(name, value, place)
    return list(settings.values())


def _unknown(name: str, value: Any, known: Iterable[str], sections: Collection[str]) -> str:
    if isinstance(value, dict) and sections:
        there = " and ".join(f"[{section}]" for section in sections)
        return f"section [{name}] is not known: there are {there}"
    if isinstance(value, dict) and difflib.get_close_matches(name, [MODELS]):
        return f"section [{name}] is not known: a model's table is [{MODELS}.NAME]"
    if isinstance(value, dict):
        return f"section [{name}] is not supported: write options at the top level: port = 8000"
    near = difflib.get_close_matches(name, sorted(known), n=1)
    meant = f"did you mean {near[0]}?" if near else "`pippin serve --help-all` lists the options"
    return f"{name} is not an option of `pippin serve`; {meant}"


def _places(
    path: Path, models: Mapping[str, Any], text: str
) -> Iterator[tuple[tuple[str, str], str]]:
    for name, table in models.items():
        header = rf"""^[ \t]*\[[ \t]*{MODELS}[ \t]*\.[ \t]*["']?{re.escape(name)}["']?[ \t]*\]"""
        found = re.search(header, text, re.MULTILINE)
        start = found.start() if found else 0
        before = text.count("\n", 0, start)
        for key in ("", *table) if isinstance(table, dict) else ("",):
            line = _line_of(key, text[start:]) if key else 1
            yield (name, key), f"{path}:{before + line}"


def _line_of(key: str, text: str) -> int:
    """The line that sets a key first: the parser does not report it."""
    spelt = rf"""(?:{re.escape(key)}|"{re.escape(key)}"|'{re.escape(key)}')"""
    found = re.search(rf"^[ \t]*(?:\[+[ \t]*)?{spelt}[ \t]*[=.\]]", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1
