"""The commands but for benchmarks and Ray: options in, a call out. Import no model library."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from pippin.cli.options import SECTIONS, option_name, parse_serve, takes_config
from pippin.cli.settings import OPTION, PREFIX, SECRETS, SETTINGS, configs_of
from pippin.config import Config
from pippin.errors import ConfigError

AgentName = Literal["claude", "codex", "qwen", "opencode", "aider"]
Flag = Annotated[bool, Parameter(negative="")]
Url = Annotated[
    str | None,
    Parameter(
        help="Address of the server. Default: http://127.0.0.1:8000 if a server is ready there, "
        "otherwise the server that you started last."
    ),
]
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
HubId = Annotated[str, Parameter(help="Hugging Face id, such as Qwen/Qwen3.5-0.8B.")]


def pull(model: HubId, *, revision: str | None = None, json: Flag = False) -> None:
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


def list_models(*, json: Flag = False) -> None:
    """List the models in the Hugging Face hub's cache, and whether they can be served.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from pippin.terminal.hub_cache import list_models

    list_models(as_json=json)


def rm(model: HubId, *, yes: Flag = False) -> None:
    """Delete a model from the Hugging Face hub's cache. A model that is being served is kept.

    Parameters
    ----------
    yes
        Delete without asking.
    """
    from pippin.terminal.hub_cache import remove_model

    remove_model(model, confirmed=yes)


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
    """Chat in the terminal, with a running server or with a model loaded by this command.

    `pippin chat` finds a running server. `pippin chat MODEL`, or any other option of the model on
    the command line, loads the model into this process.

    Parameters
    ----------
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
    from pippin.terminal.chat import run_model

    given = {"temperature": temperature, "max_tokens": max_tokens}
    run_model(
        config.model,
        prompt,
        serve_options=[*_given_options(config)],
        config_file=SETTINGS.file,
        system=system,
        options={name: value for name, value in given.items() if value is not None},
    )


def launch(
    agent: AgentName,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    url: Url = None,
) -> None:
    """Start a coding agent that is installed here, with the model of a running server.

    The agent's own settings are not changed: `pippin launch claude -- --continue`.

    Parameters
    ----------
    agent
        Command of the agent.
    arguments
        Arguments of the agent, after `--`.
    """
    from pippin.terminal.coding_agents import launch_agent

    launch_agent(agent, arguments, url)


def _given_options(config: Config) -> Iterator[str]:
    """Those of the command line, but for the model, as `pippin serve` takes them. The server reads
    the others from the same environment and file."""
    for section in (config.model, config.engine):
        for field in fields(section):
            name, value = option_name(field.name), getattr(section, field.name)
            if SETTINGS.origins.get(name) == OPTION and name != "model":
                switch = f"--{name}" if value else f"--no-{name}"
                yield switch if isinstance(value, bool) else f"--{name}={value}"


cache = App(name="cache", help="Flush a server's prefix cache; show, verify or empty one on disk.")

CacheDir = Annotated[
    Path,
    Parameter(
        env_var="PIPPIN_CACHE_DIR", help="Directory of prefix caches, as in serve --cache-dir."
    ),
]


def status(*, url: Url = None) -> None:
    """Print the state of a running server: its engine, requests, memory and prefix cache."""
    from pippin.terminal.server_client import show_status

    show_status(url)


@cache.command
def flush(*, url: Url = None) -> None:
    """Delete everything from a running server's prefix cache that no running request uses."""
    from pippin.terminal.server_client import flush_cache

    flush_cache(url)


@cache.command
def show(*, cache_dir: CacheDir) -> None:
    """Print the size and the entries of a cache directory, by model. Its server may be running."""
    from pippin.terminal.hub_cache import show_directory

    show_directory(cache_dir)


@cache.command
def verify(*, cache_dir: CacheDir) -> None:
    """Read a cache directory and verify its checksums. Exit status 1 if an entry is damaged.

    Its server may be running. Nothing is changed: a server deletes damaged entries itself.
    """
    from pippin.terminal.hub_cache import verify_directory

    raise SystemExit(verify_directory(cache_dir))


@cache.command
def empty(*, cache_dir: CacheDir) -> None:
    """Delete everything from a cache directory that no running server uses.

    For the cache of a running server use `pippin cache flush`.
    """
    from pippin.terminal.hub_cache import empty_directory

    empty_directory(cache_dir)


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


service = App(
    name="service",
    help="Run `pippin serve` as a service of the system: systemd on Linux, launchd on macOS.",
)
Name = Annotated[str, Parameter(help="Name of the service, to install several of them.")]


@service.command
def install(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    name: Name = "pippin",
    print_only: Annotated[bool, Parameter(name="--print", negative="")] = False,
) -> None:
    """Start a server now and at every login, and restart it when it fails.

    The service runs in this directory: `pippin service install -- Qwen/Qwen3.5-0.8B --port 9000`.
    An installed service of the same name is replaced.

    Parameters
    ----------
    options
        Options of `pippin serve`, after `--`. Options that are not given are read from pippin.toml.
    print_only
        Print the service file without writing it or starting anything.
    """
    from pippin.service import define, manager_of

    config = _parse(options)
    definition = define(name, options, drain_timeout=config.server.drain_timeout)
    manager = manager_of(name)
    if print_only:
        print(manager.text(definition), end="")
        return
    manager.install(definition)
    print(f"Installed {manager.file}")
    print(
        f"It serves at http://{config.server.host}:{config.server.port} when its model is loaded."
    )
    if SETTINGS.file is not None:
        print(f"It reads {SETTINGS.file.resolve()}")
    print(manager.start_hint())
    if "HF_TOKEN" in os.environ:
        print("The service does not inherit HF_TOKEN: run `hf auth login` to store a token for it.")
    print(f"Logs: {manager.logs}")


@service.command(name="status")
def service_status(*, name: Name = "pippin") -> None:
    """Print the state of the service and where its logs are. Exit status 3 if it is not running."""
    from pippin.service import installed

    manager = installed(name)
    found = manager.status()
    print(f"{name} is {found.description}")
    print(f"File: {manager.file}")
    print(f"Logs: {manager.logs}")
    if not found.is_running:
        raise SystemExit(3)


@service.command
def uninstall(*, name: Name = "pippin") -> None:
    """Stop the service and delete its file. Models, caches and pippin.toml are kept."""
    from pippin.service import installed

    manager = installed(name)
    manager.uninstall()
    print(f"Removed {manager.file}")


def _parse(options: tuple[str, ...]) -> Config:
    """The config of the service, or the error that `pippin serve` would report."""
    from pippin.hub import HUB_ID
    from pippin.startup.checkpoint import find_checkpoint

    config = parse_serve(options, SETTINGS)
    for option, origin in SETTINGS.origins.items():
        if option in SECRETS and origin == OPTION:
            raise ConfigError(
                f"--{option} would be readable in the service file and in the process list: use "
                f"--{option}-file, or write it into a pippin.toml with mode 600"
            )
        if origin.startswith(PREFIX):
            instead = f"--{option}-file" if option in SECRETS else f"--{option}"
            raise ConfigError(f"a service does not inherit {origin}: use {instead} or pippin.toml")
    if "PIPPIN_CONFIG" in os.environ:
        raise ConfigError("a service does not inherit PIPPIN_CONFIG: use --config")
    model = config.model.model
    if Path(model).expanduser().exists() or not HUB_ID.fullmatch(model):
        find_checkpoint(config.model)  # it needs no download, and may be missing
    return config
