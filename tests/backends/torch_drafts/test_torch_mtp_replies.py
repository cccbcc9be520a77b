"""Replies with drafts of the MTP head through scheduler and prefix cache: those without drafts."""

from __future__ import annotations

from itertools import count

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from test_speculated_replies import MAX_DEPTH, prompts_of, replies_of

from pippin.scheduler.speculation import DeviceDrafter, Speculation
from serving import TORCH, make_client


def test_replies_are_those_without_drafts_cold_and_warm() -> None:
    name = f"{TORCH}qwen3_5_mtp"
    prompts, depths = prompts_of(name)[:3], count()
    expected = replies_of(make_client(name), prompts)
    speculation = Speculation(
        None,
        MAX_DEPTH,
        lambda _: next(depths) % (MAX_DEPTH + 1),
        device=DeviceDrafter("mtp", MAX_DEPTH),
    )
    client = make_client(name, speculation=speculation)
    assert replies_of(client, prompts) == expected
    assert replies_of(client, prompts) == expected  # restored from what was captured with drafts
    assert client.loop.scheduler.metrics.drafted_tokens > 0
