"""`pippin run` and `launch`: a chat or a coding agent on a server, found or started here."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pippin.cli.cache_commands import Url
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
    from pippin.terminal.run_model import run_model

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
    from pippin.terminal.launch_agent import launch_agent

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
