"""Every family served by Pippin against plain mlx-lm: what it says alone and in a crowd is right.

The reference is a second, untouched instance of the model with mlx-lm's own caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from builders import Client, Reply
from families import FAMILIES, VOCAB, build
from near_ties import TOLERANCE
from pippin.backends.mlx.attention.head_ropes import HeadNorms, head_norms
from pippin.backends.mlx.attention.packed_rows import (
    AttendPacked,
    AttentionPaths,
    PackedCall,
    attend_joined,
)
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.gpu import added_norms
from pippin.backends.mlx.gpu.added_norms import use_pending_sums
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.rows import mains, memory
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.shapes import Ladder
from pippin.backends.mlx.trial_run import adds_later, deferred_norms
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from reference import assert_right, score
from serving import make_prompt, served

pytestmark = pytest.mark.slow

CHUNK = 64


@dataclass(frozen=True)
class Case:
    prompt_len: int
    max_tokens: int
    joins_at: int = 0  # step of the loop before which it is submitted
    logprobs: int | None = None


SOLO = tuple(Case(n, 10) for n in (1, 63, 64, 65, 2 * CHUNK + 1))
# Sixteen of all lengths. The long replies cross a flush of the tail; most others are gone by
# then, so the rows are narrowed there, and those that join late widen them again.
UNEVEN = (Case(5, 6, logprobs=3), Case(70, 4), Case(33, 5, 2))
CROWD = (
    Case(1, 24, logprobs=5),
    Case(63, 12),
    Case(64, 84, logprobs=5),
    Case(65, 20),
    Case(2 * CHUNK + 1, 16),
    Case(2, 67, 1),
    Case(3, 10, 2),
    Case(31, 1, 2),
    Case(32, 13, 3),
    Case(33, 9, 5),
    Case(100, 25, 5, logprobs=5),
    Case(127, 2, 8),
    Case(CHUNK * 2, 5, 13),
    Case(CHUNK * 3 + 1, 11, 20),
    Case(17, 12, 72, logprobs=5),
    Case(70, 8, 73),
)
# The same in a quarter of the steps, for tails of a quarter of the length.
SHORT_TAIL = memory.TAIL // 4
SHORT_CROWD = tuple(
    replace(case, max_tokens=-(-case.max_tokens // 4), joins_at=case.joins_at // 4)
    for case in CROWD
)


def attend_as_a_kernel(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    """A kernel reads mains and tails as they lie: columns one after the other, head after head."""
    arrays = (*(side for pair in call.mains for side in pair), *call.tail)
    mx.eval(arrays)
    assert all(memoryview(array).c_contiguous for array in arrays)
    return attend_joined(call)


@cache
def left_norms(family: str) -> HeadNorms | None:
    """That are left to attention, with rotations; None: all are the model's."""
    loaded = served(family)
    norms = head_norms(loaded.model)
    return deferred_norms(loaded.layout, loaded.forward, attend_joined, norms)


@cache
def sums_are_left(family: str) -> bool:
    """To the norms that follow."""
    loaded = served(family)
    use_pending_sums(loaded.model)
    return adds_later(loaded.layout, loaded.forward, AttentionPaths(attend_joined))


@pytest.fixture(autouse=True)
def _plain_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain operations for that kernel too."""

    def plain(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        return x + y, mx.fast.rms_norm(x + y, weight, eps)

    monkeypatch.setattr(added_norms, "add_and_norm", plain)


def make_loop(
    family: str,
    num_slots: int = 16,
    *,
    like_a_gpu: bool = False,
    attention: AttentionPaths | None = None,
    model: LoadedModel | None = None,
) -> Loop:
    """`like_a_gpu`: rows are packed and lengths padded, with plain operations for the kernel, and
    prompts are held back.

    Rows of a model without attention are never packed.
    """
    loaded = model or served(family)
    if like_a_gpu and loaded.layout.packs_rows:
        attention = attention or AttentionPaths(
            attend_as_a_kernel, norms=left_norms(family), adds_later=sums_are_left(family)
        )
    if attention is not None:
        loaded = replace(loaded, attention=attention)
    backend = MLXBackend(loaded, num_slots=num_slots, debug=True)
    backend.holds_prompts_back = like_a_gpu
    if like_a_gpu:  # not compiled: the stand-in looks at arrays
        backend._decodes.forward = DecodeForward(loaded.layout, loaded.forward)
    if like_a_gpu and loaded.layout.pads:
        backend._prompts.shapes = Ladder()
    limits = Limits(max_running=num_slots, prefill_tokens=CHUNK)
    return Loop(Scheduler(backend, limits), backend)


def serve(
    family: str,
    cases: Sequence[Case],
    *,
    like_a_gpu: bool = False,
    attention: AttentionPaths | None = None,
    model: LoadedModel | None = None,
) -> dict[Case, Reply]:
    client = Client(make_loop(family, like_a_gpu=like_a_gpu, attention=attention, model=model))
    replies: dict[Case, Reply] = {}
    waiting = sorted(cases, key=lambda case: case.joins_at)
    step = 0
    while waiting or not client.loop.idle:
        while waiting and waiting[0].joins_at <= step:
            case = waiting.pop(0)
            replies[case] = client.submit(
                make_prompt(family, case.prompt_len, seed=0),
                max_tokens=case.max_tokens,
                ignore_eos=True,
                logprobs=case.logprobs,
            )
        client.step()
        step += 1
    client.loop.close()
    return replies


@cache
def served_crowd(family: str) -> dict[Case, Reply]:
    return serve(family, CROWD)


def check(family: str, replies: Mapping[Case, Reply]) -> None:
    for case, reply in replies.items():
        assert reply.error is None, reply.error
        assert (reply.finish, len(reply.tokens)) == ("length", case.max_tokens)
        assert len(reply.logprobs) == (0 if case.logprobs is None else case.max_tokens)
        assert_right(family, reply.prompt, reply.tokens, reply.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_says_is_lively(family: str) -> None:
    """Else what it says would prove little."""
    replies = [reply.tokens for reply in served_crowd(family).values()]
    assert sum(len(set(tokens)) for tokens in replies) > sum(map(len, replies)) / 4
    assert len({token for tokens in replies for token in tokens}) > VOCAB / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_it_says_what_mlx_lm_says(family: str) -> None:
    check(family, {case: serve(family, [case])[case] for case in SOLO})


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_ragged_crowd_everyone_says_what_mlx_lm_says(family: str) -> None:
    check(family, served_crowd(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_as_on_a_gpu_everyone_says_what_mlx_lm_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TAIL", SHORT_TAIL)
    check(family, serve(family, SHORT_CROWD, like_a_gpu=True))


@pytest.mark.parametrize(
    ("family", "num_norms"),
    [
        *(("llama", 0), ("gpt_oss", 0), ("qwen3", 4), ("gemma3", 6), ("qwen3_5", 2)),
        ("gemma4", 0),  # values are normed too, and never rotated
    ],
)
def test_norms_and_rotations_are_left_to_attention(family: str, num_norms: int) -> None:
    norms = left_norms(family)
    assert norms is not None
    assert len(norms) == num_norms


@pytest.mark.parametrize(
    ("family", "left"),
    [
        *(("llama", True), ("qwen3_5", True), ("gpt_oss", True), ("deepseek_v3", True)),
        ("gemma3", False),  # its sum is a function, which is substituted on GPUs
    ],
)
def test_sums_are_left_to_norms(family: str, left: bool) -> None:
    assert sums_are_left(family) is left


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_nothing_is_left_to_attention_that_does_not_do_it(family: str) -> None:
    def careless(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        return attend_joined(replace(call, ropes=None))

    loaded = served(family)
    norms = head_norms(loaded.model)
    assert deferred_norms(loaded.layout, loaded.forward, careless, norms) is None


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_rotations_beside_latents_are_left_to_attention(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a model that rotates nothing."""
    rotated: list[bool] = []

    def noted(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        rotated.append(call.ropes is not None)
        return attend_joined(call)

    paths = AttentionPaths(noted, norms=left_norms(family))
    serve(family, [Case(5, 2)], like_a_gpu=True, attention=paths)
    assert rotated
    assert all(each is (family == "deepseek_v3") for each in rotated)


@pytest.mark.parametrize("kernel", [None, attend_joined], ids=["plain", "packed"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_however_layers_attend_everyone_says_what_mlx_lm_says(
    family: str, kernel: AttendPacked | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain layers, windows, sinks; one row that grows alone, then a crowd."""
    monkeypatch.setattr(memory, "TAIL", SHORT_TAIL)
    paths = AttentionPaths(kernel)
    for cases in ([Case(65, 20)], SHORT_CROWD):
        check(family, serve(family, cases, like_a_gpu=True, attention=paths))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_safe_everyone_says_what_mlx_lm_says(family: str) -> None:
    """In plain operations alone, a batch of uneven rows; as without, within rounding."""
    loaded = prepare(*build(family), safe=True)
    with loaded.operating():
        check(family, serve(family, UNEVEN, model=loaded))


SHAPES = ("qwen3_5", "gpt_oss", "falcon_h1", "deepseek_v3")  # one for each way to keep and attend


@pytest.mark.parametrize("family", SHAPES)
def test_many_flushes_and_merges_change_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short tails and few segments: rows of all lengths are moved every few steps."""
    monkeypatch.setattr(memory, "TAIL", 8)
    monkeypatch.setattr(mains, "MOST_IN_TABLE", 2)
    check(family, serve(family, CROWD[:-2]))  # all but those that wait for the long ones


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_are_those_of_one_plain_forward(family: str) -> None:
    """Teacher-forced: every position of a prompt computed in chunks, not only sampled ones."""
    tokens = make_prompt(family, 2 * CHUNK + 1, seed=0)
    client = Client(make_loop(family, num_slots=1))
    reply = client.ask(tokens, max_tokens=1, prompt_logprobs=0)
    found = [scored.logprob for scored in reply.prompt_logprobs]
    expected = score(family, tuple(tokens))[range(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
