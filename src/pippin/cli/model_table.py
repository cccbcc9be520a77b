"""The `[models]` table of pippin.toml: several models with options of their own. Starts nothing.

    [models.small]
    model = "Qwen/Qwen3.5-0.8B"
    alias = ["gpt-4o-mini"]

A table is named as requests name its model. What it leaves out is as at the top level.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from pippin.cli.config_file import Setting
from pippin.cli.option_groups import ALIASES
from pippin.cli.options import option_name
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError

_FIELDS: dict[str, tuple[type, str]] = {  # the section of each key that a table may have
    **dict.fromkeys(("model", "backend", "dtype", "revision", "max_len"), (ModelConfig, "model")),
    **dict.fromkeys(
        ("memory", "max_running", "speculate", "draft_model"), (EngineConfig, "engine")
    ),
    **dict.fromkeys(
        ("alias", "tool_parser", "reasoning_parser", "keep_alive"), (ServerConfig, "server")
    ),
}
_KEYS = {option_name(field): field for field in _FIELDS} | {
    alias.removeprefix("--"): field for field, alias in ALIASES.items() if field in _FIELDS
}


def configs_of(config: Config, named: Sequence[str], table: Setting | None) -> list[Config]:
    """One for each model that was named, or without a name for each in the table.

    Empty: the config itself is that of the only model.
    """
    models: Mapping[str, Any] = {} if table is None else table.value
    names = list(named) or list(models)
    for name in names:
        _check_known(name, models, table)
    if len(names) < 2 and not any(name in models for name in names):
        return []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"model {name!r} is given twice: give it once")
    return [
        _config_of(config, name, models.get(name), table, is_first=number == 0)
        for number, name in enumerate(names)
    ]


def _check_known(name: str, models: Mapping[str, Any], table: Setting | None) -> None:
    """A name that is nearly one of the table's is a mistake, unless it names a model itself."""
    near = difflib.get_close_matches(name, list(models), n=1)
    if table is None or name in models or not near or "/" in name or Path(name).exists():
        return
    from pippin.startup.find_checkpoint import bundled_models

    if name in bundled_models():
        return
    raise ConfigError(
        f"no model {name!r} is in the table at {table.place}, which has {', '.join(models)}; did "
        f"you mean {near[0]}?"
    )


def _config_of(
    config: Config, name: str, given: Any, table: Setting | None, *, is_first: bool
) -> Config:
    # The budget at the top level is for all: a model's own is in its table.
    server = config.server if is_first else replace(config.server, alias=())
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": name},
        "engine": {"memory": "auto"},
        "server": {},
    }
    if given is not None:
        assert table is not None, "it has an entry"
        sections["server"]["served_name"] = name
        for field, value in _checked(name, given, table).items():
            sections[_FIELDS[field][1]][field] = value
    try:
        return replace(
            config,
            model=replace(config.model, **sections["model"]),
            engine=replace(config.engine, **sections["engine"]),
            server=replace(server, **sections["server"]),
        )
    except ConfigError as error:
        if table is None:
            raise
        place = table.places.get((name, ""), table.place)
        raise ConfigError(f"{place}: models.{name}: {error.message}") from error


def _checked(name: str, given: Any, table: Setting) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(
            f"{table.place}: models.{name} must be a table such as [models.{name}] with "
            'model = "Qwen/Qwen3.5-0.8B"'
        )
    values: dict[str, Any] = {}
    for key, value in given.items():
        place = table.places.get((name, key), table.place)
        field = _KEYS.get(spelt := key.replace("_", "-"))
        if field is None:
            near = difflib.get_close_matches(spelt, sorted(_KEYS), n=1)
            known = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(_KEYS))}"
            raise ConfigError(
                f"{place}: models.{name}.{key} is not an option of one model; {known}"
            )
        try:
            values[field] = msgspec.convert(value, get_type_hints(_FIELDS[field][0])[field])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: models.{name}.{key}: {error}") from error
    return values
