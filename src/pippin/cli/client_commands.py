"""`pippin run` and `launch`: a chat or a coding agent on a server, found or started here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from pippin.cli.model_commands import CLIENT
from pippin.cli.options import option_name, takes_config
from pippin.cli.settings import OPTION, SETTINGS
from pippin.config import Config

AgentName = Literal["claude", "codex", "qwen", "opencode", "aider"]


@takes_config("model", "engine")
def run(
    config: Config,
    *prompt: Annotated[str, Parameter(show=True)],
    system: Annotated[str | None, Parameter(group=CLIENT)] = None,
    temperature: Annotated[float | None, Parameter(group=CLIENT)] = None,
    max_tokens: Annotated[int | None, Parameter(group=CLIENT)] = None,
) -> None:
    """Chat with a model: on your server that serves it, or on one that is started meanwhile.

    With a prompt, or with text that is piped into it, it prints one reply and exits. Options of the
    model or of the engine start a server of their own.

    Parameters
    ----------
    prompt
        Text to reply to. Default: a conversation in the terminal.
    system
        System prompt.
    temperature
        Sampling temperature; 0 always chooses the most likely token. Default: the model's own.
    max_tokens
        Maximum length of a reply, in tokens. Default: as many as fit.
    """
    from pippin.terminal.chat import run_model

    given = {"temperature": temperature, "max_tokens": max_tokens}
    run_model(
        config.model,
        prompt,
        serve_options=_given_options(config),
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


def _given_options(config: Config) -> list[str]:
    """Those of the command line, but for the model, as `pippin serve` takes them. The server reads
    the others from the same environment and file."""
    words: list[str] = []
    for section in (config.model, config.engine):
        for field in fields(section):
            name = option_name(field.name)
            if SETTINGS.origins.get(name) == OPTION and name != "model":
                words += _words(name, getattr(section, field.name))
    return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={value}"]


cache = App(name="cache", help="Flush a server's prefix cache; show, verify or empty one on disk.")

CacheDir = Annotated[
    Path,
    Parameter(
        env_var="PIPPIN_CACHE_DIR", help="Directory of prefix caches, as in serve --cache-dir."
    ),
]
Url = Annotated[
    str | None,
    Parameter(
        help="Address of the server. Default: http://127.0.0.1:8000 if a server is ready there, "
        "otherwise the server that you started last."
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
