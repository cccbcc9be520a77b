"""Replies with drafts of the backend itself that are preempted and resumed: what each is alone."""

from __future__ import annotations

from itertools import count

import pytest
from test_preemption import GROWTH, num_drawn_alike

from near_ties import count_same
from pippin.scheduler import admission, memory
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from processes import is_installed
from serving import BUNDLED, DRAFTED_BY, TORCH, make_backend, make_client, make_prompt

MAX_DEPTH, NUM_REQUESTS, NUM_ROWS = 3, 5, 2
MODELS = [(BUNDLED, True), (f"llama{DRAFTED_BY}llama", True)]  # and whether steps overlap
if is_installed("torch"):
    MODELS += [(f"{TORCH}qwen3_5_mtp", overlap) for overlap in (True, False)]
    MODELS += [(f"{TORCH}qwen3{DRAFTED_BY}qwen3", True)]


def params_of(number: int) -> dict[str, object]:
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
    return {"max_tokens": 20, **sampled}


@pytest.mark.parametrize(("name", "overlap"), MODELS)
def test_preempted_replies_are_what_each_is_alone(
    name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, memory):
        monkeypatch.setattr(module, "GROWTH_TOKENS", GROWTH)
    prompts = [make_prompt(name, 50 + number, seed=number) for number in range(NUM_REQUESTS)]
    alone, depths = make_client(name, cache=False), count()
    expected = [
        alone.ask(prompt, logprobs=2, **params_of(number)) for number, prompt in enumerate(prompts)
    ]
    speculation = Speculation(
        None,
        MAX_DEPTH,
        lambda _: (1, 3, 0, 2, 3)[next(depths) % 5],
        device=DeviceDrafter("mtp", MAX_DEPTH),
    )
    row_bytes = make_backend(name, 1, max_depth=MAX_DEPTH).row_bytes(64)
    client = make_client(
        name,
        speculation=speculation,
        capacity_bytes=NUM_ROWS * row_bytes,
        overlap=overlap,
    )
    replies = [client.submit(prompt, **params_of(number)) for number, prompt in enumerate(prompts)]
    client.run()
    metrics = client.loop.scheduler.metrics
    assert metrics.preemptions > 0
    assert metrics.drafted_tokens > 40
    if DRAFTED_BY in name:  # by itself, also behind what it was resumed with
        assert metrics.accepted_tokens > 0.97 * metrics.drafted_tokens
    compared = 0
    for number, (reply, alike) in enumerate(zip(replies, expected, strict=True)):
        assert reply.finish == alike.finish
        drawn = number % 2
        compared += num_drawn_alike(reply, alike) if drawn else count_same(reply.tokens, alike)
    assert compared > 0.9 * sum(len(reply.tokens) for reply in expected)
    assert client.loop.scheduler.budget.claimed == 0
