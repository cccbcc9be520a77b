"""The `pippin` command.

Imports no model library until a command needs one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App

from pippin import __version__
from pippin.cli.commands import add_completion, chat, doctor, run, serve, status
from pippin.cli.options import HELP_ALL, SETTINGS, HelpPage, config, option_name
from pippin.errors import ConfigError, PippinError

help_page = HelpPage()
app = App(
    name="pippin",
    version=__version__,
    help="Serve large language models with MLX or PyTorch. An option that is not given is read "
    "from the environment (--port from PIPPIN_PORT), then from pippin.toml: `pippin config` prints "
    "the values that apply.",
    help_flags=("--help", "-h", HELP_ALL),
    help_formatter=help_page,
    config=SETTINGS,
)

# By name, so that other commands do not wait for their imports.
BY_NAME = {
    "launch": (
        "cli.coding_agents:launch",
        "Start a coding agent that is installed here, with the model of a running server.\n\n"
        "The agent's own settings are not changed: `pippin launch claude -- --continue`.",
    ),
    "pull": (
        "cli.hub_cache:pull",
        "Download a model from the Hugging Face hub, or what has changed of it since.\n\n"
        "Only files that `pippin serve` reads are downloaded, into the hub's own cache.",
    ),
    "list": (
        "cli.hub_cache:list_models",
        "List the models in the Hugging Face hub's cache, and whether they can be served.",
    ),
    "rm": (
        "cli.hub_cache:rm",
        "Delete a model from the Hugging Face hub's cache. A model that is being served is kept.",
    ),
    "cache": (
        "cli.hub_cache:cache",
        "Flush a server's prefix cache; show, verify or empty one on disk.",
    ),
    "service": (
        "cli.service:service",
        "Run `pippin serve` as a service of the system: systemd on Linux, launchd on macOS.",
    ),
    "bench": ("bench.serve:bench", "Measure the speed of a server."),
}
for command in (serve, run, chat, status, doctor, config):
    app.command(command)
for word, (place, does) in BY_NAME.items():
    app.command(f"pippin.{place}", name=word, help=does)
app.command("pippin_ray.plan:deploy", name="deploy", help="Run several engines on a cluster.")
add_completion(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A user error is one line on stderr and exit status 2 or 1."""
    words = sys.argv[1:] if argv is None else list(argv)
    help_page.shows_all = HELP_ALL in words
    try:
        app(words)
    except ConfigError as error:
        name = option_name(error.message.split()[0])  # by its convention, the field
        place = SETTINGS.place_of(name)
        fail(f"{place}: {error.message}" if place else error.message, status=2)
    except PippinError as error:
        fail(error.message, status=1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # of `pippin config | head`: the pipe is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def fail(message: str, *, status: int) -> None:
    print(f"pippin: {message}", file=sys.stderr)
    raise SystemExit(status)
