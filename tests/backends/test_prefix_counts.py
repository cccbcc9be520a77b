"""What reuse saves, counted where tokens enter the model; and that nothing spoils what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from builders import Client
from cases import cases
from families import FAMILIES, WINDOW
from integrity import sweep
from near_ties import TOLERANCE, assert_same
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.payloads.packing import payload_arrays
from pippin.backends.mlx.payloads.payload import Block, KVPayload, Span, StatePayload
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.cache.tree.canary import CacheCorruption, Canary
from pippin.cache.tree.components import INDEX
from pippin.cache.tree.radix import Node
from pippin.types import Payload
from serving import (
    ONE_OF_EACH_KIND,
    ask_all,
    cache_of,
    check_idle,
    cold,
    diverge,
    make_client,
    make_prompt,
    most_recomputed,
    nodes_of,
    served,
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class CountedModel(LoadedModel):
    """Notes how many tokens each forward was given."""

    sizes: list[int] = field(default_factory=list)

    def forward(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        self.sizes.append(tokens.size)
        return super().forward(tokens, caches)


def ask_counted(client: Client, model: CountedModel, prompt: Sequence[int], reply_len: int) -> int:
    """Prompt tokens found in the cache: one request alone runs the rest, and each reply token."""
    model.sizes.clear()
    reply = client.ask(prompt, max_tokens=reply_len)
    assert reply.cached_tokens is not None
    assert sum(model.sizes) == len(prompt) - reply.cached_tokens + reply_len
    check_idle(client)
    return reply.cached_tokens


@cases("name", FAMILIES)
def test_cached_tokens_are_exactly_those_not_run_through_the_model(name: str) -> None:
    loaded = served(name)
    model = CountedModel(**{part.name: getattr(loaded, part.name) for part in fields(loaded)})
    client = make_client(name, model=model)
    # A compiled step calls the model only when it is traced.
    client.loop.backend._decodes.forward = DecodeForward(model.layout, model.forward)
    base = make_prompt(name, 135, seed=1)
    assert ask_counted(client, model, base, 2) == 0
    limit = most_recomputed(name)
    assert ask_counted(client, model, base, 1) == 135
    assert 70 - ask_counted(client, model, diverge(name, base, 70, 3, seed=2), 1) < limit
    assert ask_counted(client, model, diverge(name, base, 0, 9, seed=3), 1) == 0
    conversation = [*base, *client.replies["r0"].tokens]
    # The reply's end is a checkpoint: with states or without, nothing before it is computed.
    assert ask_counted(client, model, [*conversation, 5], 1) == len(conversation)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "gemma4"])
def test_a_window_reaches_back_into_a_reply_as_far_as_its_row_held_it(name: str) -> None:
    """Rows drop what is older than the window: whoever leaves a reply earlier starts at the prompt.

    In the prompt, and within the last tokens of the reply, nothing shared is computed again.
    """
    client = make_client(name)
    base = make_prompt(name, 50, seed=4)
    conversation = [*base, *client.ask(base, max_tokens=2 * WINDOW + 40).tokens]
    end = len(conversation)
    prompts = [diverge(name, conversation, at, 3, seed=at) for at in (45, 50, 60, end - 1, end)]
    warm = ask_all(client, prompts)
    assert_same(warm, cold(name, prompts))
    assert [reply.cached_tokens for reply in warm] == [45, 50, 50, end - 1, end]
    check_idle(client)


def workload(client: Client, name: str) -> None:
    """Repeats, divergences and turns; every batch is asked for at once.

    Replies say what they are told to, so that nothing in the cache hangs on a near tie.
    """
    says = {"logit_bias": {9: 100.0}}
    bases = [make_prompt(name, n, seed=5) for n in (64, 70, 131)]
    replies = ask_all(client, bases, max_tokens=3, **says)
    turns = [[*b, *r.tokens, 7, 8] for b, r in zip(bases, replies, strict=True)]
    branch = diverge(name, bases[2], 100, 20, seed=6)
    ask_all(client, [*turns, branch, bases[1]], max_tokens=2, **says)


def contents(client: Client) -> dict[tuple[bytes, int], list[np.ndarray]]:
    """Every payload by the tokens before it and its component."""
    found = {}
    for node in cache_of(client).radix.nodes():
        tokens = b"".join(above.tokens for above in reversed(list(node.ancestors())))
        for index in INDEX.values():
            payload = node.payloads[index]
            if payload is not None:
                found[tokens, index] = [np.array(array) for array in arrays_of(payload)]
    return found


def arrays_of(payload: Payload) -> list[mx.array]:
    """Of what the payload itself covers, joined: blocks are cut where chunks happened to end."""
    if isinstance(payload, StatePayload):
        return list(payload_arrays(payload))
    assert isinstance(payload, KVPayload)
    columns = zip(*(span.arrays() for span in payload.spans), strict=True)
    return [mx.concatenate(list(column), axis=2) for column in columns]


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_overlap_on_and_off_leave_the_same_in_the_cache(name: str) -> None:
    """And the canary raises no false alarm, while memory is short too."""
    ample = {"overlap": True}, {"overlap": False}
    clients = []
    for options in (*ample, {"capacity_bytes": 1 << 19}):
        canary = Canary("raise")
        clients.append(make_client(name, canary=canary, **options))
        workload(clients[-1], name)
        assert sweep(cache_of(clients[-1])) == canary.faults == 0
        assert canary.checked > 0
        check_idle(clients[-1])
    with_overlap, without, _ = clients
    assert_same(*(list(client.replies.values()) for client in clients[:2]))
    kept, expected = contents(with_overlap), contents(without)
    assert kept.keys() == expected.keys()
    for key, arrays in kept.items():
        for array, other in zip(arrays, expected[key], strict=True):
            np.testing.assert_allclose(array, other, rtol=TOLERANCE, atol=TOLERANCE)


def spoil(node: Node, index: int) -> None:
    """Replace one array of a live payload by one that differs in a single number."""
    payload = node.payloads[index]
    if isinstance(payload, StatePayload):
        first, *rest = payload.arrays
        payload.arrays = (nudged(first), *rest)
    else:
        assert isinstance(payload, KVPayload)
        span, *others = payload.spans
        first, *rest = span.block.arrays
        block = Block((nudged(first), *rest), span.block.num_tokens)
        payload.spans = (Span(block, span.start, span.stop), *others)


def nudged(array: mx.array) -> mx.array:
    changed = np.array(array)
    changed.flat[0] += 1e-3
    return mx.array(changed)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_the_canary_catches_a_spoiled_payload_on_restore(name: str) -> None:
    prompt = make_prompt(name, 131, seed=8)
    longer = [*prompt, 9]
    for index in cache_of(make_client(name)).rules.indices:
        client = make_client(name, canary=Canary("raise"))
        client.ask(prompt, max_tokens=1)
        nodes = nodes_of(client, longer)
        spoil([n for n in nodes if n.payloads[index] is not None][-1], index)
        with pytest.raises(CacheCorruption, match="bytes that have changed"):
            client.ask(longer)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_logging_canary_has_a_doubtful_prefix_computed_again(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    canary = Canary("log")
    client = make_client(name, canary=canary)
    prompt = make_prompt(name, 131, seed=8)
    ask_all(client, [prompt])
    prompts = [[*prompt[:130], 9, 10], prompt]
    for node in nodes_of(client, prompt):
        assert node.path_hash is not None
        node.path_hash ^= 1
    warm = ask_all(client, prompts)
    assert_same(warm, cold(name, prompts))
    assert [reply.cached_tokens for reply in warm] == [0, 0]
    assert canary.faults > 0
    assert "holds another sequence" in caplog.text
