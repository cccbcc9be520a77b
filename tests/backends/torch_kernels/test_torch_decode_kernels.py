"""The kernels of a decode step, of draws and of steps with drafts against plain operations.

On a GPU, or interpreted on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("interpreted")

import torch

from builders import AMPLE_BYTES
from chunk_words import MadeUpStep
from pippin.backends.base import DecodeRow, PrefillRow, Proposal, Retire
from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits
from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.device import find_device
from pippin.backends.torch.forwards import Forwards
from pippin.backends.torch.kernels import top_p
from pippin.backends.torch.kernels.attention import step as attention_step
from pippin.backends.torch.kernels.checks import few_layers, kernel_errors
from pippin.backends.torch.kernels.draw import Noise, choose, draw
from pippin.backends.torch.kernels.forward import KernelForward
from pippin.backends.torch.kernels.recurrent.delta import StateTile, conv_verify, delta_step
from pippin.backends.torch.models.mixers import DeltaLayer
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step import filters, words
from pippin.backends.torch.step.decode_inputs import (
    FIELDS,
    NO_ROWS,
    Choice,
    Inputs,
    SamplingColumns,
    pack_inputs,
)
from pippin.backends.torch.step.sampler import TorchSampler
from pippin.backends.torch.step.words import Places, StepInputs, StepSize, span_for
from pippin.types import SamplingParams
from sampling_rule import KINDS, PARAMS, ROWS, logits
from test_contract import Steps, admit, make_tokens, restore
from test_draft_contract import MAX_DEPTH, OWN_DRAFTS, Reply, goes_on, started
from torch_serving import load_torch

DEVICE = find_device()


LENGTHS = (0, 1, 63, 64, 130)


def made_up(name: str, lengths: tuple[int, ...], max_len: int = 256) -> MadeUpStep:
    return MadeUpStep(name, beside=dict(enumerate(lengths, start=1)), max_len=max_len)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths", "width"),
    [
        ("qwen3_5", LENGTHS, 8),
        ("qwen3_5", (70,), 1),
        ("qwen3_5", (0,), 1),
        ("qwen3_next", (1, 63), 3),
        ("qwen3_next", (63,), 1),
        ("qwen2", (5, 17), 2),
        ("qwen2", (17,), 1),
        ("llama", (0, 33), 2),
        ("qwen3_moe", (5, 17, 3), 3),
        ("qwen3_5_moe", (17,), 1),
        ("llama_biases", (5, 17), 2),
        ("llama_biases", (17,), 1),
        ("qwen3_next_biases", (1, 63), 2),
        ("qwen3_next_biases", (63,), 1),
        ("nemotron_h", (1, 0, 63), 3),
        ("nemotron_h", (17,), 1),
        ("nemotron_h_moe", (5, 17), 2),
        ("granitemoehybrid", (5, 17), 2),
        ("lfm2_biases", (0, 17), 2),
        ("glm4_moe_lite", LENGTHS, 8),
        ("glm4_moe_lite", (17,), 1),
        # Windows, sinks, softcaps, scales, norms of every kind, experts of every kind.
        ("mistral", (40,), 1),
        ("gpt_oss", (40, 5), 2),
        ("gpt_oss", (40,), 1),
        ("gemma2", (40, 5), 2),
        ("gemma3", (40,), 1),
        ("glm4_moe", (5, 17), 2),
        ("olmo3", (40,), 1),
        ("granite", (17,), 1),
        ("smollm3", (17,), 1),
        ("cohere", (3, 17), 2),
    ],
)
def test_a_step_of_kernels_is_a_step_of_plain_operations(
    name: str, lengths: tuple[int, ...], width: int
) -> None:
    step = made_up(name, lengths)
    with torch.inference_mode():
        expected, found = step.plain(), step.by(KernelForward, StepSize(width))
    # What was written, too: every held cell and state, and nothing else but the waste.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_state_is_gone_through_in_parts_or_at_once() -> None:
    step = made_up("qwen3_5", (70, 5))
    assert step.rows is not None
    layer = next(x for x in step.decoder.layers if isinstance(x.mixer, DeltaLayer))
    mixer, pool = layer.mixer, step.pools.recurrent[layer.number]
    num_columns = mixer.shape.v_dim
    projected = torch.randn(2, mixer.project.weight.shape[0], device=DEVICE)
    arrays = step.rows.arrays
    states = [step.pools.index(s).int() for s in (arrays.states_in, arrays.states_out)]
    found = []
    for columns in (num_columns, num_columns // 4):
        step.pools.memory.copy_(step.before)
        y = delta_step(projected, mixer, pool, *states, StateTile(columns, 4, 2))
        found.append((y, pool[arrays.states_out].clone()))
    for at_once, in_parts in zip(*found, strict=True):
        torch.testing.assert_close(in_parts, at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("many_groups", [1, 512], ids=["copies", "registers"])
@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss", "gemma2"])
def test_a_long_row_is_attended_by_more_programs_than_the_short_ones_beside_it(
    name: str, many_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches of 64 tokens and four programs a row: as rows of 100,000 tokens have with 64."""
    monkeypatch.setattr(attention_step, "splits_for", lambda num_groups: (4, 64))
    monkeypatch.setattr(attention_step, "MANY_GROUPS", many_groups)
    step = made_up(name, (0, 600, 63, 64, 255, 256, 257, 130), max_len=1024)
    with torch.inference_mode():
        expected, found = step.plain(), step.by(KernelForward, StepSize(8))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("num_groups", [1, 2, 16, 33, 64, 128, 512, 4096, 10_000])
def test_programs_are_enough_for_long_rows_and_not_too_many_for_short_ones(num_groups: int) -> None:
    splits, least = attention_step.splits_for(num_groups)
    assert splits & (splits - 1) == 0
    assert splits == 1 or splits * num_groups <= attention_step.MOST_PROGRAMS
    assert splits * max(num_groups, 64) * 2 > min(attention_step.MOST_PROGRAMS, num_groups)
    for dim in (64, 128, 256, 512):
        tile = attention_step.tile_for(dim, 2, num_groups)
        assert least % tile.block == 0
        assert tile.copies * tile.block * dim * 2 * 2 <= 227 << 10  # a processor's shared memory
    short = -(-512 // max(least, -(-512 // splits)))  # stretches of 512 tokens
    assert short <= max(attention_step.PROGRAMS // num_groups, 8)


def states_of(*params: SamplingParams) -> list[SlotSampling]:
    return [SlotSampling(p, stream=1000 + 7 * n) for n, p in enumerate(params)]


def test_draws_are_those_of_the_specification() -> None:
    """Greedy and drawn rows side by side; the noise to the bit, but for logarithms."""
    vocab = 5001
    states = states_of(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32))
    slots, generated = np.arange(1, 4), np.array([0, 3, 9])
    packed = pack_inputs(3, NO_ROWS._replace(slots=slots), waste_cell=0)
    sampling = SamplingColumns(3, vocab)
    for slot, state in enumerate(states, start=1):
        sampling.admit(slot, state)
    assert sampling.choice(slots, generated) is Choice.DRAWN
    sampling.fill(packed, slots, generated)
    inputs = Inputs(torch.from_numpy(packed).to(DEVICE))
    future = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    draw(
        logits.to(DEVICE),
        inputs.slot,
        future,
        out,
        Noise(
            inputs.inverse_temperature,
            thresholds=torch.full((3,), -torch.inf, device=DEVICE),
            noisy=inputs.noisy,
            keys=inputs.keys,
        ),
    )
    streams = np.array([state.stream for state in states], dtype=np.uint64)
    noise = gumbel(random_bits(noise_keys(streams, [0, 3, 9]), vocab))
    scaled = logits.numpy() * np.array([[1.0], [1.0], [2.0]], dtype=np.float32)
    noise[0] = 0.0
    expected = (scaled + noise).argmax(axis=1)
    assert out[0].tolist() == expected.tolist() == future[1:].tolist()
    assert out[1].tolist() == [0, 0, 0]


def test_thresholds_leave_out_and_what_is_no_number_is_told() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [torch.nan, 1.0, 2.0, 3.0]], device=DEVICE)
    inputs = torch.ones(2, dtype=torch.float32, device=DEVICE)
    out = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    draw(
        logits,
        slots,
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        out,
        Noise(
            inverse_temperature=inputs,
            thresholds=torch.tensor([3.0, -torch.inf], device=DEVICE),
            noisy=slots,
            keys=torch.zeros(2, 2, dtype=torch.int32, device=DEVICE),
        ),
    )
    assert out[0, 0] == 1
    assert out[1].tolist() == [0, 1]
    assert 0 <= int(out[0, 1]) < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "lfm2", "glm4_moe_lite"])
def test_steps_and_chunks_agree_at_load(name: str) -> None:
    with torch.inference_mode():
        errors = dict(kernel_errors(load_torch(name).decoder, drafts=False))
    for kind in few_layers(load_torch(name).decoder):
        assert f"chunks of prompts with {kind}" in errors
    assert max(error if error is not None else 1.0 for error in errors.values()) < 1e-3


TOP_P = [params for params in PARAMS if not params.top_k]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", TOP_P, ids=str)
def test_digits_keep_what_a_sort_keeps(
    params: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks, the last one not full."""
    monkeypatch.setattr(top_p, "BLOCK", 512)
    x = torch.from_numpy(logits(kind)[:2]).to(DEVICE)
    columns = [torch.full((2,), value, device=DEVICE) for value in (params.top_p, params.min_p)]
    found, expected = (form.least_in_top_p(x, *columns) for form in (top_p, filters))
    assert torch.equal(found, expected)


def test_shares_that_fall_between_two_tokens() -> None:
    """Masses of 1, 1/2, 1/4 ...: sums of units are exact, and so is where they end."""
    masses = 0.5 ** torch.arange(20.0)
    x = masses.log().to(DEVICE)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    total = float(masses.sum())
    for kept in (1, 2, 5, 12):
        share = float(masses[:kept].sum()) / total
        for value, number in ((share - 1e-3, kept), (share + 1e-3, kept + 1)):
            least = top_p.least_in_top_p(
                x[None], torch.tensor([value], device=DEVICE), torch.zeros(1, device=DEVICE)
            )
            if kept < 12:
                assert int((x >= least).sum()) == number
            assert torch.equal(
                least,
                filters.least_in_top_p(
                    x[None], torch.tensor([value], device=DEVICE), torch.zeros(1, device=DEVICE)
                ),
            )


def test_logits_are_scaled_on_the_way_and_rows_without_top_p_are_left_alone() -> None:
    x = torch.from_numpy(logits("spread")).to(DEVICE)
    inverse = torch.linspace(0.5, 3.0, ROWS, device=DEVICE)
    share = torch.tensor([0.9, 1.0, 0.5, torch.inf, 0.99, 0.1], device=DEVICE)
    none = torch.zeros(ROWS, device=DEVICE)
    found = top_p.least_in_top_p(x, share, none, inverse)
    assert torch.equal(found, top_p.least_in_top_p(x * inverse[:, None], share, none))
    assert torch.equal(found == -torch.inf, share >= 1.0)


def test_a_captured_step_draws_what_the_sampler_draws() -> None:
    """Whichever of the two a row meets, its company decides: tokens are the same."""
    x = torch.from_numpy(logits("peaked")[:4]).to(DEVICE)
    vocab = x.shape[1]
    params = [
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=1.3, top_p=0.6, min_p=0.02),
        SamplingParams(temperature=0.8, top_k=10, top_p=0.9),
        SamplingParams(temperature=0.0),
    ]
    slots = np.arange(1, 5)
    columns = SamplingColumns(4, vocab)
    sampler = TorchSampler(
        vocab, 4, lambda values: torch.from_numpy(values).to(DEVICE), top_p.least_in_top_p
    )
    for slot, each in enumerate(params, start=1):
        state = SlotSampling(each, stream=77 * slot)
        columns.admit(slot, state)
        sampler._slots[slot] = state
    for index in range(3):
        generated = np.full(4, index)
        packed = pack_inputs(4, NO_ROWS._replace(slots=slots), waste_cell=0)
        columns.fill(packed, slots, generated)
        assert columns.choice(slots, generated) is Choice.TOP_P
        future = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        inputs = Inputs(torch.from_numpy(packed).to(DEVICE))
        drawn = choose(x, inputs, future, Choice.TOP_P)
        expected = sampler.sample(x, [SampleRow(int(slot), index) for slot in slots]).tokens
        assert drawn[0].tolist() == expected.tolist()


def test_any_number_of_rows_takes_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel for a tensor that begins elsewhere than at 16 bytes."""
    seen: dict[int, set[tuple[str, tuple[bool, ...]]]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def note(*args: Any, **_: Any) -> None:
                tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
                aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
                seen.setdefault(grid[0], set()).add((self._name, aligned))

            return note

    for name in ("_largest", "_sum_above", "_pick", "_least_kept"):
        monkeypatch.setattr(top_p, name, Noted(name))
    for num_rows in range(1, 10):
        columns = [torch.full((num_rows,), 0.5, device=DEVICE) for _ in range(2)]
        top_p.least_in_top_p(torch.zeros(num_rows, 512, device=DEVICE), *columns)
    assert len(seen) == 9
    assert all(kernels == seen[1] for kernels in seen.values())


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
    monkeypatch.setattr(words, "MOST_VERIFIED", most_tokens)
    monkeypatch.setattr(Forwards, "_launch_rows", None)
    steps = make_steps("qwen3")
    sizes: list[StepSize] = []
    captured = steps.backend.runner.forwards.steps
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
            monkeypatch.setattr(Forwards, "_launch_chunks", None)
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
    size = StepSize(num_rows=1, depth=0, span=span_for(MAX_DEPTH))
    layout = PoolLayout(load_torch("qwen3_5").decoder.shape, torch.float32)
    none = torch.zeros(size.num_fields, dtype=torch.int32, device=beyond.device)
    step = StepInputs.of(none, size, layout)
    places = Places(step, Inputs(step.rows[: len(FIELDS)]), *[none[:1]] * 3, counts=none[:1])
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
