"""The `pippin bench` commands: options in, a report out. Measures nothing itself."""

from __future__ import annotations

import shlex
from typing import Annotated

from cyclopts import App, Group, Parameter

from pippin.bench.report import PRINT_ONLY, Outputs
from pippin.checkpoint import find_checkpoint
from pippin.config import ModelConfig

bench = App(name="bench", help="Measure speed: one batch, a server, the cache, or us and mlx-lm.")

Files = Annotated[Outputs, Parameter(name="*", group=Group("Output", sort_key=1))]
Names = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]
BUNDLED = ModelConfig.model


@bench.command
def compare(
    model: str = BUNDLED,
    /,
    *,
    only: Names = None,
    rounds: int = 2,
    pippin_options: str = "",
    mlx_lm_options: str = "",
    outputs: Files = PRINT_ONLY,
) -> None:
    """Run mlx-lm's server and ours on the same float32 weights and BLAS, in turn; print ratios.

    Parameters
    ----------
    model
        The bundled model's name, a local directory, or a Hugging Face id.
    only
        Scenarios to run: prefill, decode-1, decode-4, decode-16, interference, branches, chats.
        `decode` takes all three. Default: everything.
    rounds
        How often each scenario runs on each server; the table shows medians.
    pippin_options
        More options for `pippin serve`, as one string.
    mlx_lm_options
        More options for mlx-lm's server, as one string: "--prompt-cache-size 64".
    """
    from pippin.bench.compare import compare

    report = compare(
        find_checkpoint(ModelConfig(model=model)),
        only=only or (),
        rounds=rounds,
        pippin_options=shlex.split(pippin_options),
        mlx_lm_options=shlex.split(mlx_lm_options),
    )
    report.publish(outputs)


@bench.command
def prefix(
    model: str = BUNDLED,
    /,
    *,
    only: Names = None,
    rounds: int = 3,
    options: str = "",
    outputs: Files = PRINT_ONLY,
) -> None:
    """Time to the first token with and without the prefix cache, and what the cache costs.

    Parameters
    ----------
    model
        The bundled model's name, a local directory, or a Hugging Face id.
    only
        Parts to run: repeat, chat, fan-out, cost. Default: everything.
    rounds
        Prompts for `repeat` and for `cost` (at least three there).
    options
        More options for `pippin serve`, as one string: "--backend fake".
    """
    from pippin.bench.prefix import prefix

    report = prefix(
        find_checkpoint(ModelConfig(model=model)),
        only=only or (),
        rounds=rounds,
        options=shlex.split(options),
    )
    report.publish(outputs)
