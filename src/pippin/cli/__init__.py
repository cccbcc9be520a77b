"""The `pippin` command, a file for each family of commands. Options in, a call out.

Imports no model library until a command needs one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from pippin import __version__
from pippin.cli.cache_commands import cache
from pippin.cli.model_commands import chat, doctor, serve
from pippin.errors import PippinError
from pippin.native_kernels import build_for_this_cpu

app = App(
    name="pippin",
    version=__version__,
    help="Serve large language models on MLX. Every option of the model, the engine and the "
    "server is also read from the environment: --port from PIPPIN_PORT.",
)

for command in (serve, chat, cache, doctor):
    app.command(command)

# By name, so that other commands do not wait for its imports.
app.command(
    "pippin.cli.bench:bench",
    name="bench",
    help="Measure speed: a batch, a server, churn, cache, overlap, growth; us and mlx-lm.",
)


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
