"""`pippin serve`, `chat` and `doctor`: commands that load a model here. Import no model library."""

from __future__ import annotations

import difflib
import faulthandler
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from cyclopts import Group, Parameter

from pippin.cli.options import ALIASES, option_name, takes_config
from pippin.cli.settings import OPTION, SETTINGS, Setting
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError

HubId = Annotated[str, Parameter(help="Hugging Face id, such as Qwen/Qwen3.5-0.8B.")]
Json = Annotated[bool, Parameter(negative="")]


def pull(model: HubId, *, revision: str | None = None, json: Json = False) -> None:
    """Download a model from the Hugging Face hub, or what has changed of it since.

    Only files that `pippin serve` reads are downloaded, into the hub's own cache.

    Parameters
    ----------
    revision
        Branch, tag or commit. Default: the main branch.
    json
        Print the progress as lines of JSON, as /api/pull of Ollama's API does.
    """
    from pippin.hub import pull, pull_as_lines

    if json:
        raise SystemExit(pull_as_lines(model, revision))
    print(f"{model} is at {pull(model, revision)}")


def list_models(*, json: Json = False) -> None:
    """List the models in the Hugging Face hub's cache, and whether they can be served.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from pippin.terminal.hub_cache import list_models

    list_models(as_json=json)


def rm(model: HubId, *, yes: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Delete a model from the Hugging Face hub's cache. A model that is being served is kept.

    Parameters
    ----------
    yes
        Delete without asking.
    """
    from pippin.terminal.hub_cache import remove_model

    remove_model(model, confirmed=yes)


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
    from pippin.startup.checkpoint import bundled_models

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


CLIENT = Group("Client", sort_key=-1)


@takes_config("model", "engine", "server", "limits", "peers")
def serve(config: Config, *models: str) -> None:
    """Serve a model over HTTP with the APIs of OpenAI, Anthropic and Ollama, until Ctrl-C.

    Parameters
    ----------
    models
        Further models. Each is loaded when a request names it, and unloaded when it is not used:
        see --keep-alive. Names in the [models] table of pippin.toml have the options there.
    """
    from pippin.startup.launch import run_server

    named = [config.model.model, *models] if "model" in SETTINGS.origins else []
    run_server(config, configs_of(config, named, SETTINGS.models))


@takes_config("model", "engine")
def chat(
    config: Config,
    *,
    url: Annotated[str | None, Parameter(group=CLIENT)] = None,
    system: Annotated[str | None, Parameter(group=CLIENT)] = None,
    temperature: Annotated[float | None, Parameter(group=CLIENT)] = None,
    max_tokens: Annotated[int, Parameter(group=CLIENT)] = 512,
) -> None:
    """Chat in the terminal, with a running server or with a model loaded by this command.

    `pippin chat` finds a running server. `pippin chat MODEL`, or any other option of the model on
    the command line, loads the model into this process.

    Parameters
    ----------
    url
        Address of the server. Default: http://127.0.0.1:8000 if a server is ready there,
        otherwise the server that you started last.
    system
        System prompt.
    temperature
        Sampling temperature; 0 always chooses the most likely token. Default: the model's own.
    max_tokens
        Maximum length of a reply, in tokens.
    """
    from pippin.terminal.chat import run_chat

    loads_model = OPTION in SETTINGS.origins.values()
    if loads_model and url is not None:
        raise ConfigError("--url names a server, so options of the model have no effect: give one")
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    run_chat(config if loads_model else None, url=url, system=system, options=options)


@takes_config("model", "engine")
def doctor(config: Config, *, json: bool = False, save: bool = False) -> None:
    """Check whether `pippin serve` computes correct results on this machine with these options.

    Prints one page to paste into an issue: device and memory, operations and kernels compared with
    plain ones, launches and decode steps timed, what was chosen and why, and for everything that is
    off what it means and what to do. Takes less than a minute with the demo model. Exit status: 0
    if all is right, 1 if something is wrong, 2 for wrong usage.

    Parameters
    ----------
    json
        Print JSON instead of the page; its schema is documented with the command.
    save
        Save what drafts gain: `pippin serve` and `LLM` then have drafts of this model by default
        where they pay. Without it the check changes nothing.
    """
    from pippin.terminal.doctor import run_doctor

    faulthandler.enable()  # a kernel may crash the process: stderr then says where

    raise SystemExit(run_doctor(config, as_json=json, saves=save))
