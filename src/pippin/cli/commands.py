"""The commands but for benchmarks and Ray: options in, a call out. Import no model library."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from pippin.cli.options import (
    OPTION,
    SECTIONS,
    SETTINGS,
    Url,
    configs_of,
    option_name,
    takes_config,
)
from pippin.config import Config
from pippin.errors import ConfigError

CLIENT = Parameter(group=Group("Client", sort_key=-1))
System = Annotated[str | None, CLIENT, Parameter(help="System prompt.")]
Temperature = Annotated[
    float | None,
    CLIENT,
    Parameter(
        help="Sampling temperature; 0 always chooses the most likely token. Default: the model's "
        "own."
    ),
]


@takes_config(*SECTIONS)
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
    url: Annotated[Url, CLIENT] = None,
    system: System = None,
    temperature: Temperature = None,
    max_tokens: Annotated[int, CLIENT] = 512,
) -> None:
    """Chat in the terminal, with a running server or with one that is started meanwhile.

    `pippin chat` finds a running server. `pippin chat MODEL` finds one of that model, or starts one
    meanwhile, as `pippin run MODEL` does.

    Parameters
    ----------
    max_tokens
        Maximum length of a reply, in tokens.
    """
    from pippin.terminal.chat import client_of, run_chat
    from pippin.terminal.server_client import NoServer, api_key_of_environment, connect

    names_model = OPTION in SETTINGS.origins.values()
    if names_model and url is not None:
        raise ConfigError("--url names a server, so options of the model have no effect: give one")
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    if names_model:
        client: Any = client_of(config.model, [*_given_options(config)], SETTINGS.file)
    else:
        try:
            client = connect(url, api_key_of_environment())
        except NoServer as error:
            remedy = "or start one meanwhile with `pippin chat MODEL`"
            raise NoServer(f"{error.message}; {remedy}") from error
    run_chat(client, system=system, options=options)


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


@takes_config("model", "engine")
def run(
    config: Config,
    *prompt: Annotated[str, Parameter(show=True)],
    system: System = None,
    temperature: Temperature = None,
    max_tokens: Annotated[int | None, CLIENT] = None,
) -> None:
    """Chat with a model: on your server that serves it, or on one that is started meanwhile.

    With a prompt, or with text that is piped into it, it prints one reply and exits. Options of the
    model or of the engine start a server of their own.

    Parameters
    ----------
    prompt
        Text to reply to. Default: a conversation in the terminal.
    max_tokens
        Maximum length of a reply, in tokens. Default: as many as fit.
    """
    from pippin.terminal.chat import client_of, run_model

    given = {"temperature": temperature, "max_tokens": max_tokens}
    client = client_of(config.model, [*_given_options(config)], SETTINGS.file)
    options = {name: value for name, value in given.items() if value is not None}
    run_model(client, prompt, system=system, options=options)


def _given_options(config: Config) -> Iterator[str]:
    """Those of the command line, but for the model, as `pippin serve` takes them. The server reads
    the others from the same environment and file."""
    for section in (config.model, config.engine):
        for field in fields(section):
            name, value = option_name(field.name), getattr(section, field.name)
            if SETTINGS.origins.get(name) == OPTION and name != "model":
                switch = f"--{name}" if value else f"--no-{name}"
                yield switch if isinstance(value, bool) else f"--{name}={value}"


def status(*, url: Url = None) -> None:
    """Print the state of a running server: its engine, requests, memory and prefix cache."""
    from pippin.terminal.server_client import admin_key_of_environment, connect

    # A line for each value, which is never cut: lines are searched for names.
    with connect(url, admin_key_of_environment()) as client:
        values = dict(_flatten({"url": client.url, **client.get("/status")}))
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:{width}}  {value:,}" if type(value) is int else f"{name:{width}}  {value}")


def flush(*, url: Url = None) -> None:
    """Delete everything from a running server's prefix cache that no running request uses."""
    from pippin.terminal.server_client import admin_key_of_environment, connect

    with connect(url, admin_key_of_environment()) as client:
        freed = client.get("/flush_cache", "POST")
    print(f"freed {freed['freed_bytes']:,} bytes, kept {freed['kept_bytes']:,}")


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))


def add_completion(app: App) -> None:
    """Give an app `completion`, which prints a script, and --install-completion."""

    @app.command
    def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
        """Print a shell script that completes commands and options.

        `pippin --install-completion` installs it for your shell.

        Parameters
        ----------
        shell
            Shell to write the script for. In ~/.bashrc, for example: `source <(pippin completion
            bash)`.
        """
        print(app.generate_completion(shell=shell), end="")

    app.register_install_completion_command(
        help="Install completion of commands and options in your shell, from its next start on."
    )
