"""`pippin.toml`: which file is read, and what stands on its lines. Knows no command.

Its keys are the options of `pippin serve`, by the same names: `max-running = 8` is --max-running 8.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from pippin.errors import ConfigError

NAME = "pippin.toml"
SECRETS = {"api-key", "admin-key"}  # never shown, and not read from a file that others can read


@dataclass(frozen=True)
class Setting:
    name: str  # as the option is spelt, without its dashes
    value: Any
    place: str  # file:line


def default_paths() -> list[Path]:
    """Where a file is looked for; the first that exists is read, and no other."""
    return [Path(NAME), user_config_path("pippin") / NAME]


def find_config_file(named: str | None) -> Path | None:
    """The file that was named, which must exist, or the first of the default ones that does."""
    if named is None:
        return next((path for path in default_paths() if path.is_file()), None)
    path = Path(named).expanduser()
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give a file such as {NAME}")
    return path


def read_config_file(path: Path, known: set[str]) -> list[Setting]:
    """Its settings in order. A line that says nothing sensible is an error that names it."""
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
        name = key.replace("_", "-")
        place = f"{path}:{_line_of(key, text)}"
        if name not in known:
            raise ConfigError(f"{place}: {_unknown(name, value, known)}")
        if name in settings:
            raise ConfigError(f"{place}: {name} is there already, at {settings[name].place}")
        if name in SECRETS and mode & 0o077:
            raise ConfigError(
                f"{place}: others can read {name} here (mode {mode:o}): chmod 600 {path}, or name "
                f"a file of keys with {name}-file"
            )
        settings[name] = Setting(name, value, place)
    return list(settings.values())


def _unknown(name: str, value: Any, known: set[str]) -> str:
    if isinstance(value, dict):
        return f"no section [{name}] is known: options stand by themselves, as in port = 8000"
    near = difflib.get_close_matches(name, sorted(known), n=1)
    meant = f"; did you mean {near[0]}?" if near else ", as `pippin serve --help` lists them"
    return f"{name} is no option of `pippin serve`{meant}"


def _line_of(key: str, text: str) -> int:
    """Where a top-level key is set: the parser does not say."""
    spelt = rf"""(?:{re.escape(key)}|"{re.escape(key)}"|'{re.escape(key)}')"""
    found = re.search(rf"^[ \t]*(?:\[+[ \t]*)?{spelt}[ \t]*[=.\]]", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1
