"""What is substituted in mlx-lm's models is substituted inside our forwards alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from families import build
from pippin.backends.mlx import substitutions
from pippin.backends.mlx.cpu import operations as drop_ins
from pippin.backends.mlx.head import Head
from pippin.backends.mlx.prefill import query_blocks
from serving import make_client

PROMPT = list(range(2, 22))


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What it returns, once it is done."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    (result,) = results
    return result


def stock_reply() -> tuple[list[int], np.ndarray]:
    """Tokens that mlx-lm's own loop draws with its own caches, and the logits of a prompt."""
    model, _ = build("llama")
    tokens = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=12)]
    return tokens, np.array(model(mx.array([PROMPT]), cache=make_prompt_cache(model)))


def test_another_thread_gets_mlx_lms_functions_while_a_forward_of_ours_runs() -> None:
    with substitutions.active():
        assert substitutions._forward_is_plain.get() is not None
        assert in_a_thread(substitutions._forward_is_plain.get) is None
    assert substitutions._forward_is_plain.get() is None


def test_a_forward_inside_a_forward_ends_without_ending_the_outer_one() -> None:
    with substitutions.active(plain=True):
        with substitutions.active():
            assert substitutions._forward_is_plain.get() is False
        assert substitutions._forward_is_plain.get() is True


def test_stock_mlx_lm_generates_in_a_thread_while_our_engine_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole stock reply in the middle of a forward of ours, with none of our functions."""
    client = make_client("llama", cache=False, num_slots=1)
    expected = in_a_thread(stock_reply)
    ours_ran_in: set[threading.Thread] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            ours_ran_in.add(threading.current_thread())
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(query_blocks, "attend", noting(query_blocks.attend))
    monkeypatch.setattr(drop_ins, "operations", noting(drop_ins.operations))
    replies: list[tuple[list[int], np.ndarray]] = []
    select = Head.select

    def select_after_stock(self: Head, hidden: mx.array) -> mx.array:
        if not replies:
            replies.append(in_a_thread(stock_reply))
        return select(self, hidden)

    monkeypatch.setattr(Head, "select", select_after_stock)
    reply = client.ask(PROMPT, max_tokens=4)
    assert len(reply.tokens) == 4
    ((tokens, logits),) = replies
    assert ours_ran_in == {threading.current_thread()}
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_norm_s_weight_gets_its_one_at_load(family: str) -> None:
    """To the bit what mlx-lm's own norm gives."""
    (plain, _), (ours, _) = build(family), build(family)
    for model in (plain, ours):
        model.apply(lambda array: array.astype(mx.bfloat16))
    substitutions.install(ours, cpu=False)
    norms = [part for _, part in ours.named_modules() if type(part).__name__ == "RMSNorm"]
    assert all(hasattr(norm, "_whole_weight") is (family == "gemma3") for norm in norms)
    assert mx.array_equal(plain(mx.array([[1, 2, 3]])), ours(mx.array([[1, 2, 3]]))).item()
