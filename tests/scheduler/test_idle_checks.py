"""An engine with a canary looks its cache over whenever it runs out of work."""

from __future__ import annotations

import pytest

from builders import Client, make_client, make_prompt, oracle
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import IDLE_SHARE, CacheCorruption, Canary
from pippin.cache.tree.radix import Node, as_tokens

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


def cache_of(client: Client) -> PrefixCache:
    cache = client.loop.scheduler.cache
    assert cache is not None
    return cache


def first_node(client: Client, prompt: list[int]) -> Node:
    return cache_of(client).radix.walk(as_tokens(prompt))[0][0]


@both_modes
def test_the_tree_is_swept_when_work_runs_out_and_not_before(overlap: bool) -> None:
    canary = Canary("raise")
    client = make_client(overlap=overlap, canary=canary)
    client.submit(make_prompt(100))
    while not client.loop.idle:
        assert canary.checked == 0
        client.step()
    checked = canary.checked
    assert checked > 0
    client.step(3)  # still idle: once is enough
    assert canary.checked == checked


def test_a_logging_canary_reports_what_it_finds_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = make_client(canary=Canary("log", clock=lambda: 0.0))
    client.ask(make_prompt(100))
    node = first_node(client, make_prompt(100))
    assert node.path_hash is not None
    node.path_hash ^= 1
    stranger = client.ask(make_prompt(50, family=2))
    assert (stranger.tokens, stranger.finish) == oracle(make_prompt(50, family=2))
    assert "holds another sequence" in caplog.text


def test_a_logging_canary_takes_a_small_share_of_the_time() -> None:
    """A request after the other: the engine is idle between any two of them."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001  # a check takes a millisecond
        return now[0]

    canary = Canary("log", clock=clock)
    client = make_client(canary=canary)
    num_checks, counts = 0, [0]
    for number in range(100):
        client.ask(make_prompt(100, family=number))
        now[0] += 0.01
        counts.append(canary.checked)
        num_checks += counts[-1] > counts[-2]
    assert now[0] > 1.0
    assert num_checks == pytest.approx(now[0] / (0.001 / IDLE_SHARE), abs=1.5)


def test_a_raising_canary_finds_bytes_that_changed_while_nobody_used_them() -> None:
    client = make_client(canary=Canary("raise"))
    client.ask(make_prompt(100))
    payload = next(p for p in first_node(client, make_prompt(100)).payloads if p is not None)
    payload.content[0] += 1  # type: ignore[attr-defined]
    with pytest.raises(CacheCorruption, match="bytes that have changed"):
        client.ask(make_prompt(50, family=2))
