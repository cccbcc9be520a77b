"""What MLX draws for a seed, against the specification in numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from cases import cases
from pippin.backends.base import Admit
from pippin.backends.mlx.step import noise
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits, stream_of
from pippin.backends.sampling.sampler import SampleRow
from pippin.types import SamplingParams

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
