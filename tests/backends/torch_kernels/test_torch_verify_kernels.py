"""Steps with drafts by kernels: tokens of plain operations, on a GPU or interpreted on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

from builders import AMPLE_BYTES
from pippin.backends.base import Retire
from pippin.backends.torch.backend import TorchBackend
from test_contract import Steps, restore
from test_draft_contract import MAX_DEPTH, Reply, goes_on, started
from torch_serving import load_torch


def make_steps(name: str) -> Steps:
    backend = TorchBackend(
        load_torch(name),
        num_slots=6,
        pool_bytes=AMPLE_BYTES,
        kernels=True,
        max_depth=MAX_DEPTH,
        debug=True,
    )
    return Steps(backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "qwen3_next"])
def test_rows_of_every_depth_say_what_they_say_without_drafts(name: str) -> None:
    """Ahead of the results, and restored behind drafts that were accepted."""
    steps = make_steps(name)
    replies = [
        Reply(f"torch, {name}", 1, 5),
        Reply(f"torch, {name}", 2, 64, 1, {"temperature": 1.0, "seed": 1 << 63}),
        Reply(f"torch, {name}", 3, 20, 2, {"temperature": 0.8, "top_p": 0.9, "seed": 4}),
    ]
    started(steps, *replies)
    ahead = steps.launch(decode=tuple(reply.row(3, [3, 9]) for reply in replies))
    for depths in ((2, 0, 4), (0, 1, 4), (0, 0, 0), (4, 0, 1)):
        rows = zip(replies, depths, strict=True)
        decode = tuple(reply.row(depth, [3, 9, 14]) for reply, depth in rows)
        following = steps.launch(decode=decode)
        result = ahead.wait()
        for reply in replies:
            reply.settle(result)
        ahead = following
    result = ahead.wait()
    for reply in replies:
        reply.settle(result)
        reply.check()
    last = replies[2]
    captures = steps.run(retire=(Retire(3, 0, last.bound, captures=True),)).captures
    goes_on(steps, last, restore(captures, last.bound))


@pytest.mark.slow
def test_no_draft_is_accepted_behind_a_stop_id() -> None:
    reply = Reply("torch, qwen3_5", 1)
    reply.stop_ids = (*range(200, 207), reply.expected.tokens[2])
    first = reply.expected.tokens.index(reply.expected.tokens[2])
    steps = make_steps("qwen3_5")
    started(steps, reply)
    assert reply.settle(steps.run(decode=(reply.row(MAX_DEPTH),))) == max(first - 1, 0)
