"""`pippin bench serve`, `streams`, `churn`, `compare`, `restart`: load on servers, over HTTP."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from pippin.bench.results.report import PRINT_ONLY
from pippin.cli.bench.parameters import Count, Files, Names, Numbers, Positive, Rates
from pippin.cli.options import takes_config
from pippin.config import Config, ModelConfig
from pippin.startup.find_checkpoint import find_checkpoint
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
    watchers: int = 0,
    pairs: Count = 8,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Load an OpenAI endpoint: time to first token, time between tokens, throughput.

    Parameters
    ----------
    url
        Address of the server.
    model
        Model name in the requests. Default: the first model that the server lists.
    api_key
        API key, sent as a bearer token.
    concurrency
        Numbers of requests in flight to measure. Default: 1,4,16 without --rate.
    rate
        Request rates to measure, in requests per second that arrive as a Poisson process.
    requests
        Number of requests sent per measurement.
    input
        Length of each prompt in words, which is about its number of tokens.
    output
        Length of each reply, in tokens.
    watchers
        If not 0: also compare each load with and without this number of clients of /events.
    pairs
        Number of pairs of runs with and without --watchers.
    """
    from pippin.bench.client.load import Load, RequestSizes
    from pippin.bench.served.serving import measure_server

    if concurrency is None and rate is None:
        concurrency = [1, 4, 16]
    loads = [Load(n) for n in concurrency or ()] + [Load(rate=r) for r in rate or ()]
    report = measure_server(
        url,
        loads,
        RequestSizes(requests, input, output),
        model=model,
        api_key=api_key,
        num_watchers=watchers,
        num_pairs=pairs,
    )
    report.publish(outputs)


def streams(
    *,
    only: Names = None,
    streams: Numbers = None,
    rate: Positive = 2500.0,
    seconds: Positive = 4.0,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Measure the CPU time of a streamed token in the server process and in the engine process.

    Starts servers with the fake backend, which computes nothing, and needs no model.

    Parameters
    ----------
    only
        Dialects to measure: chat, logprobs (chat completions with logprobs), completions,
        responses, messages, ollama. Default: all.
    streams
        Numbers of streams to measure. Default: 1,64,256.
    rate
        Tokens per second of all streams together, at most 200 per stream. A rate that the server
        process can keep up with measures the highest cost: one that is behind sends several tokens
        at once.
    seconds
        Seconds of each measurement.
    """
    from pippin.bench.served.streams import DIALECTS, measure_streams

    report = measure_streams(
        only or list(DIALECTS), streams or [1, 64, 256], rate=rate, seconds=seconds
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
    """Load a server with requests of mixed lengths; compare with the throughput of one batch.

    Prompts have 5 to 2,500 tokens, distributed evenly on a logarithmic scale; 60% of them start
    with a shared prefix of up to 1,000 more. Replies have 4 to 300 tokens; a tenth of the clients
    disconnect early.

    Parameters
    ----------
    url
        Address of an OpenAI endpoint; MODEL is then the model name in the requests, by default the
        first that it lists. Without --url a server is started, and its step log is evaluated.
    api_key
        API key for --url, sent as a bearer token.
    clients
        Number of clients that send one request after another. Default: 12 without --rate.
    rate
        Requests per second that arrive as a Poisson process.
    seconds
        Seconds during which new requests are sent; requests in flight then finish.
    seed
        Seed of the requests: the same seed sends the same requests.
    step_log
        File for the step log of the started server, one line of JSON per step.
    """
    from pippin.bench.churn.churn import churn, churn_at
    from pippin.bench.client.load import Load
    from pippin.bench.errors import BenchError

    if clients is not None and rate is not None:
        raise BenchError("--clients and --rate exclude each other: give one of them")
    load = Load(clients or 12, rate, seconds)
    if url is None:
        model_dir = find_checkpoint(config.model)
        churn(config, model_dir, load, seed=seed, step_log=step_log).publish(outputs)
        return
    name = config.model.model
    if step_log is not None or config != Config(ModelConfig(model=name)):
        raise BenchError(
            "--url names a running server: remove --step-log and options of the engine, which have "
            "no effect on it"
        )
    model = None if name == BUNDLED else name
    churn_at(url, load, seed=seed, model=model, api_key=api_key).publish(outputs)


def compare(
    model: str = BUNDLED,
    *,
    backend: Literal["auto", "mlx", "torch"] = "auto",
    only: Names = None,
    rounds: Count = 3,
    float32: bool | None = None,
    pippin_options: OptionString = "",
    their_options: OptionString = "",
    outputs: Files = PRINT_ONLY,
) -> None:
    """Compare Pippin with mlx-lm's server on the same weights; print ratios.

    mlx-lm's server gets the same BLAS library as Pippin.

    Parameters
    ----------
    model
        Model: the name of the demo model, a local directory, or a Hugging Face id.
    backend
        Backend of Pippin.
    only
        Scenarios to run: prefill, decode-1, decode-4, decode-8, decode-16, repeat, beside,
        interference, branches, chats-8, chats-4; `decode` for all four of that name.
        Default: all.
    rounds
        Number of runs per scenario and server; the table shows medians.
    float32
        Run both servers in float32. Default: on CPUs; otherwise the data type of the checkpoint.
    pippin_options
        Further options of `pippin serve`, as one string.
    their_options
        Further options of mlx-lm's server, as one string: "--prompt-cache-size 64".
    """
    from pippin.bench.served.compare import compare

    checkpoint = find_checkpoint(ModelConfig(model=model))
    report = compare(
        checkpoint,
        bundled=model == BUNDLED,
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
    """Measure what a cache on disk saves after a restart, and what writing it costs.

    Runs conversations of 2,000 tokens without a cache, then again after SIGTERM, and after kill -9
    while others were being written. It uses temporary directories.

    Parameters
    ----------
    only
        Parts to run: sigterm, kill, gaps, ceilings. Default: all.
    rounds
        Number of conversations, and of pairs of runs with streams; the table shows medians.
    seconds
        Seconds during which new prompts are sent in part `ceilings`.
    """
    from pippin.bench.served.restart import restart

    model_dir = find_checkpoint(config.model)
    restart(config, model_dir, only=only or (), rounds=rounds, seconds=seconds).publish(outputs)
