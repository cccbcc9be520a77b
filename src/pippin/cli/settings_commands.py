"""`pippin config`: the values that apply, and where each was set. Starts nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from pippin.cli.config_file import SECRETS, default_paths
from pippin.cli.options import option_name, takes_config
from pippin.cli.settings import SETTINGS
from pippin.config import Config


@takes_config("model", "engine", "server", "limits", "peers")
def config(config: Config) -> None:
    """Print the values that `pippin serve` would use, in the format of pippin.toml.

    After each value it prints where the value was set: an option, an environment variable, or a
    line of a file. Defaults are commented out. API keys are counted, not printed.
    """
    print("\n".join(describe(config)), flush=True)


def describe(config: Config) -> Iterator[str]:
    yield f"# {_file_in_force()}"
    for section in dataclasses.fields(config):
        yield ""
        yield f"# {section.name}"
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            yield _line(option_name(field.name), getattr(values, field.name))
    yield from _model_tables()


def _model_tables() -> Iterator[str]:
    """Of several models, as the file has them."""
    if (tables := SETTINGS.models) is None:
        return
    for name, table in tables.value.items():
        yield ""
        yield f"[models.{_toml(name)}]  # {tables.place}"
        for key, value in table.items() if isinstance(table, dict) else ():
            yield f"{key} = {_toml(value)}"


def _file_in_force() -> str:
    if SETTINGS.file is not None:
        return f"read from {SETTINGS.file}"
    return f"no file was found at {' or '.join(map(str, default_paths()))}"


def _line(name: str, value: Any) -> str:
    origin = SETTINGS.origins.get(name)
    if name in SECRETS and value:
        return f"# {name} = ({len(value)} set, not printed)  # {origin}"
    if origin is None:
        return f"# {name} =" if value in (None, ()) else f"# {name} = {_toml(value)}"
    return f"{name} = {_toml(value)}  # {origin}"


def _toml(value: Any) -> str:
    """Strings, numbers, booleans and lists of strings are in TOML what they are in JSON."""
    return json.dumps(value, ensure_ascii=False)
