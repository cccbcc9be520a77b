"""`pippin bench serve`, `churn`, `compare` and `restart`: load on servers, over HTTP."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from pippin.bench.results.report import PRINT_ONLY
from pippin.cli.bench.parameters import Count, Files, Names, Numbers, Positive, Rates
from pippin.cli.options import takes_config
from pippin.config import Config, ModelConfig
from pippin.startup.checkpoint import find_checkpoint
from pippin.startup.resolve import choose_backend

OptionString = Annotated[str, Parameter(allow_leading_hyphen=True)]
BUNDLED = ModelConfig.model


def serve(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="PIPPIN_API_KEY")] = None,
    concurrency: Numbers = None,
    rate: Rates = None,
    requests: Count = 32,
    input: Count = 512,
    output: Count = 64,
    streams: int = 0,
    long_input: Count = 2000,
    watchers: int = 0,
    pairs: Count = 8,
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
    watchers
        If not 0: also compare each load with so many watchers of Pippin's /events and without.
    pairs
        How often, in turn.
    """
    from pippin.bench.client.loads import Load
    from pippin.bench.served.serving import measure_server

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
        num_watchers=watchers,
        num_pairs=pairs,
    )
    report.publish(outputs)


@takes_config("model", "engine")
def churn(
    config: Config,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="PIPPIN_API_KEY")] = None,
    clients: Count | None = None,
    rate: Positive | None = None,
    seconds: Positive = 60.0,
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
    from pippin.bench.errors import BenchError

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


def compare(
    model: str = BUNDLED,
    *,
    against: str = "mlx-lm",
    backend: Literal["auto", "mlx", "torch"] = "auto",
    only: Names = None,
    rounds: Count = 3,
    float32: bool | None = None,
    pippin_options: OptionString = "",
    their_options: OptionString = "",
    outputs: Files = PRINT_ONLY,
) -> None:
    """Run another server and ours on the same weights, in turn; print ratios.

    Parameters
    ----------
    model
        The bundled model's name, a local directory, or a Hugging Face id.
    against
        mlx-lm: its server, with the BLAS that Pippin has. transformers: `transformers serve`,
        with its continuous batching where a model has attention layers alone; pip install
        'transformers[serving]' accelerate.
    backend
        What Pippin computes with.
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
    their_options
        More options for the other server, as one string: "--prompt-cache-size 64".
    """
    from pippin.bench.served.compare import compare
    from pippin.bench.servers.rivals import rival_of

    checkpoint = find_checkpoint(ModelConfig(model=model))
    report = compare(
        checkpoint,
        bundled=model == BUNDLED,
        against=rival_of(against),
        backend=choose_backend(backend, checkpoint),
        float32=float32,
        only=only or (),
        rounds=rounds,
        pippin_options=shlex.split(pippin_options),
        their_options=shlex.split(their_options),
    )
    report.publish(outputs)


@takes_config("model", "engine", without=("cache_dir", "disk"))
def restart(
    config: Config,
    *,
    only: Names = None,
    rounds: Count = 3,
    seconds: Positive = 60.0,
    outputs: Files = PRINT_ONLY,
) -> None:
    """What a cache on disk saves after a restart, and what writing it costs running streams.

    Conversations of 2,000 tokens, cold; then again after SIGTERM, and after kill -9 while others
    were being written. Directories are made for it and removed.

    Parameters
    ----------
    only
        Parts to run: sigterm, kill, gaps, ceilings. Default: everything.
    rounds
        Conversations, and pairs of runs with streams; the table shows medians.
    seconds
        How long new prompts come for `ceilings`.
    """
    from pippin.bench.served.restart import restart

    model_dir = find_checkpoint(config.model)
    restart(config, model_dir, only=only or (), rounds=rounds, seconds=seconds).publish(outputs)
