"""The sampler against the rules in numpy, and against itself alone and in company."""

from __future__ import annotations

import math
from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest

from cases import cases
from near_ties import log_softmax
from pippin.backends.base import Admit
from pippin.backends.masks import pack
from pippin.backends.mlx.step import filters
from pippin.backends.mlx.step import sampler as noise
from pippin.backends.mlx.step.sampler import MLXSampler, dropped_tokens, send
from pippin.backends.sampling.batches import DrawGroup, SampleBatch
from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits, stream_of
from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.sampling.sampler import SampleRow
from pippin.types import SamplingParams
from sampling_rule import KINDS, PARAMS, ROWS, kept_by_rule
from sampling_rule import VOCAB as RULE_VOCAB
from sampling_rule import logits as rule_logits

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


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = mx.array([[2.0, 1.0, 0.0, 1.0, 1.0, -1.0]])
    tied = [[True, True, False, True, True, False]]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        np.testing.assert_array_equal(kept_by(params, logits), tied)


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


def test_no_more_logprobs_are_computed_than_are_asked_for() -> None:
    logits = some_logits(1, VOCAB)
    sampled = admitted(SamplingParams()).sample(logits, [SampleRow(1, 0)])
    assert sampled.logprobs is None
    assert len(sampled.arrays) == 1
    sampled = admitted(SamplingParams(logprobs=0)).sample(logits, [SampleRow(1, 0)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.shape == (1,)
    assert sampled.logprobs.top_ids.shape == (1, 0)


def test_the_same_rows_reuse_their_arrays_and_a_new_admission_does_not() -> None:
    sampler = admitted(SamplingParams(temperature=0.5), SamplingParams(temperature=0.0))
    rows = [SampleRow(1, 0), SampleRow(2, 0)]
    first = sampler._batch(rows)
    assert sampler._batch([SampleRow(1, 1), SampleRow(2, 7)]) is first
    sampler.admit(an_admit(3, SamplingParams()))
    assert sampler._batch(rows) is first
    sampler.admit(an_admit(2, SamplingParams()))
    assert sampler._batch(rows) is not first


def group_of(
    params: SamplingParams, num_rows: int = ROWS, vocab: int = RULE_VOCAB
) -> DrawGroup[mx.array]:
    states = [SlotSampling(params)] * num_rows
    (group,) = SampleBatch(tuple(range(1, num_rows + 1)), states, (), vocab, send).draws
    return group


@cases("kind", KINDS)
@cases("params", [*PARAMS, SamplingParams(min_p=0.1), SamplingParams(top_k=20, top_p=0.8)], ids=str)
def test_filters_keep_what_the_rule_keeps(params: SamplingParams, kind: str) -> None:
    x, group = mx.array(rule_logits(kind)), group_of(params)
    found = [dropped_tokens(x, group)]
    if params in PARAMS:  # others have so few candidates that they take another way
        found.append(filters._dropped_by_sort(x, group))
    mass = np.array(mx.exp(x - x.max(axis=-1, keepdims=True)))
    for row in range(ROWS):
        expected = kept_by_rule(params, np.array(x)[row], mass[row])
        for dropped in found:
            np.testing.assert_array_equal(~np.array(dropped)[row], expected)


@cases("vocab", [64 * 200, 64 * 200 + 17, 700])
@cases("k", [1, 20])
@cases("step", [0.0, 0.5])
def test_the_largest_are_found_among_few(vocab: int, k: int, step: float) -> None:
    """`step`: numbers are multiples of it, so that many tie."""
    drawn = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32)
    x = np.round(drawn / step) * np.float32(step) if step else drawn
    found = np.sort(np.array(filters.largest(mx.array(x), k)), axis=-1)
    np.testing.assert_array_equal(found, np.sort(x, axis=-1)[:, -k:])
    values, indices = (np.array(part) for part in filters.candidates(mx.array(x), k))
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, axis=-1))
    assert values.shape[-1] == (vocab if vocab < 4 * k * filters.BLOCK else k * 64 + vocab % 64)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


VOCABULARIES = [1, 2, 3, 97, 4096, 50_257, 151_936]


SEEDS = [0, 1, 2, -1, -2, 42, 2**31, 2**32, 2**53 + 1, 2**63 - 9, -(2**63), 2**64 - 3]


INDICES = [0, 1, 2, 63, 64, 1000, 131_071, 2**31]


# Two float32 logarithms, each right to a few units in its last place; the noise is below 23.
NOISE_ERROR = 1e-5


def some_keys(num_rows: int, pick: np.random.Generator) -> np.ndarray:
    streams = np.array([stream_of(SEEDS[i]) for i in pick.integers(0, len(SEEDS), num_rows)])
    return noise_keys(streams.astype(np.uint64), [int(i) for i in pick.choice(INDICES, num_rows)])


@cases("vocab_size", VOCABULARIES)
def test_bits_and_noise_are_those_of_the_specification(vocab_size: int) -> None:
    pick = np.random.default_rng(vocab_size)
    for num_rows in range(1, 17) if vocab_size <= 4096 else (1, 2, 3, 16):
        keys = some_keys(num_rows, pick)
        expected = random_bits(keys, vocab_size)
        bits = noise.random_bits(mx.array(keys), vocab_size)
        assert bits.dtype == mx.uint32
        np.testing.assert_array_equal(np.array(bits), expected)
        found = noise.add_gumbel_noise(mx.zeros([num_rows, vocab_size]), mx.array(keys))
        np.testing.assert_allclose(np.array(found), gumbel(expected), rtol=0, atol=NOISE_ERROR)


def test_every_seed_and_index_has_the_bits_of_the_specification() -> None:
    pairs = [(stream_of(seed), index) for seed in SEEDS for index in INDICES]
    streams = np.array([stream for stream, _ in pairs], dtype=np.uint64)
    keys = noise_keys(streams, [index for _, index in pairs])
    bits = np.array(noise.random_bits(mx.array(keys), 97))
    np.testing.assert_array_equal(bits, random_bits(keys, 97))
    assert len({row.tobytes() for row in bits}) == len(pairs)


def test_extreme_bits_make_finite_noise() -> None:
    extremes = np.array([0, 1, 511, 512, 2**31, 2**32 - 512, 2**32 - 1], dtype=np.uint32)
    found = np.array(-mx.log(noise.exponential(mx.array(extremes))))
    np.testing.assert_allclose(found, gumbel(extremes), rtol=0, atol=NOISE_ERROR)


@cases(
    ("params", "num_kept"),
    [
        (SamplingParams(temperature=1.0), 0),
        (SamplingParams(temperature=0.3), 0),
        (SamplingParams(temperature=2.5), 0),
        (SamplingParams(temperature=1.5, top_k=20), 20),
    ],
    ids=["plain", "cool", "hot", "top-k"],
)
@cases("vocab_size", [97, 4096])
def test_tokens_are_the_argmax_of_logits_and_specified_noise(
    params: SamplingParams, num_kept: int, vocab_size: int
) -> None:
    """All seeds in one batch, each at an index of its own that moves on with every step."""
    sampler = MLXSampler(vocab_size, len(SEEDS))
    for slot, seed in enumerate(SEEDS, start=1):
        sampler.admit(Admit(slot, params, (), np.zeros(0, dtype=np.int32), seed))
    streams = np.array([stream_of(seed) for seed in SEEDS], dtype=np.uint64)
    draw = np.random.default_rng(7)
    num_compared = num_drawn = 0
    for step in range(25):
        indices = [step + 1000 * slot for slot in range(len(SEEDS))]
        logits = draw.normal(size=(len(SEEDS), vocab_size)).astype(np.float32) * 2
        rows = [SampleRow(slot, index) for slot, index in enumerate(indices, start=1)]
        tokens = np.array(sampler.sample(mx.array(logits), rows).tokens)

        scaled = logits.astype(np.float64) / params.temperature
        sums = scaled + gumbel(random_bits(noise_keys(streams, indices), vocab_size))
        if num_kept:
            sums[scaled < np.sort(scaled, axis=-1)[:, -num_kept, None]] = -np.inf
        best_two = np.sort(sums, axis=-1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > 5 * NOISE_ERROR
        np.testing.assert_array_equal(tokens[clear], sums.argmax(axis=-1)[clear])
        num_compared += int(clear.sum())
        num_drawn += len(rows)
    assert num_compared >= 0.98 * num_drawn
