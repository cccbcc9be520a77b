"""Steps with drafts by kernels: tokens of plain operations, on a GPU or interpreted on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import numpy as np
import torch

from builders import AMPLE_BYTES
from pippin.backends.base import DecodeRow, PrefillRow, Proposal, Retire
from pippin.backends.torch import verifies
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.kernels.verify.delta import conv_verify
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.step.decode_inputs import FIELDS, Inputs
from pippin.backends.torch.step.verify.words import Places, VerifySize, span_for
from pippin.backends.torch.verifies import Verifies
from test_contract import Steps, admit, make_tokens, restore
from test_draft_contract import MAX_DEPTH, OWN_DRAFTS, Reply, goes_on, started
from torch_serving import load_torch


def make_steps(name: str) -> Steps:
    return Steps(make_backend(name))


def make_backend(name: str, kernels: bool = True) -> TorchBackend:
    return TorchBackend(
        load_torch(name),
        num_slots=6,
        pool_bytes=AMPLE_BYTES,
        kernels=kernels,
        max_depth=MAX_DEPTH,
        debug=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "qwen3_next_mtp"])
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
@pytest.mark.parametrize("most_tokens", [256, 4])
def test_rows_that_need_the_sampler_and_those_beyond_a_graph_run_by_kernels(
    most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, log probabilities and a mask beside drafts: no row takes plain operations."""
    monkeypatch.setattr(verifies, "MOST_TOKENS", most_tokens)
    monkeypatch.setattr(Verifies, "_launch", None)
    steps = make_steps("qwen3")
    sizes: list[VerifySize] = []
    captured = steps.backend.runner._verifies.steps
    run = captured.run
    captured.run = lambda size, *rest: sizes.append(size) or run(size, *rest)
    name = "torch, qwen3"
    drafted = Reply(name, 1, 5, params={"temperature": 1.0, "seed": 7})
    scored = Reply(name, 2, 6, 2, {"logprobs": 2, "presence_penalty": 0.5})
    constrained = Reply(name, 3, 7, 3)
    replies = (drafted, scored, constrained)
    started(steps, *replies)
    masks = np.full((1, -(-steps.backend.spec.vocab_size // 32)), -1, dtype=np.int32)
    for depth, wrong in ((2, [2]), (0, [])):
        rows = (drafted.row(depth, wrong), scored.row(), constrained.row(masked=True))
        pending = steps.launch(decode=rows)
        pending.sample(masks)
        result = pending.wait()
        assert len(result.logprobs[2]) == 1
        for reply in replies:
            reply.settle(result)
    for reply in replies:
        reply.check()
    together, parted = [(4, 2), (4, 0)], [(1, 2), (2, 0), (4, 0)]
    assert [size[:2] for size in sizes] == (together if most_tokens == 256 else parted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_dense", "lfm2", "bamba"])
def test_models_without_kernels_for_drafts_keep_those_of_other_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts take plain operations, and the next one without finds what they left."""
    steps = make_steps(name)
    backend = steps.backend
    assert [fallback.operation for fallback in backend.fallbacks] == [
        "plain operations are used for steps with drafts"
    ]
    plain = make_backend(name, kernels=False)
    tokens = {}
    for each in (plain, backend):
        steps, prompt = Steps(each), make_tokens(20)
        if each is backend:  # neither prompts nor decode steps
            monkeypatch.setattr(PlainForward, "chunks", None)
            monkeypatch.setattr(PlainForward, "tokens", None)
        row = PrefillRow(1, 0, prompt, samples=True)
        found = [*steps.run(admit=(admit(1, prompt),), prefill=(row,)).tokens[1]]
        for depth in (0, 2, 0, 0, 0):
            proposal = Proposal(20 + len(found), np.array([3, 4], dtype=np.int32))
            one = DecodeRow(1, 19 + len(found), depth=depth, proposal=proposal if depth else None)
            found += steps.run(decode=(one,)).tokens[1]
        tokens[each is backend] = found
    assert tokens[True] == tokens[False]


@pytest.mark.slow
def test_no_draft_is_accepted_behind_a_stop_id() -> None:
    reply = Reply("torch, qwen3_5", 1)
    reply.stop_ids = (*range(200, 207), reply.expected.tokens[2])
    first = reply.expected.tokens.index(reply.expected.tokens[2])
    steps = make_steps("qwen3_5")
    started(steps, reply)
    assert reply.settle(steps.run(decode=(reply.row(MAX_DEPTH),))) == max(first - 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft"), [("qwen3_5_mtp", None), ("qwen3", "qwen3")], ids=["MTP", "draft model"]
)
def test_a_drafter_drafts_by_kernels_what_it_drafts_by_plain_operations(
    name: str, draft: str | None
) -> None:
    """Rows that are greedy and sampled, one of them alone at last; what is left is verified."""
    loaded = load_torch(name, mtp=draft is None, draft=draft)
    found = []
    for kernels in (False, True):
        options = {"num_slots": 6, "pool_bytes": AMPLE_BYTES, "max_depth": 2, "debug": True}
        backend = TorchBackend(loaded, kernels=kernels, **options)
        steps, ends = Steps(backend), {}
        for slot, params in ((1, {}), (2, {"temperature": 1.0, "seed": 7})):
            prompt = make_tokens(6 + slot, slot)
            row = PrefillRow(slot, 0, prompt, samples=True, num_drafts=2)
            result = steps.run(admit=(admit(slot, prompt, **params),), prefill=(row,))
            found.append((kernels, slot, result.tokens[slot], _drafts(backend, slot)))
            ends[slot] = len(prompt)
        for slots in ((1, 2), (1, 2), (2,)):
            rows = [DecodeRow(slot, ends[slot], depth=2, num_drafts=2) for slot in slots]
            result = steps.run(decode=tuple(rows))
            for slot in slots:
                ends[slot] += len(result.tokens[slot])
                found.append((kernels, slot, result.tokens[slot], _drafts(backend, slot)))
    half = len(found) // 2
    assert [line[1:] for line in found[:half]] == [line[1:] for line in found[half:]]


def _drafts(backend: TorchBackend, slot: int) -> list[int]:
    drafts: list[int] = backend._future_map.drafts[slot].tolist()
    return drafts


def test_a_convolution_reads_nothing_behind_the_last_new_token() -> None:
    """A row of one token that has room for kept drafts: what follows may be no memory of ours."""
    layers = load_torch("qwen3_5").decoder.layers
    mixer = next(layer.mixer for layer in layers if isinstance(layer.mixer, DeltaLayer))
    num_taps, channels = mixer.taps.shape
    width = channels + 2 * mixer.shape.num_v_heads
    beyond = torch.full((8, mixer.project.weight.shape[0]), -1e30, device=mixer.taps.device)
    beyond[0] = torch.linspace(-1, 1, beyond.shape[1])
    conv, kept = beyond.new_zeros(2, num_taps - 1, channels), beyond.new_zeros(2, 4, width)
    size = VerifySize(num_rows=1, depth=0, span=span_for(MAX_DEPTH))
    words = torch.zeros(size.num_fields, 1, dtype=torch.int32, device=beyond.device)
    none = words[0]
    places = Places(size, words, Inputs(words[: len(FIELDS)]), none, none, none, counts=none)
    with np.errstate(over="raise"):  # Triton's interpreter is numpy
        mixed, _ = conv_verify(beyond[:1], mixer, conv, kept, places)
    newest = beyond[0, :channels] * mixer.taps[-1]
    torch.testing.assert_close(mixed[0], torch.nn.functional.silu(newest), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_steps_may_leave_more_drafts_than_their_rows_asked_for() -> None:
    """There is one graph for each depth, which leaves as many."""
    backend = TorchBackend(
        load_torch("qwen3", draft="qwen3"),
        num_slots=1,
        pool_bytes=AMPLE_BYTES,
        kernels=True,
        max_depth=2,
        debug=True,
    )
    steps, reply = Steps(backend), Reply(f"torch, {OWN_DRAFTS}", 1, 5)
    reply.settle(steps.run(**reply.start()))
    for num_drafts, accepted in ((1, 0), (2, 1), (0, 2), (0, 0), (2, 0), (1, 2), (0, 1)):
        assert reply.settle(steps.run(decode=(reply.own_row(num_drafts),))) == accepted
    reply.check()
