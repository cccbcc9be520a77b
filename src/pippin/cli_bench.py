"""The `pippin bench` commands: options in, a report out. Measures nothing itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, CoercionError, Group, Parameter, Token

from pippin.bench.report import PRINT_ONLY, Outputs
from pippin.checkpoint import find_checkpoint
from pippin.config import Config, ModelConfig
from pippin.options import takes_config

bench = App(name="bench", help="Measure speed. Each command can write --json, --svg, --markdown.")


def split_list(hint: Any, tokens: Sequence[Token]) -> list[Any]:
    """`--batch 1,4,16` as well as `--batch 1 4 16`."""
    (kind,) = get_args(hint)
    texts = [text for token in tokens for text in token.value.split(",") if text]
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise CoercionError(token=tokens[0], target_type=kind) from error


Files = Annotated[Outputs, Parameter(name="*", group=Group("Output", sort_key=1))]
LIST = Parameter(converter=split_list, consume_multiple=True, negative="")
Names = Annotated[list[str] | None, LIST]
Numbers = Annotated[list[int] | None, LIST]
Rates = Annotated[list[float] | None, LIST]
OptionString = Annotated[str, Parameter(allow_leading_hyphen=True)]
BUNDLED = ModelConfig.model


@bench.command(name="one-batch")
@takes_config("model", "engine", without=("prefix_cache",))  # every row is computed
def one_batch(
    config: Config,
    *,
    batch: Numbers = None,
    input: int = 512,
    output: int = 64,
    repeats: int = 3,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Latency of prefill and decode for one batch, and how close that is to the machine's limits.

    Parameters
    ----------
    batch
        Sizes to measure. Default: 1,4,16.
    input
        Prompt tokens of each row.
    output
        Tokens that all rows decode together.
    repeats
        Runs of each size; the table shows medians.
    """
    from pippin.bench.one_batch import one_batch

    report = one_batch(
        config,
        batches=batch or (1, 4, 16),
        input_len=input,
        output_len=output,
        repeats=repeats,
    )
    report.publish(outputs)


@bench.command(name="serve")
def bench_serve(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="PIPPIN_API_KEY")] = None,
    concurrency: Numbers = None,
    rate: Rates = None,
    requests: int = 32,
    input: int = 512,
    output: int = 64,
    streams: int = 0,
    long_input: int = 2000,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Load any OpenAI endpoint: time to the first token, gaps between tokens, throughput.

    Parameters
    ----------
    url
        The server.
    model
        Name to ask for. Default: the first that the server lists.
    api_key
        Sent as a bearer token.
    concurrency
        Requests kept in flight; one row of the table for each. Default: 1,4,16 without --rate.
    rate
        Requests a second that arrive as a Poisson process; one row for each.
    requests
        How many requests each row sends.
    input
        Words of each prompt: tokens, about.
    output
        Tokens of each reply.
    streams
        If not 0: also keep this many streams running while long prompts arrive.
    long_input
        Words of those long prompts.
    """
    from pippin.bench.serving import Load, measure_server

    if concurrency is None and rate is None:
        concurrency = [1, 4, 16]
    loads = [Load("concurrency", n, requests, input, output) for n in concurrency or ()]
    loads += [Load("rate", r, requests, input, output) for r in rate or ()]
    report = measure_server(
        url,
        loads,
        model=model,
        api_key=api_key,
        num_streams=streams,
        long_prompt_tokens=long_input,
    )
    report.publish(outputs)


@bench.command
@takes_config("model", "engine")
def churn(
    config: Config,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="PIPPIN_API_KEY")] = None,
    clients: int | None = None,
    rate: float | None = None,
    seconds: float = 60.0,
    seed: int = 0,
    step_log: Path | None = None,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Requests of all lengths that come and go, over HTTP, as a share of what one batch allows.

    Prompts have 5 to 2,500 tokens, every order of magnitude as likely as another, and 60% begin
    with up to 1,000 more that others begin with too. Replies have 4 to 300; a tenth of the clients
    leave early.

    Parameters
    ----------
    url
        Any OpenAI endpoint; MODEL is then the name to ask for, by default the first that it lists.
        Without it a server is started here, and its step log tells where the time went.
    api_key
        Sent to --url as a bearer token.
    clients
        How many send one request after the other. Default: 12, without --rate.
    rate
        Requests a second that arrive as a Poisson process.
    seconds
        How long new requests come; what runs then is waited for.
    seed
        Of all requests: equal seeds send the same ones.
    step_log
        Keep what the server started here wrote of each step in this file, a line of JSON each.
    """
    from pippin.bench.churn.load import ChurnLoad
    from pippin.bench.churn.served import churn, churn_at
    from pippin.bench.wire import BenchError

    if clients is not None and rate is not None:
        raise BenchError("requests come from --clients or at a --rate, not both")
    load = ChurnLoad(seconds, num_clients=clients or 12, rate=rate)
    if url is None:
        model_dir = find_checkpoint(config.model)
        churn(config, model_dir, load, seed=seed, step_log=step_log).publish(outputs)
        return
    name = config.model.model
    if step_log is not None or config != Config(ModelConfig(model=name)):
        raise BenchError("--url is a server that runs already: leave the engine's options away")
    model = None if name == BUNDLED else name
    churn_at(url, load, seed=seed, model=model, api_key=api_key).publish(outputs)


@bench.command
@takes_config("model", "engine")
def growth(config: Config, *, only: Names = None, outputs: Files = PRINT_ONLY) -> None:
    """How a step grows with batch, context, skewed lengths, the cache's tree and requests.

    Parameters
    ----------
    only
        Parts to run: batch, context, skew, tree, requests. Default: everything.
    """
    from pippin.bench.growth import growth

    growth(config, only=only or ()).publish(outputs)


@bench.command
def compare(
    model: str = BUNDLED,
    *,
    only: Names = None,
    rounds: int = 3,
    float32: bool | None = None,
    pippin_options: OptionString = "",
    mlx_lm_options: OptionString = "",
    outputs: Files = PRINT_ONLY,
) -> None:
    """Run mlx-lm's server and ours on the same weights and BLAS, in turn; print ratios.

    Parameters
    ----------
    model
        The bundled model's name, a local directory, or a Hugging Face id.
    only
        Scenarios to run: prefill, decode-1, decode-4, decode-8, decode-16, repeat, beside,
        interference, branches, chats-8, chats-4, churn. `decode` takes all four. Default:
        everything.
    rounds
        How often each scenario runs on each server; the table shows medians.
    float32
        Both compute in float32. Default: on CPUs; elsewhere in the checkpoint's own type.
    pippin_options
        More options for `pippin serve`, as one string.
    mlx_lm_options
        More options for mlx-lm's server, as one string: "--prompt-cache-size 64".
    """
    from pippin.bench.compare import compare

    report = compare(
        find_checkpoint(ModelConfig(model=model)),
        bundled=model == BUNDLED,
        float32=float32,
        only=only or (),
        rounds=rounds,
        pippin_options=shlex.split(pippin_options),
        mlx_lm_options=shlex.split(mlx_lm_options),
    )
    report.publish(outputs)


@bench.command
@takes_config("model", "engine")
def prefix(
    config: Config,
    *,
    only: Names = None,
    rounds: int = 3,
    pairs: int = 12,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Time to the first token with and without the prefix cache, and what the cache costs.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out, cost. Default: everything.
    rounds
        Prompts for `repeat`; the table shows medians.
    pairs
        New prompts for `cost`, each with and without a cache.
    """
    from pippin.bench.prefix import prefix

    report = prefix(
        config, find_checkpoint(config.model), only=only or (), rounds=rounds, num_pairs=pairs
    )
    report.publish(outputs)


@bench.command
@takes_config("model", "engine")
def overlap(
    config: Config,
    *,
    streams: int = 8,
    output: int = 128,
    pairs: int = 12,
    outputs: Files = PRINT_ONLY,
) -> None:
    """The same streams with and without overlap, in turn: throughput, step, idle device.

    Parameters
    ----------
    streams
        Requests that decode together.
    output
        Tokens of each stream.
    pairs
        How often each way runs; ratios are taken within pairs.
    """
    from pippin.bench.overlap import overlap

    report = overlap(config, num_streams=streams, num_tokens=output, num_pairs=pairs)
    report.publish(outputs)


@bench.command
@takes_config("model", "engine")
def grammar(
    config: Config,
    *,
    streams: int = 16,
    output: int = 96,
    pairs: int = 8,
    outputs: Files = PRINT_ONLY,
) -> None:
    """What constrained replies cost, and what running forced tokens in chunks saves.

    Parameters
    ----------
    streams
        Requests that decode together; every second one is constrained.
    output
        Tokens of each stream.
    pairs
        How often each way runs; ratios are taken within pairs.
    """
    from pippin.bench.grammar import grammar

    report = grammar(config, num_streams=streams, num_tokens=output, num_pairs=pairs)
    report.publish(outputs)
