"""Chunks of prompts as captured graphs, alone and beside decode rows, through the whole backend.

On a CPU a stand-in runs again what it recorded, in plain operations that read the graphs' words and
nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from builders import AMPLE_BYTES
from cases import cases
from chunk_words import MadeUpStep, PlainWords, capture_chunks, chunk
from pippin.backends.base import (
    Admit,
    Capture,
    DecodeRow,
    PrefillRow,
    Restore,
    Retire,
    StepPlan,
    StepResult,
)
from pippin.backends.sampling.rules import scored_positions
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.graphs.steps import Ran
from pippin.backends.torch.step import words as step_words
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.words import (
    MIXED_ROOMS,
    MIXED_WIDTHS,
    ROOMS,
    StepSize,
    group_by_room,
    mixed_size_for,
    room,
    room_for,
    width_for,
)
from pippin.types import GRID, Component, SamplingParams
from run_again import RunAgain
from serving import TORCH, make_client, make_prompt
from torch_serving import load_torch

SMALL = room(128, 4)


def rows_of(*lengths: int) -> list[PrefillRow]:
    return [PrefillRow(n, 0, np.zeros(length, np.int32)) for n, length in enumerate(lengths, 1)]


def test_the_smallest_room_that_holds_them() -> None:
    assert room_for(1, 1) == room(64, 4)
    assert room_for(64, 5) == room(64, 16)
    assert room_for(65, 4) == room(128, 4)
    assert room_for(2048, 16) == room(2048, 16)
    assert room_for(2049, 1) is None
    assert room_for(64, 17) is None


@cases("size", ROOMS, ids=str)
def test_there_are_blocks_for_rows_of_any_lengths(size: StepSize) -> None:
    """The most come of rows that are one token over a block."""
    rng = np.random.default_rng(size.num_tokens)
    worst = np.ones(size.num_chunks, dtype=np.int64)
    worst[: (size.num_tokens - size.num_chunks) // GRID] += GRID
    for _ in range(50):
        cuts = np.sort(
            rng.choice(np.arange(1, size.num_tokens), size.num_chunks - 1, replace=False)
        )
        lengths = np.diff([0, *cuts, size.num_tokens])
        assert (-(-lengths // GRID)).sum() <= size.num_blocks
    assert (-(-worst // GRID)).sum() <= size.num_blocks


def test_chunks_go_together_as_far_as_a_room_takes_them() -> None:
    chunks = rows_of(1000, 1000, *[10] * 20, 5000, 7)
    groups = group_by_room(chunks)
    lengths = [[len(row.tokens) for row in group] for group in groups]
    assert lengths == [[1000, 1000, *[10] * 4], [10] * 16, [2048], [2048], [904, 7]]
    assert [row.start for group in groups for row in group if row.slot == 23] == [0, 2048, 4096]
    assert group_by_room([]) == []


def test_what_chunks_do_not_fill_reads_zeros_and_writes_waste() -> None:
    made = MadeUpStep("qwen3_5", (chunk(3, 0, 70, 64, 70), chunk(1, 5, 2)))
    assert made.taken is not None
    words = made.words(SMALL)
    assert (words.tokens[2, 72:] == made.layout.waste_cell).all()
    cells = [made.held.held(3, 0, 70), made.held.held(1, 5, 7)]
    assert words.tokens[2, :72].tolist() == np.concatenate(cells).tolist()
    own = SMALL.num_chunks * made.layout.conv_shape[0] + np.arange(72, 128)  # nobody else's inputs
    assert (words.tokens[3:, 72:] == own).all()
    lengths, slabs = words.blocks[3].tolist(), words.blocks[6].tolist()
    assert lengths[:4] == [64, 6, 2, 0]
    assert not any(lengths[3:])
    tap, states = made.taken.taps[0].slab, made.taken.states_out.tolist()
    assert slabs[:4] == [tap, states[0], states[1], 0]
    assert not any(slabs[3:])
    assert words.chunks.tolist() == [[69, 71, 0, 0], [0, 2, 0, 0], [2, 1, 0, 0]]
    assert words.samples[0].tolist() == [0] * 4  # whoever samples is filled in later


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("qwen3_5", (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))),
        ("qwen3_next", (chunk(1, 3, 65, 67),)),
        ("llama", (chunk(2, 0, 20), chunk(1, 7, 9))),
    ],
    ids=["qwen3_5", "qwen3_next", "llama"],
)
def test_words_say_what_chunks_are(name: str, chunks: tuple[PrefillRow, ...]) -> None:
    """The same logits, and the same KV and states for whoever comes next."""
    made = MadeUpStep(name, chunks)
    with torch.inference_mode():
        expected, found = made.plain(), made.by(PlainWords, SMALL)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    "sampler": {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.5},
}


def make_pair(
    name: str = "qwen3_5", *, mixed: bool = False
) -> tuple[TorchBackend, TorchBackend, RunAgain]:
    """One in plain operations, and one whose chunks are captured, or those beside decode rows."""
    plain, captured = (
        TorchBackend(
            load_torch(name), num_slots=6, pool_bytes=AMPLE_BYTES, kernels=False, debug=True
        )
        for _ in range(2)
    )
    recorder = RunAgain()
    steps = capture_chunks(captured, recorder, mixed=mixed)
    run = steps.run

    def counted(size: StepSize, words: np.ndarray, choice: Choice) -> Ran:
        """Replays of steps of both alone."""
        before = recorder.num_replays
        ran = run(size, words, choice)
        recorder.num_replays = before if mixed and not size.num_rows else recorder.num_replays
        return ran

    steps.run = counted  # type: ignore[method-assign]
    return plain, captured, recorder


def said(results: list[StepResult]) -> list[dict[int, tuple[int, ...]]]:
    return [dict(result.tokens) for result in results]


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(3, 90, length).astype(np.int32)


def play(backend: TorchBackend, params: dict[str, Any]) -> list[Any]:
    """Prompts in several chunks, alone and together, ahead of their results; one is restored."""
    prompts = {slot: prompt_of(length) for slot, length in ((1, 150), (2, 5), (3, 64))}
    admits = [
        Admit(slot, SamplingParams(**params), (), prompt, seed=slot)
        for slot, prompt in prompts.items()
    ]
    a, b, c = prompts.values()
    keep: dict[str, Any] = {"captures": True}
    plans: list[dict[str, Any]] = [
        {
            "admit": tuple(admits[:2]),
            "prefill": (
                PrefillRow(1, 0, a[:130], checkpoints=(64, 128, 130), **keep),
                PrefillRow(2, 0, b, samples=True),
            ),
        },
        {"prefill": (PrefillRow(1, 130, a[130:131]),), "decode": (DecodeRow(2, 5),)},
        {
            "admit": (admits[2],),
            "prefill": (
                PrefillRow(3, 0, c, samples=True, checkpoints=(64,), **keep),
                PrefillRow(1, 131, a[131:], samples=True, checkpoints=(150,), **keep),
            ),
        },
        {"decode": (DecodeRow(1, 150), DecodeRow(3, 64), DecodeRow(2, 6))},
    ]
    pending = [backend.launch(StepPlan(n, **plan)) for n, plan in enumerate(plans)]
    results = [step.wait() for step in pending]
    first = results[0].captures[0]
    restore = Restore(
        128,
        {
            Component.ATTENTION: (first.kv[Component.ATTENTION].split(128)[0],),
            Component.STATE: (first.states[128],),
        },
    )
    prompt = np.concatenate([a[:128], prompt_of(20, seed=1)])
    again = PrefillRow(4, 128, prompt[128:], samples=True, restore=restore)
    admit = Admit(4, SamplingParams(**params), (), prompt, seed=4)
    results.append(backend.launch(StepPlan(8, admit=(admit,), prefill=(again,))).wait())
    ends = tuple(Retire(slot) for slot in (1, 2, 3, 4))
    results.append(backend.launch(StepPlan(9, decode=(DecodeRow(4, 148),))).wait())
    results.append(backend.launch(StepPlan(10, retire=ends)).wait())
    return results


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_captured_chunks_say_what_chunks_say(params: dict[str, Any]) -> None:
    plain, captured, recorder = make_pair()
    expected, found = play(plain, params), play(captured, params)
    assert said(found) == said(expected)
    assert recorder.num_replays == 4
    for mine, theirs in zip(found, expected, strict=True):
        assert not mine.overflowed
        assert mine.forwards == theirs.forwards
        for a, b in zip(mine.captures, theirs.captures, strict=True):
            assert (a.slot, a.start, a.end) == (b.slot, b.start, b.end)
            assert (a.hidden is None) == (b.hidden is None)
            for position in a.states:
                one, two = (
                    torch.cat([view[each.states[position].slab].flatten() for view in views])
                    for each, views in (
                        (a, (*captured.runner.pools.recurrent, *captured.runner.pools.conv)),
                        (b, (*plain.runner.pools.recurrent, *plain.runner.pools.conv)),
                    )
                )
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
            if a.hidden is not None:
                torch.testing.assert_close(a.hidden.hidden, b.hidden.hidden, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("choice", [Choice.GREEDY, Choice.DRAWN])
def test_rows_that_do_not_sample_write_no_token_and_choose_no_graph(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured, _ = make_pair()
    params = PARAMS["greedy" if choice is Choice.GREEDY else "drawn"]
    chosen: list[Choice] = []
    steps = captured.runner.forwards.steps
    assert steps is not None
    run = steps.run

    def noted(size: StepSize, words: np.ndarray, choice: Choice) -> Ran:
        chosen.append(choice)
        return run(size, words, choice)

    monkeypatch.setattr(steps, "run", noted)
    prompts = {slot: prompt_of(50 + slot) for slot in (1, 2)}
    admits = tuple(Admit(s, SamplingParams(**params), (), p, seed=s) for s, p in prompts.items())
    chunks = (PrefillRow(1, 0, prompts[1][:40]), PrefillRow(2, 0, prompts[2], samples=True))
    with torch.inference_mode():
        captured._future_map.tokens[1:] = -7
    result = captured.launch(StepPlan(1, admit=admits, prefill=chunks)).wait()
    assert captured._future_map.tokens[1:3].tolist() == [-7, *result.tokens[2]]
    assert list(result.tokens) == [2]
    assert chosen == [choice]


def test_no_number_is_told_of_its_own_row_alone() -> None:
    _, captured, _ = make_pair()
    captured._decoder.embed[7].fill_(torch.nan)
    try:
        prompts = {1: np.full(5, 7, dtype=np.int32), 2: prompt_of(70) % 5 + 10}
        admits = tuple(
            Admit(s, SamplingParams(temperature=0.0), (), p, 1) for s, p in prompts.items()
        )
        chunks = tuple(PrefillRow(s, 0, p, samples=True) for s, p in prompts.items())
        result = captured.launch(StepPlan(1, admit=admits, prefill=chunks)).wait()
    finally:
        load_torch.cache_clear()
    assert result.overflowed == {1}


def test_long_and_scored_prompts_run_in_rooms_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product has a size that a graph has not: the first of a size takes 50 ms."""
    monkeypatch.setattr(step_words, "MOST_TOKENS", GRID)
    plain, captured, recorder = make_pair("llama")
    monkeypatch.setattr(captured.runner.forwards, "_launch_chunks", None)
    long = prompt_of(100)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, prompt_logprobs=1)]
    prompts = [long[:100], long[:90]]
    scored_at_a_time: list[torch.Tensor] = []
    head = captured.runner.forwards._scores._head
    seen = lambda rows: (scored_at_a_time.append(rows), head(rows))[1]  # noqa: E731
    monkeypatch.setattr(captured.runner.forwards._scores, "_head", seen)
    monkeypatch.setattr(captured.runner.forwards._scores, "_pads", True)
    told = []
    for backend in (plain, captured):
        admits = tuple(
            Admit(slot, p, (), prompt, seed=1)
            for slot, (p, prompt) in enumerate(zip(params, prompts, strict=True), start=1)
        )
        chunks = tuple(PrefillRow(a.slot, 0, a.prompt, samples=True) for a in admits)
        told.append(backend.launch(StepPlan(1, admit=admits, prefill=chunks)).wait())
    assert told[0].tokens == told[1].tokens
    scores = [[line.logprob for line in each.prompt_logprobs[2]] for each in told]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)
    assert recorder.num_replays == 3  # 64 | 36 + 64 | 26
    widths = {len(rows) for rows in scored_at_a_time}
    assert widths == {scored_positions(captured.spec.vocab_size)}


@pytest.mark.parametrize("stage", ["first run", "begin", "run", "end"])
def test_where_nothing_can_be_captured_it_says_so_once_and_goes_on(
    stage: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, _ = make_pair()
    graphs = capture_chunks(other, RunAgain(stage))
    if stage == "first run":  # a kernel that does not compile, say

        def fail(*_: Any) -> torch.Tensor:
            raise RuntimeError("no capture: first run")

        monkeypatch.setattr(graphs._forward, "run", fail)
    with caplog.at_level(logging.WARNING, logger="pippin"):
        found = play(other, PARAMS["drawn"])
    expected = play(plain, PARAMS["drawn"])
    assert said(found) == said(expected)
    lines = [record.getMessage() for record in caplog.records]
    what = "chunks of prompts are launched, not captured"
    if stage == "first run":
        what = "plain operations are used for chunks of prompts of some sizes"
    assert lines == [f"{what}: no capture: {stage}"]
    assert caplog.records[0].exc_info is not None
    assert graphs.works(ROOMS[0]) is (stage == "first run")
    other.runner.pools.arena.check_integrity()


def test_while_requests_run_chunks_that_are_not_captured_are_launched() -> None:
    plain, other, _ = make_pair()
    recorder = RunAgain()
    graphs = capture_chunks(other, recorder)
    other.make_way(busy=True)
    expected = said(play(plain, PARAMS["drawn"]))
    for _ in range(2):
        assert said(play(other, PARAMS["drawn"])) == expected
    assert recorder.num_replays == 0
    assert not graphs.graphs


def test_rooms_are_warmed_up() -> None:
    ways = TorchBackend(load_torch("llama"), num_slots=16, kernels=False)._ways
    shapes = replace(ways, kernels=True, chunk_graphs=True).shapes_to_warm_up()
    rooms = {room_for(s.num_rows * s.num_tokens, s.num_rows) for s in shapes if not s.num_steps}
    assert rooms == set(ROOMS)
    shapes = replace(ways, kernels=True, chunk_graphs=False).shapes_to_warm_up()
    assert all(shape.num_steps for shape in shapes)
    assert room(64, 4) in rooms


BESIDE = {name: PARAMS[name] for name in ("greedy", "drawn")}
BESIDE["top_p"] = {"temperature": 1.0, "top_p": 0.8}
SAMPLER = {"temperature": 1.0, "frequency_penalty": 0.5}


def place_of(capture: Capture) -> tuple[int, int]:
    return capture.slot, capture.start


def play_beside(backend: TorchBackend, params: dict[str, Any]) -> list[StepResult]:
    """Two replies go on while two prompts arrive, ahead of the results."""
    prompts = {slot: prompt_of(length) for slot, length in ((1, 5), (2, 70), (3, 150), (4, 64))}
    admits = tuple(
        Admit(slot, SamplingParams(**params), (), prompt, seed=slot)
        for slot, prompt in prompts.items()
    )
    _, _, c, d = prompts.values()
    begun = tuple(PrefillRow(s, 0, prompts[s], samples=True, captures=True) for s in (1, 2))
    first = PrefillRow(3, 0, c[:130], checkpoints=(64, 128, 130), captures=True)
    rest = PrefillRow(3, 130, c[130:], samples=True, checkpoints=(150,), captures=True)
    other = PrefillRow(4, 0, d, samples=True, checkpoints=(64,), captures=True)
    plans: list[dict[str, Any]] = [
        {"admit": admits, "prefill": begun},
        {"decode": (DecodeRow(1, 5), DecodeRow(2, 70, checkpoint=True)), "prefill": (first,)},
        {"decode": (DecodeRow(2, 71), DecodeRow(1, 6)), "prefill": (rest, other)},
        {"decode": tuple(DecodeRow(s, p) for s, p in ((1, 7), (2, 72), (3, 150), (4, 64)))},
    ]
    pending = [backend.launch(StepPlan(n, **plan)) for n, plan in enumerate(plans)]
    results = [step.wait() for step in pending]
    ends = tuple(Retire(slot) for slot in prompts)
    results.append(backend.launch(StepPlan(9, retire=ends)).wait())
    return results


@pytest.mark.parametrize("params", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_both_say_in_one_forward_is_what_they_say_apart(
    name: str, params: dict[str, Any]
) -> None:
    plain, captured, recorder = make_pair(name, mixed=True)
    expected, found = play_beside(plain, params), play_beside(captured, params)
    assert said(found) == said(expected)
    assert recorder.num_replays == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert not mine.overflowed
        assert mine.forwards == theirs.forwards
        pairs = zip(*(sorted(each.captures, key=place_of) for each in (mine, theirs)), strict=True)
        for a, b in pairs:
            assert (a.slot, a.start, a.end) == (b.slot, b.start, b.end)
            assert (a.hidden is None) == (b.hidden is None)
            assert a.states.keys() == b.states.keys()


@pytest.mark.parametrize("busy", [False, True])
def test_what_needs_the_sampler_or_is_not_captured_runs_apart(busy: bool) -> None:
    """Launched kernel by kernel, one forward of both would take longer than two replays."""
    plain, captured, recorder = make_pair("llama", mixed=True)
    captured.make_way(busy=busy)
    params = PARAMS["drawn"] if busy else SAMPLER
    assert said(play_beside(captured, params)) == said(play_beside(plain, params))
    assert recorder.num_replays == 0
    steps = captured.runner.forwards.steps
    assert steps is not None
    assert not (busy and steps.graphs)


def both(num_rows: int, num_tokens: int, num_chunks: int) -> StepSize:
    return room(num_tokens, num_chunks)._replace(num_rows=num_rows)


def test_sizes() -> None:
    assert mixed_size_for(1, 1, 1) == both(16, 64, 16)
    assert mixed_size_for(17, 513, 1) == both(32, 1024, 16)
    assert mixed_size_for(16, 65, 16) == both(16, 128, 16)
    assert mixed_size_for(256, 1024, 1) == both(256, 1024, 16)
    assert mixed_size_for(257, 1, 1) is None
    assert mixed_size_for(1, 1025, 1) is None
    assert mixed_size_for(1, 64, 17) is None


@pytest.mark.parametrize("num_slots", [2, 17, 64, 100, 256])
def test_they_are_warmed_up(num_slots: int) -> None:
    """All that so many slots can ask for."""
    ways = TorchBackend(load_torch("llama"), num_slots=2, kernels=False)._ways
    ways = replace(ways, kernels=True, chunk_graphs=True, mixed=True, num_slots=num_slots)
    shapes = [shape for shape in ways.shapes_to_warm_up() if shape.beside]
    assert all(shape.beside + shape.num_rows <= num_slots for shape in shapes)
    found = {mixed_size_for(s.beside, s.num_tokens, s.num_rows) for s in shapes}
    asked = {
        each._replace(num_rows=width)
        for each in MIXED_ROOMS
        for less, width in pairwise((0, *MIXED_WIDTHS))
        if less + 1 < num_slots
    }
    assert found == asked


@pytest.mark.parametrize("num_slots", [2, 16, 20, 64])
def test_the_largest_is_captured_first(num_slots: int) -> None:
    """Those that are warmed up later fit into its memory, however few rows there are."""
    backend = TorchBackend(load_torch("llama"), num_slots=num_slots, kernels=False)
    ways = replace(backend._ways, kernels=True, chunk_graphs=True, mixed=True)
    shapes = [shape for shape in ways.shapes_to_warm_up() if shape.beside]
    sizes = [mixed_size_for(s.beside, s.num_tokens, s.num_rows) for s in shapes]
    largest = max((s for s in sizes if s is not None), key=lambda s: (s.num_rows, s.num_tokens))
    assert ways.largest_sizes() == [StepSize(width_for(num_slots)), ROOMS[-1], largest]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5"])
def test_replies_of_captured_steps_are_those_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the scheduler, with prefixes that the tree holds and prompts that come while others
    are answered."""
    lengths = (3, 64, 150, 70, 90)
    prompts = [make_prompt(f"{TORCH}{name}", n, seed=n % 7) for n in lengths]
    prompts += [[*p, *prompts[0]] for p in prompts]
    recorder, found = RunAgain(), []
    for captured in (False, True):
        client, replies = make_client(f"{TORCH}{name}", chunk=64, num_slots=6), []
        backend = client.loop.backend
        if captured:  # what no earlier step has, as those of a server before it is ready
            capture_chunks(backend, recorder, mixed=name != "qwen3_5")  # type: ignore[arg-type]
            monkeypatch.setattr(backend, "make_way", lambda *, busy: None)
        for prompt in prompts:
            replies.append(client.submit(prompt, max_tokens=12, logprobs=None))
            for _ in range(3):
                client.loop.step()
        client.run()
        found.append([reply.tokens for reply in replies])
    assert recorder.num_replays > 5
    assert found[0] == found[1]
