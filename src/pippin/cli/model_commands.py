"""`pippin serve`, `chat` and `doctor`: commands that load a model here. Import no model library."""

from __future__ import annotations

import faulthandler
from typing import Annotated, Any

from cyclopts import Group, Parameter

from pippin.cli.model_table import configs_of
from pippin.cli.options import takes_config
from pippin.cli.settings import OPTION, SETTINGS
from pippin.config import Config
from pippin.errors import ConfigError

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
