"""`pippin serve`, `chat` and `doctor`: commands that load a model here. Import no model library."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from pippin.cli.options import takes_config
from pippin.config import Config

CLIENT = Group("Client", sort_key=-1)


@takes_config("model", "engine", "server", "limits")
def serve(config: Config) -> None:
    """Serve a model with the OpenAI API until Ctrl-C."""
    from pippin.startup.launch import run_server

    run_server(config)


@takes_config("model", "engine")
def chat(
    config: Config,
    *,
    url: Annotated[str | None, Parameter(group=CLIENT)] = None,
    system: Annotated[str | None, Parameter(group=CLIENT)] = None,
    temperature: Annotated[float | None, Parameter(group=CLIENT)] = None,
    max_tokens: Annotated[int, Parameter(group=CLIENT)] = 512,
) -> None:
    """Talk to a model in the terminal: one loaded here, or a server's with --url.

    Parameters
    ----------
    url
        A running server, for instance http://127.0.0.1:8000. Default: load the model here.
    system
        System prompt.
    temperature
        0 always takes the likeliest token. Default: the model's own.
    max_tokens
        Longest reply.
    """
    from pippin.terminal.chat import run_chat

    run_chat(config, url=url, system=system, temperature=temperature, max_tokens=max_tokens)


@takes_config("model", "engine")
def doctor(config: Config, *, json: bool = False) -> None:
    """Check this machine with what `pippin serve` runs here, given the same options.

    Versions, device, memory, BLAS speed and a 30-second self-check.

    Parameters
    ----------
    json
        Print the findings as JSON.
    """
    from pippin.terminal.doctor import run_doctor

    raise SystemExit(run_doctor(config, as_json=json))
