"""What the tree holds of torch's pools stays what it was: the canary looks at the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from builders import Client
from families import WINDOW
from integrity import sweep
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.cache.tree.canary import CacheCorruption, Canary
from pippin.types import Component, Payload
from serving import TORCH, ask_all, cache_of, check_idle, make_client, make_prompt, nodes_of

# Of 200 tokens, that a short pool has room for.
ROWS = {f"{TORCH}qwen3_5": 5, f"{TORCH}llama": 2, f"{TORCH}llama_windows": 3, f"{TORCH}mistral": 3}
NAMES = tuple(ROWS)


def row_bytes(name: str, num_tokens: int) -> int:
    return int(make_client(name).loop.backend.row_bytes(num_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_the_tree_holds_is_written(name: str) -> None:
    """Turns of conversations in a pool that is short: slots and cells change hands all the time."""
    canary = Canary("raise")
    client = make_client(name, canary=canary, capacity_bytes=ROWS[name] * row_bytes(name, 200))
    histories = [make_prompt(name, 40 + 13 * number, seed=number) for number in range(6)]
    for turn in range(3):
        replies = ask_all(client, histories, max_tokens=6)
        assert sweep(cache_of(client)) == 0
        histories = [
            [*history, *reply.tokens, *make_prompt(name, 3, seed=turn)]
            for history, reply in zip(histories, replies, strict=True)
        ]
    assert canary.checked > 0
    assert canary.faults == 0
    assert cache_of(client).stats.bytes_evicted > 0
    check_idle(client)


def spoil(client: Client, payload: Payload) -> None:
    """Change one number of it, where it lies."""
    pools = client.loop.backend.runner.pools  # type: ignore[attr-defined]
    match payload:
        case KVPayload():
            views = pools.kv if payload.kind is Component.ATTENTION else pools.window_kv
            views[-1][int(payload.cells[-1]), 1] += 1e-3
        case StatePayload():
            pools.recurrent[-1][payload.slab, 0, 0, 0] += 1e-3
        case HiddenPayload():
            assert payload.hidden is not None
            payload.hidden = payload.hidden + 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_spoiled_payload_is_noticed_when_it_is_restored(name: str) -> None:
    prompt = make_prompt(name, 131, seed=8)
    for index in cache_of(make_client(name)).rules.indices:
        client = make_client(name, canary=Canary("raise"))
        client.ask(prompt, max_tokens=1)
        nodes = nodes_of(client, prompt)
        payload = [n for n in nodes if n.payloads[index] is not None][-1].payloads[index]
        assert payload is not None
        with torch.inference_mode():
            spoil(client, payload)
        with pytest.raises(CacheCorruption, match="bytes that have changed"):
            client.ask(prompt)


@pytest.mark.parametrize("name", ["llama_windows", "mistral"])
def test_what_falls_behind_a_window_is_let_go(name: str) -> None:
    """Without a tree: a row holds its window, whatever it has read and written."""
    client = make_client(f"{TORCH}{name}", cache=False, chunk=64)
    backend = client.loop.backend
    pool = backend.runner.pools.arena.cells[Component.WINDOW]  # type: ignore[attr-defined]
    client.submit(make_prompt(f"{TORCH}{name}", 200, seed=3), max_tokens=40)
    held = []
    while not client.loop.idle:
        client.step()
        held.append(pool.num_used)
    assert max(held) == WINDOW
    backend.runner.pools.arena.check_integrity()  # type: ignore[attr-defined]
    assert pool.num_used == 0


def test_a_row_is_charged_for_its_window_and_a_chunk() -> None:
    backend = make_client(f"{TORCH}mistral").loop.backend
    most = WINDOW + backend.device.prefill_tokens
    assert backend.row_bytes(most + 1) == backend.row_bytes(most) > backend.row_bytes(most - 1)
    assert backend.row_bytes(most, num_borrowed=most - 1) == backend.row_bytes(1)


@pytest.mark.parametrize("name", ["llama_windows", "mistral"])
def test_a_chunk_longer_than_what_a_row_is_charged_for_is_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(f"{TORCH}{name}", 200, seed=4)
    expected = make_client(f"{TORCH}{name}").ask(prompt, max_tokens=8).tokens
    client = make_client(f"{TORCH}{name}", chunk=200)
    backend = client.loop.backend
    monkeypatch.setattr(backend, "device", replace(backend.device, prefill_tokens=48))
    assert client.ask(prompt, max_tokens=8).tokens == expected
    again = client.ask(prompt, max_tokens=8)
    assert again.tokens == expected
    check_idle(client)
