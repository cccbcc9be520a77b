"""The specified noise: its published parts, its distribution, and that it never changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pippin.backends.sampling.noise import (
    exponential,
    gumbel,
    noise_keys,
    random_bits,
    stream_of,
    threefry,
)

LONGEST_REPLY = 2**24


def keys_of(seed: int, *indices: int) -> np.ndarray:
    return noise_keys(np.full(len(indices), stream_of(seed), dtype=np.uint64), indices)


def assert_uniform(values: np.ndarray, num_bins: int) -> None:
    """Chi-square over equal bins, to six standard deviations."""
    counts = np.bincount(values, minlength=num_bins)
    assert len(counts) == num_bins
    expected = len(values) / num_bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (num_bins - 1)) < 6 * np.sqrt(2 * (num_bins - 1))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_threefry_gives_the_known_answers_of_random123(
    counter: tuple[int, int], key: tuple[int, int], words: tuple[int, int]
) -> None:
    arrays = [np.array([word], dtype=np.uint32) for word in (*key, *counter)]
    assert tuple(int(word[0]) for word in threefry(*arrays)) == words


def test_streams_are_the_first_numbers_of_splitmix64() -> None:
    assert stream_of(0) == 0xE220A8397B1DCDAF
    assert stream_of(1234567) == 6457827717110365317


def test_a_key_is_the_low_and_the_high_word_and_wraps() -> None:
    streams = np.array([0x0000000100000002, 2**32 - 1, 2**64 - 1], dtype=np.uint64)
    np.testing.assert_array_equal(noise_keys(streams, [0, 1, 3]), [[2, 1], [0, 1], [2, 0]])


def test_the_noise_of_a_seed_never_changes() -> None:
    bits = random_bits(keys_of(42, 0, 7), 5)
    assert [[f"{word:08x}" for word in row] for row in bits] == [
        ["05501963", "24596744", "5dcc7e39", "c0c003da", "58e66746"],
        ["7ea9f82f", "c1394ccb", "a21acba6", "736f0998", "16974722"],
    ]
    noise = [3.864577, 1.876412, 0.784517, -0.335102, 0.851944]
    np.testing.assert_allclose(gumbel(bits)[0], noise, rtol=0, atol=1e-6)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert stream_of(-1) == stream_of(2**64 - 1)
    assert stream_of(-(2**63)) == stream_of(2**63)
    assert stream_of(7) == stream_of(7 + 2**64)


def test_no_two_seeds_share_a_key_in_replies_of_any_length() -> None:
    around = (0, 2**31, 2**32, 2**53, 2**63, 0x9E3779B97F4A7C15)
    far = np.random.default_rng(0).integers(-(2**63), 2**63, 500)
    seeds = {base + near for base in around for near in range(-40, 40)} | {int(s) for s in far}
    starts = sorted({stream_of(seed) for seed in seeds})
    assert len(starts) == len({seed % 2**64 for seed in seeds})
    gaps = [after - before for before, after in itertools.pairwise([*starts, starts[0] + 2**64])]
    assert min(gaps) > LONGEST_REPLY


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 97, 4096])
def test_every_entry_has_bits_of_its_own(vocab_size: int) -> None:
    n = (vocab_size + 1) // 2
    keys = keys_of(5, 0, 3)
    bits = random_bits(keys, vocab_size)
    assert bits.shape == (2, vocab_size)
    assert bits.dtype == np.uint32
    for (key0, key1), row in zip(keys, bits, strict=True):
        for i in {0, n - 1, min(n, vocab_size - 1), vocab_size - 1}:
            counter = (i % n, i % n + n)
            one = [np.array([word], dtype=np.uint32) for word in (key0, key1, *counter)]
            assert threefry(*one)[i // n][0] == row[i]


def test_bits_are_uniform_over_entries_and_over_a_replys_tokens() -> None:
    over_entries = random_bits(keys_of(0, 0), 2**18)[0]
    over_tokens = random_bits(keys_of(0, *range(2**15)), 8).ravel()
    over_seeds = random_bits(np.concatenate([keys_of(seed, 0) for seed in range(2**12)]), 32)
    for bits in (over_entries, over_tokens, over_seeds.ravel()):
        for shift in (0, 8, 16, 24):
            assert_uniform((bits >> shift) & 255, 256)


def test_neighbouring_tokens_and_seeds_are_not_correlated() -> None:
    vocab_size = 2**16
    first = gumbel(random_bits(keys_of(3, 10), vocab_size))[0]
    for other in (keys_of(3, 11), keys_of(4, 10), keys_of(3, 10 + 2**32), keys_of(3 + 2**32, 10)):
        noise = gumbel(random_bits(other, vocab_size))[0]
        assert abs(np.corrcoef(first, noise)[0, 1]) < 6 / np.sqrt(vocab_size)
    halves = np.corrcoef(first[: vocab_size // 2], first[vocab_size // 2 :])[0, 1]
    assert abs(halves) < 6 / np.sqrt(vocab_size // 2)


def v_of(bits: np.ndarray) -> np.ndarray:
    """float64: the number in (0, 1] whose -log(1 - v) is approximated."""
    coarse, fine = bits >> np.uint32(9), np.uint32(512) - (bits & np.uint32(511))
    return (coarse * 512.0 + fine) / 2.0**32


def test_exponentials_are_positive_and_finite_and_follow_the_logarithm() -> None:
    edges = np.array([0, 1, 511, 512, 2**31, 2**32 - 512, 2**32 - 1], dtype=np.uint32)
    drawn = random_bits(keys_of(1, 0), 2**18)[0]
    for bits in (edges, drawn):
        found = exponential(bits)
        assert found.dtype == np.float32
        assert (found > 0).all()
        assert np.isfinite(found).all()
        assert np.isfinite(gumbel(bits)).all()
    v = v_of(drawn)
    exact = -np.log1p(-v)
    assert (np.abs(exponential(drawn) - exact) <= 2.0**-23 * (exact + v / (1 - v))).all()


def test_the_faintest_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """The smallest exponentials come in even steps of 2^-32, each exactly once."""
    smallest = np.arange(2**16, dtype=np.uint32)
    steps = np.sort(exponential(smallest)).astype(np.float64) * 2.0**32
    np.testing.assert_allclose(steps, np.arange(1, 2**16 + 1), rtol=1e-5)
