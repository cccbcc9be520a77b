"""The sampler against plain float64 numpy and mlx-lm, and against itself alone and in company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from cases import cases
from near_ties import log_softmax
from pippin.backends.base import Admit
from pippin.backends.masks import pack
from pippin.backends.mlx.cpu.compile_mode import compile_without_fusing
from pippin.backends.mlx.step.sampler import MLXSampler, dropped_tokens, send, token_logprobs
from pippin.backends.sampling.batches import SampleBatch
from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.sampling.sampler import SampleRow
from pippin.types import SamplingParams

VOCAB = 300
SLOTS = 16
ROUNDING = 1e-5  # what float32 may be off by: a logit, a probability, a sum of them


def changed(params: object) -> str:
    """What a test's parameters set, as its name."""
    if not isinstance(params, SamplingParams):
        return str(params)
    default = SamplingParams()
    names = [f.name for f in fields(params)]
    return ",".join(
        f"{name}={value}"
        for name in names
        if (value := getattr(params, name)) != getattr(default, name)
    )


def admitted(*params: SamplingParams, vocab: int = VOCAB, **fields: object) -> MLXSampler:
    """A sampler whose slots 1, 2, ... hold these parameters, seeded by slot unless they say."""
    sampler = MLXSampler(vocab, SLOTS)
    for slot, each in enumerate(params, start=1):
        sampler.admit(an_admit(slot, each, **fields))
    return sampler


def an_admit(
    slot: int,
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    reply: tuple[int, ...] = (),
) -> Admit:
    seed = slot if params.seed is None else params.seed
    said = np.array(reply, dtype=np.int32)
    return Admit(slot, params, stop_ids, np.array(prompt, dtype=np.int32), seed, said)


def some_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> mx.array:
    draws = np.random.default_rng(seed).normal(size=shape) * scale
    return mx.array(draws.astype(np.float32))


def tokens_of(
    sampler: MLXSampler,
    logits: mx.array,
    slots: list[int],
    num_generated: int = 0,
    masks: dict[int, np.ndarray] | None = None,  # bool [vocabulary], by slot
) -> list[int]:
    rows = [SampleRow(slot, num_generated) for slot in slots]
    packed = None
    if masks is not None:
        everything = np.ones(logits.shape[-1], dtype=bool)
        packed = np.stack([pack(masks.get(slot, everything)) for slot in slots])
    tokens = sampler.sample(logits, rows, packed).tokens
    assert tokens.dtype == mx.int32
    return [int(token) for token in np.array(tokens)]


def kept_by(params: SamplingParams, logits: mx.array) -> np.ndarray:
    """Which tokens of logits [n, V] our filters keep for n rows with the same parameters."""
    num_rows, vocab = logits.shape
    states = [SlotSampling(params)] * num_rows
    (group,) = SampleBatch(tuple(range(1, num_rows + 1)), states, (), vocab, send).draws
    dropped = dropped_tokens(logits * group.inverse_temperature, group)
    return np.ones(logits.shape, bool) if dropped is None else ~np.array(dropped)


@dataclass(frozen=True)
class Kept:
    """What filters keep of one row of logits, as far as rounding leaves no doubt."""

    surely: np.ndarray  # bool [vocab]
    perhaps: np.ndarray  # bool [vocab]

    @property
    def clear(self) -> np.ndarray:
        return self.surely == self.perhaps


def reference_kept(params: SamplingParams, logits: np.ndarray) -> Kept:
    """One row in float64: top_k, then top_p of what is left, then min_p."""
    x = logits.astype(np.float64) / params.temperature
    order = np.argsort(-x)
    p = np.exp(x[order] - x.max())
    in_top_k = np.ones(len(x), bool)
    if 0 < params.top_k < len(x):
        in_top_k = p >= p[params.top_k - 1] * (1 - ROUNDING)
        p = np.where(in_top_k, p, 0.0)
    p /= p.sum()
    above = np.cumsum(p) - p

    def kept(slack: float) -> np.ndarray:
        keep = in_top_k.copy()
        if params.top_p < 1:
            keep &= (above < params.top_p + slack) | (above == 0)
        if params.min_p:
            keep &= p >= (params.min_p - slack) * p[0]
        return keep[np.argsort(order)]

    return Kept(surely=kept(-ROUNDING), perhaps=kept(ROUNDING))


def assert_kept(kept: np.ndarray, expected: Sequence[Kept]) -> None:
    clear = np.stack([row.clear for row in expected])
    surely = np.stack([row.surely for row in expected])
    np.testing.assert_array_equal(kept[clear], surely[clear])
    assert clear.mean() > 0.99


FILTERS = [
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20, temperature=0.6),
    SamplingParams(top_k=200),
    SamplingParams(top_k=VOCAB + 5, min_p=0.05),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, temperature=2.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.95, min_p=0.02),
    SamplingParams(top_p=0.8, top_k=20, temperature=0.7),
    SamplingParams(top_p=0.8, top_k=200, min_p=0.01, temperature=1.5),
]

EVERY_KIND = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.2, top_k=250),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 7: -100.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, presence_penalty=0.6, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.8, min_tokens=3, logprobs=0),
]


@cases("params", FILTERS, ids=changed)
@cases("scale", [0.1, 1.0, 5.0])
def test_filters_keep_what_a_float64_reference_keeps(params: SamplingParams, scale: float) -> None:
    logits = some_logits(12, VOCAB, scale=scale)
    expected = [reference_kept(params, row) for row in np.array(logits)]
    assert_kept(kept_by(params, logits), expected)


def test_filters_keep_what_mlx_lm_keeps() -> None:
    compile_without_fusing()  # mlx-lm compiles its filters
    logits = some_logits(8, VOCAB)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for theirs, params in [
        (sample_utils.apply_top_k(logprobs, 17), SamplingParams(top_k=17)),
        (sample_utils.apply_top_p(logprobs, 0.85), SamplingParams(top_p=0.85)),
        (sample_utils.apply_min_p(logprobs, 0.07), SamplingParams(min_p=0.07)),
    ]:
        expected = [reference_kept(params, row) for row in np.array(logits)]
        assert_kept(kept_by(params, logits), expected)
        assert_kept(np.array(theirs) > -np.inf, expected)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = mx.array([[2.0, 1.0, 0.0, 1.0, 1.0, -1.0]])
    tied = [[True, True, False, True, True, False]]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        np.testing.assert_array_equal(kept_by(params, logits), tied)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_k=7, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(temperature=2.0, min_p=0.2),
    ],
    ids=changed,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    vocab, num_steps = 24, 800
    sampler = admitted(*[params] * SLOTS, vocab=vocab)
    row = some_logits(vocab, scale=1.0)
    logits = mx.broadcast_to(row, [SLOTS, vocab])
    steps = [
        sampler.sample(logits, [SampleRow(slot, i) for slot in range(1, SLOTS + 1)]).tokens
        for i in range(num_steps)
    ]
    drawn = np.array(mx.concatenate(steps))

    p = np.exp(np.array(row, np.float64) / params.temperature)
    p *= reference_kept(params, np.array(row)).surely
    p /= p.sum()
    observed = np.bincount(drawn, minlength=vocab) / len(drawn)
    sigma = np.sqrt(p * (1 - p) / len(drawn))
    assert (np.abs(observed - p) <= 5 * sigma).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=changed)
def test_every_row_is_the_same_alone_and_in_any_batch(dtype: mx.Dtype) -> None:
    num_rows = len(EVERY_KIND)
    together = admitted(*EVERY_KIND, prompt=(1, 2, 3), stop_ids=(5,))
    alone = [admitted(*EVERY_KIND, prompt=(1, 2, 3), stop_ids=(5,)) for _ in EVERY_KIND]
    shuffle = np.random.default_rng(1)
    for step in range(6):
        logits = some_logits(num_rows, VOCAB, seed=step, scale=1.5).astype(dtype)
        order = [int(i) for i in shuffle.permutation(num_rows)]
        padded = mx.concatenate([logits[mx.array(order)], logits[:2]])
        batched = tokens_of(together, padded, [i + 1 for i in order] + [0, 0], step)
        for place, i in enumerate(order):
            assert tokens_of(alone[i], logits[i : i + 1], [i + 1], step) == [batched[place]], i


def test_a_seed_belongs_to_the_request_and_not_to_its_slot() -> None:
    params = SamplingParams(seed=42)
    logits = some_logits(1, VOCAB, scale=1.0)
    first, second = MLXSampler(VOCAB, SLOTS), MLXSampler(VOCAB, SLOTS)
    first.admit(an_admit(3, params))
    second.admit(an_admit(9, params))
    text = [tokens_of(first, logits, [3], i) for i in range(20)]
    assert text == [tokens_of(second, logits, [9], i) for i in range(20)]


def test_other_seeds_and_other_positions_draw_other_noise() -> None:
    logits = mx.zeros([1, VOCAB])
    texts = {}
    for seed in (0, 1, 2, -1, 2**63, 2**64 - 2):
        sampler = admitted(SamplingParams(seed=seed))
        texts[seed] = [tokens_of(sampler, logits, [1], i)[0] for i in range(12)]
    flat = [token for text in texts.values() for token in text]
    assert len({tuple(text) for text in texts.values()}) == len(texts)
    assert len(set(flat)) > len(flat) // 2
    assert texts[0][1:] != texts[1][:-1]  # neighbouring seeds are not shifted copies


def test_greedy_takes_the_first_of_equal_logits_whatever_the_batch() -> None:
    logits = mx.array([[0.0, 4.0, 4.0, 1.0]] * 2, dtype=mx.bfloat16)
    sampler = admitted(SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), vocab=4)
    assert tokens_of(sampler, logits[:1], [1]) == [1]
    assert tokens_of(sampler, logits, [1, 2])[0] == 1


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = some_logits(1, VOCAB)
    sampler = admitted(SamplingParams(temperature=1e-30, top_p=0.5))
    assert tokens_of(sampler, logits, [1]) == [int(np.array(logits).argmax())]


@cases("value", [math.nan, math.inf, -math.inf])
@cases("params", EVERY_KIND, ids=changed)
def test_logits_that_are_no_numbers_change_nothing_for_other_rows(
    params: SamplingParams, value: float
) -> None:
    logits = some_logits(3, VOCAB)
    spoiled = mx.array(logits)
    spoiled[1] = value
    expected = tokens_of(admitted(params, params, params), logits, [1, 2, 3])
    found = tokens_of(admitted(params, params, params), spoiled, [1, 2, 3])
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert 0 <= found[1] < VOCAB


def test_a_reply_that_is_resumed_counts_for_penalties() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sampler = MLXSampler(VOCAB, SLOTS)
    sampler.admit(an_admit(1, params, prompt=(3,), reply=(3, 5, 3)))
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [3, 5, 9]] = (2.5, 2.0, 0.9)  # less 2 and 1: said twice, once and never
    assert tokens_of(sampler, mx.array(logits), [1], num_generated=3) == [5]
    assert tokens_of(sampler, mx.array(logits), [1], num_generated=4) == [9]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=changed)
def test_penalties_over_a_reply_equal_a_host_side_count(dtype: mx.Dtype) -> None:
    prompt = (4, 9, 9, 11)
    everyone = [
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, repetition_penalty=0.7, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, presence_penalty=1.2),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, frequency_penalty=-0.4, presence_penalty=0.9),
    ]
    vocab = 16
    sampler = admitted(*everyone, vocab=vocab, prompt=prompt)
    replies: list[list[int]] = [[] for _ in everyone]
    for step in range(24):
        # Rows come and go, so that counts must survive changes of the batch.
        present = [i for i in range(len(everyone)) if (step // 3 + i) % 4 != 0]
        logits = some_logits(len(present), vocab, seed=step, scale=0.6).astype(dtype)
        rows = [SampleRow(i + 1, len(replies[i])) for i in present]
        processed = np.array(sampler._process(logits, sampler._batch(rows), None))
        tokens = np.array(sampler.sample(logits, rows).tokens)
        raw = np.array(logits.astype(mx.float32), np.float64)
        for place, i in enumerate(present):
            expected = penalised(raw[place], everyone[i], prompt, replies[i])
            np.testing.assert_allclose(processed[place], expected, atol=ROUNDING)
            behind = expected.max() - expected[tokens[place]]
            assert behind <= 2 * ROUNDING, (step, i)
            replies[i].append(int(tokens[place]))
    assert all(len(set(reply)) < len(reply) for reply in replies)  # tokens did repeat


def penalised(
    x: np.ndarray, params: SamplingParams, prompt: tuple[int, ...], reply: list[int]
) -> np.ndarray:
    out = x.copy()
    for token in set(prompt) | set(reply):
        out[token] *= params.repetition_penalty ** (1 if out[token] < 0 else -1)
    for token in set(reply):
        out[token] -= params.presence_penalty + params.frequency_penalty * reply.count(token)
    return out


def test_a_slot_admitted_again_has_forgotten_its_last_request() -> None:
    greedy = SamplingParams(temperature=0.0, presence_penalty=5.0)
    logits = mx.array([[1.0, 0.9, 0.8], [1.0, 0.9, 0.8]])
    sampler = admitted(greedy, greedy, vocab=3)
    assert tokens_of(sampler, logits, [1, 2]) == [0, 0]
    assert tokens_of(sampler, logits, [1, 2]) == [1, 1]
    sampler.retire(1)
    sampler.admit(an_admit(1, greedy))
    assert tokens_of(sampler, logits, [1, 2]) == [0, 2]
    sampler.admit(an_admit(1, greedy))
    assert tokens_of(sampler, logits, [1, 2])[0] == 0
    sampler.retire(1)
    sampler.admit(an_admit(1, SamplingParams(temperature=0.0, logit_bias={2: 9.0})))
    assert tokens_of(sampler, logits, [1, 2])[0] == 2


def test_the_callers_logits_are_left_as_they_were() -> None:
    params = [SamplingParams(temperature=0.0, repetition_penalty=2.0), SamplingParams()]
    sampler = admitted(*params, prompt=(0, 1))
    logits = some_logits(2, VOCAB)
    before = np.array(logits)
    tokens_of(sampler, logits, [1, 2], masks={1: np.arange(VOCAB) < 2})
    np.testing.assert_array_equal(np.array(logits), before)


def test_logit_bias_of_a_hundred_forces_and_bans() -> None:
    logits = some_logits(3, VOCAB)
    best = int(np.array(logits)[0].argmax())
    sampler = admitted(
        SamplingParams(temperature=0.0, logit_bias={best: -100.0}),
        SamplingParams(temperature=1.0, logit_bias={17: 100.0}),
        SamplingParams(temperature=0.0),
    )
    banned, forced, plain = tokens_of(sampler, logits.astype(mx.bfloat16), [1, 2, 3])
    assert banned != best
    assert forced == 17
    assert plain == int(np.array(logits.astype(mx.bfloat16).astype(mx.float32))[2].argmax())


def test_a_small_bias_counts_on_half_precision_logits() -> None:
    logits = mx.array([[8.0, 8.0]], dtype=mx.bfloat16)
    sampler = admitted(SamplingParams(temperature=0.0, logit_bias={1: 0.001}), vocab=2)
    assert tokens_of(sampler, logits, [1]) == [1]


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    logits = mx.array([[0.0, 50.0, 40.0, 1.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=2, logit_bias={1: 100.0})
        sampler = admitted(params, vocab=4, stop_ids=(1, 2))
        drawn = [tokens_of(sampler, logits, [1], i)[0] for i in range(4)]
        assert not set(drawn[:2]) & {1, 2}
        assert drawn[2:] == [1, 1]


@cases("params", EVERY_KIND, ids=changed)
def test_a_masked_row_draws_only_what_its_grammar_allows(params: SamplingParams) -> None:
    allowed = np.zeros(VOCAB, bool)
    allowed[[7, 30, 200]] = True
    sampler = admitted(params, SamplingParams(temperature=0.0))
    free = some_logits(2, VOCAB)
    for step in range(5):
        masked, other = tokens_of(sampler, free, [1, 2], step, masks={1: allowed})
        assert masked in (7, 30, 200)
        assert other == int(np.array(free)[1].argmax())


def test_a_grammar_that_allows_only_a_stop_beats_min_tokens() -> None:
    only_stop = np.arange(VOCAB) == 5
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, min_tokens=9, top_k=20)
        sampler = admitted(params, stop_ids=(5,))
        assert tokens_of(sampler, some_logits(1, VOCAB), [1], masks={1: only_stop}) == [5]


def test_logprobs_are_the_models_own_for_the_rows_that_ask() -> None:
    sampler = admitted(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3, logprobs=2, logit_bias={8: 100.0}),
        SamplingParams(temperature=0.0, logprobs=20),
    )
    logits = some_logits(3, VOCAB).astype(mx.bfloat16)
    sampled = sampler.sample(logits, [SampleRow(slot, 0) for slot in (1, 2, 3)])
    mx.async_eval(*sampled.arrays)
    assert sampled.logprobs is not None
    chosen, top_ids, top = (np.array(array) for array in sampled.logprobs)
    tokens, expected = np.array(sampled.tokens), log_softmax(np.array(logits.astype(mx.float32)))
    assert tokens[1] == 8
    assert sampled.asked == (1, 2)
    assert top_ids.shape == top.shape == (2, 20)
    for place, row in enumerate(sampled.asked):
        order = np.argsort(-expected[row], kind="stable")[:20]
        np.testing.assert_allclose(chosen[place], expected[row, tokens[row]], atol=ROUNDING)
        np.testing.assert_allclose(top[place], expected[row, order], atol=ROUNDING)
        np.testing.assert_array_equal(top_ids[place][:2], order[:2])


def test_no_logprobs_are_computed_when_nobody_asks() -> None:
    sampled = admitted(SamplingParams()).sample(some_logits(1, VOCAB), [SampleRow(1, 0)])
    assert sampled.logprobs is None
    assert len(sampled.arrays) == 1


def test_logprobs_without_alternatives_have_no_columns() -> None:
    sampler = admitted(SamplingParams(logprobs=0))
    sampled = sampler.sample(some_logits(1, VOCAB), [SampleRow(1, 0)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.shape == (1,)
    assert sampled.logprobs.top_ids.shape == (1, 0)


def test_prompt_logprobs_equal_log_softmax() -> None:
    logits, targets = some_logits(9, VOCAB), mx.arange(9) * 30
    chosen, top_ids, top = token_logprobs(logits, targets, 3)
    expected = log_softmax(np.array(logits))
    order = np.argsort(-expected, axis=-1)[:, :3]
    np.testing.assert_allclose(np.array(chosen), expected[np.arange(9), targets], atol=ROUNDING)
    np.testing.assert_array_equal(np.array(top_ids), order)
    np.testing.assert_allclose(
        np.array(top), np.take_along_axis(expected, order, axis=-1), atol=ROUNDING
    )


def test_the_same_rows_reuse_their_arrays_and_a_new_admission_does_not() -> None:
    sampler = admitted(SamplingParams(temperature=0.5), SamplingParams(temperature=0.0))
    rows = [SampleRow(1, 0), SampleRow(2, 0)]
    first = sampler._batch(rows)
    assert sampler._batch([SampleRow(1, 1), SampleRow(2, 7)]) is first
    sampler.admit(an_admit(3, SamplingParams()))
    assert sampler._batch(rows) is first
    sampler.admit(an_admit(2, SamplingParams()))
    assert sampler._batch(rows) is not first
