"""`pippin bench serve`: how fast an OpenAI endpoint answers under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, get_args

import httpx
from cyclopts import App, CoercionError, Group, Parameter, Token, validators

from pippin.bench.client import (
    Load,
    LoadClient,
    LoadOutcome,
    RequestSizes,
    Target,
    parse,
    send_load,
    summarize_load,
)
from pippin.bench.report import (
    PRINT_ONLY,
    BenchError,
    Outputs,
    Report,
    Table,
    busy_note,
    number,
    say,
)

WORDS = (
    "a the little big old new red blue brave dog cat bird fox bear tree house ball box boat saw "
    "found liked followed helped lost watched in near garden forest beach farm river hill ."
)


def words_of(seed: str) -> Callable[[int], str]:
    """Texts of so many words, each of which is about a token. Two share no prefix but by chance."""
    pick, words = random.Random(seed).choice, WORDS.split()
    return lambda num_words: "".join(f" {pick(words)}" for _ in range(num_words))


def find_target(url: str, model: str | None, api_key: str | None) -> Target:
    """The server at `url`; only Pippin is asked to ignore the end of a reply."""
    url = url.rstrip("/").removesuffix("/v1")
    name = model or first_model(url, api_key)
    extra = {"ignore_eos": True} if _is_pippin(url, api_key) else {}
    return Target(url, name, api_key, extra)


def first_model(url: str, api_key: str | None = None) -> str:
    """The name of the model that a server lists first."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise BenchError(f"{url}/v1/models names no model: {error}; give --model") from error


async def warm_up(client: LoadClient, text: Callable[[int], str]) -> None:
    """Run every path once, so that no measurement includes a first time."""
    texts = [text(600), *(text(24) for _ in range(3))]
    for recording in await asyncio.gather(*(client.complete(t, max_tokens=8) for t in texts)):
        parse(recording)


def _is_pippin(url: str, api_key: str | None) -> bool:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        status = httpx.get(f"{url}/status", headers=headers, timeout=10).json()
    except (httpx.TransportError, ValueError):
        return False
    return isinstance(status, dict) and "device_idle_share" in status.get("metrics", {})


def measure_server(
    url: str,
    loads: Sequence[Load],
    sizes: RequestSizes,
    *,
    model: str | None = None,
    api_key: str | None = None,
) -> Report:
    notes = busy_note()
    target = find_target(url, model, api_key)
    client = LoadClient(target)
    asyncio.run(warm_up(client, words_of("warm-up")))
    outcomes = []
    for load in loads:
        say(f"{sizes.number} requests, {load}")
        requests = sizes.requests(words_of(f"serve {load}"))
        outcome = summarize_load(asyncio.run(send_load(client, load, requests)))
        outcomes.append((load, outcome))
        notes += [f"{load}: {n} x {message}" for message, n in outcome.errors.items()]
    return summarize(target, outcomes, sizes, notes)


def summarize(
    target: Target,
    outcomes: Sequence[tuple[Load, LoadOutcome]],
    sizes: RequestSizes,
    notes: list[str],
) -> Report:
    header = ("load", "requests", "tok/s", "TTFT p50, ms", "p99", "gap p50, ms", "p99")
    rows: list[tuple[str, ...]] = []
    for load, found in outcomes:
        answered = f"{found.num_requests - found.num_errors} of " if found.errors else ""
        requests = f"{answered}{found.num_requests}"
        times = (number(value) for value in found.times_ms.values())
        rows.append((str(load), requests, number(found.generated_per_second), *times))
    title = f"{sizes.prompt_tokens:,} tokens in, {sizes.output_tokens:,} out"
    data = {
        "url": target.url,
        "model": target.model,
        "loads": [
            {
                "load": asdict(load),
                "outcome": asdict(found),
                "tokens_per_second": found.generated_per_second,
            }
            for load, found in outcomes
        ],
    }
    return Report("serve", [Table(title, header, rows)], data, notes)


bench = App(name="bench")


def split_list(hint: Any, tokens: Sequence[Token]) -> list[Any]:
    """`--concurrency 1,4,16` as well as `--concurrency 1 4 16`."""
    (kind,) = get_args(hint)
    texts = [text for token in tokens for text in token.value.split(",") if text]
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise CoercionError(token=tokens[0], target_type=kind) from error


Files = Annotated[Outputs, Parameter(name="*", group=Group("Output", sort_key=1))]
POSITIVE = Parameter(validator=validators.Number(gt=0))
Count = Annotated[int, POSITIVE]
LIST = Parameter(converter=split_list, consume_multiple=True, negative="")
Numbers = Annotated[list[int] | None, LIST, POSITIVE]
Rates = Annotated[list[float] | None, LIST, POSITIVE]
ApiKey = Annotated[str | None, Parameter(env_var="PIPPIN_API_KEY")]


@bench.command
def serve(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: ApiKey = None,
    concurrency: Numbers = None,
    rate: Rates = None,
    requests: Count = 32,
    input: Count = 512,
    output: Count = 64,
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
    """
    if concurrency is None and rate is None:
        concurrency = [1, 4, 16]
    loads = [Load(n) for n in concurrency or ()] + [Load(rate=r) for r in rate or ()]
    sizes = RequestSizes(requests, input, output)
    measure_server(url, loads, sizes, model=model, api_key=api_key).publish(outputs)
