"""`pippin bench serve`: options in, a report out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import App, CoercionError, Group, Parameter, Token, validators

from pippin.bench.report import PRINT_ONLY, Outputs

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
    from pippin.bench.client import Load, RequestSizes
    from pippin.bench.serve import measure_server

    if concurrency is None and rate is None:
        concurrency = [1, 4, 16]
    loads = [Load(n) for n in concurrency or ()] + [Load(rate=r) for r in rate or ()]
    sizes = RequestSizes(requests, input, output)
    measure_server(url, loads, sizes, model=model, api_key=api_key).publish(outputs)
