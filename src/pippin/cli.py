"""The `pippin` command. Imports no model library until a command needs one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Group, Parameter

from pippin import __version__
from pippin.config import Config
from pippin.errors import PippinError
from pippin.native_kernels import build_for_this_cpu
from pippin.options import takes_config

app = App(
    name="pippin",
    version=__version__,
    help="Serve large language models on MLX. Every option of the model, the engine and the "
    "server is also read from the environment: --port from PIPPIN_PORT.",
)

CLIENT = Group("Client", sort_key=-1)

# By name, so that other commands do not wait for its imports.
app.command(
    "pippin.cli_bench:bench",
    name="bench",
    help="Measure speed: a batch, a server, churn, cache, overlap, growth; us and mlx-lm.",
)


@app.command
@takes_config("model", "engine", "server", "limits")
def serve(config: Config) -> None:
    """Serve a model with the OpenAI API until Ctrl-C."""
    from pippin.launch import run_server

    run_server(config)


@app.command
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
    from pippin.terminal_chat import run_chat

    run_chat(config, url=url, system=system, temperature=temperature, max_tokens=max_tokens)


@app.command
def cache(*, url: str = "http://127.0.0.1:8000", flush: bool = False) -> None:
    """Show what a running server holds in its prefix cache.

    Parameters
    ----------
    url
        The server.
    flush
        Drop everything that no running request needs.
    """
    from pippin.client import show_cache

    show_cache(url, flush=flush)


@app.command
@takes_config("model")
def doctor(config: Config, *, json: bool = False) -> None:
    """Check this machine: versions, device, memory, BLAS speed and a 30-second self-check.

    Parameters
    ----------
    json
        Print the findings as JSON.
    """
    from pippin.doctor import run_doctor

    raise SystemExit(run_doctor(config, as_json=json))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. What the user got wrong is one line on stderr and exit status 2 or 1."""
    if argv is None:  # a process of our own, not a program that calls us
        build_for_this_cpu()
    try:
        app(argv)
    except PippinError as error:
        fail(error.message)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def fail(message: str) -> None:
    print(f"pippin: {message}", file=sys.stderr)
    raise SystemExit(1)
