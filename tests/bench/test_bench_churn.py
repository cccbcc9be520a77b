"""The churning load: what it draws, what it survives, and what it says of a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import islice

import pytest

import servers
from bundled import BUNDLED_PATH
from churn import Rates, churn, churn_at, churn_requests, widths_to_measure
from pippin.bench.client import (
    DISCONNECT_AFTER,
    Load,
    LoadClient,
    LoadRequest,
    Recording,
    RequestSizes,
    Sent,
    Target,
    send_load,
    summarize_load,
)
from pippin.bench.report import BenchError
from pippin.config import Config, ModelConfig
from pippin.metrics import StepRecord
from processes import environment
from prompts import Prompts, count_with


def drawn(seed: str, count: int) -> list[LoadRequest]:
    return list(islice(churn_requests(Prompts(seed)), count))


def test_requests_are_of_all_lengths_and_many_begin_alike() -> None:
    requests = drawn("a", 400)
    lengths = sorted(request.prompt_tokens for request in requests)
    assert lengths[0] < 20
    assert 1500 < lengths[-1] <= 3500
    assert all(4 <= request.max_tokens <= 300 for request in requests)
    starts = [request.prompt[:30] for request in requests]
    shared = sum(starts.count(start) > 1 for start in starts) / len(starts)
    assert 0.5 < shared < 0.7
    assert 0.04 < sum(request.disconnects for request in requests) / len(requests) < 0.17
    greedy = sum(request.sampling["temperature"] == 0.0 for request in requests) / len(requests)
    assert 0.4 < greedy < 0.6


def test_a_prompt_has_about_the_tokens_that_are_said_of_it() -> None:
    count = count_with(BUNDLED_PATH)
    for request in islice(churn_requests(Prompts("a", count)), 20):
        assert count(request.prompt) == pytest.approx(request.prompt_tokens, rel=0.25, abs=3)


def recording(tokens: Sequence[str], *, cut: bool = False, sent: float = 0.0) -> Recording:
    """A reply whose tokens come a tenth of a second apart."""
    events = [{"choices": [{"text": token}]} for token in tokens]
    if not cut:
        usage = {"prompt_tokens": 7, "completion_tokens": len(tokens)}
        events.append(
            {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 5}}}
        )
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    lines[0] = b"HTTP/1.1 200 OK\r\n\r\n" + lines[0]
    pieces = [(sent + 0.1 * (i + 1), line) for i, line in enumerate(lines)]
    return Recording(sent, pieces, cut)


ASKED = LoadRequest("a prompt", 40, 3)


def test_errors_are_counted_and_the_rest_is_measured() -> None:
    refused = Recording(
        0.0, [(0.1, b"HTTP/1.1 503 Busy\r\n\r\n" + b'{"error": {"message": "full"}}')]
    )
    outcome = summarize_load(
        [
            Sent(ASKED, recording(["a", "b", "c"], sent=1.0)),
            Sent(ASKED, recording(["a", "b"], cut=True, sent=2.0)),  # disconnected: no usage
            Sent(ASKED, refused),
            Sent(ASKED, refused),
            Sent(ASKED, BenchError("out of reach")),
        ]
    )
    assert refused.refused
    assert outcome.errors == {"the server answered 503 Busy: full": 2, "out of reach": 1}
    assert (outcome.num_requests, outcome.num_errors) == (5, 3)
    assert (outcome.generated_tokens, outcome.prompt_tokens, outcome.cached_tokens) == (5, 47, 5)
    assert (outcome.began, outcome.ended) == (1.0, pytest.approx(2.2))
    assert outcome.ttft.p50 == pytest.approx(0.1)
    assert outcome.gap.count == 3


def test_a_load_that_nobody_answers_says_why() -> None:
    with pytest.raises(BenchError, match="none of 1 requests was answered: out of reach"):
        summarize_load([Sent(ASKED, BenchError("out of reach"))])


def test_clients_share_the_requests_of_one_size() -> None:
    client = LoadClient(Target(f"http://127.0.0.1:{servers.free_port()}", "nobody"))
    requests = RequestSizes(5, 8, 2).requests(Prompts("a").text)
    sent = asyncio.run(send_load(client, Load(2), requests))
    assert len({each.request.prompt for each in sent}) == len(sent) == 5
    assert {each.request.max_tokens for each in sent} == {2}


@pytest.fixture
def _children_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.mark.slow
@pytest.mark.usefixtures("_children_import_what_we_do")
def test_our_own_server_is_compared_with_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPPIN_API_KEY", "for somebody else's server")
    rates = Rates(((1, 1e-4), (8, 2e-4)), 1e6)
    monkeypatch.setattr("churn.measure_rates", lambda config, widths: rates)
    report = churn(Config(ModelConfig(backend="fake")), clients=3, seconds=1.0)
    assert report.data["outcome"]["errors"] == {}
    assert report.data["num_steps"] > 10
    assert 0.0 < report.data["efficiency"] < 1.0
    name, shown = report.tables[0].rows[-1]
    assert name == "efficiency"
    assert shown.startswith(f"{report.data['efficiency']:.1%}, at least 80%: ")


def test_work_is_what_one_batch_takes_for_the_same_rows_and_tokens() -> None:
    rates = Rates(((1, 0.01), (3, 0.02)), 1000.0)
    steps = [(2, 200, 0.215), (3, 0, 0.02), (0, 100, 0.1), (0, 0, 0.0)]
    for rows, tokens, seconds in steps:
        step = StepRecord(0, *[0.0] * 7, prefill_tokens=tokens, decode_rows=rows, ghosts=0)
        assert rates.seconds(step) == pytest.approx(seconds)
    assert widths_to_measure([3, 12, 7]) == [1, 2, 4, 8, 12]
    assert widths_to_measure([0]) == widths_to_measure([]) == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("_children_import_what_we_do")
def test_any_endpoint_by_its_url_and_clients_that_disconnect() -> None:
    with servers.pippin_server(str(BUNDLED_PATH), ("--backend", "fake")) as target:
        at_rate = churn_at(target.url, Load(rate=20.0, seconds=1.0), seed=1)
        client = LoadClient(target)
        left = asyncio.run(_disconnect(client))
    assert left.cut
    assert len(left.pieces) == DISCONNECT_AFTER  # it disconnected at once
    assert at_rate.data["outcome"]["num_requests"] > 5
    assert "efficiency" not in at_rate.data  # no step log


async def _disconnect(client: LoadClient) -> Recording:
    exchange = await client.start_completion("a fox", 4000, disconnect_after=DISCONNECT_AFTER)
    return await exchange.done
