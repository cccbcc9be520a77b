"""Fingerprints of what MLX keeps for the tree: of the bytes, whatever their type or layout."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.payloads.payload import Block, KVPayload, Span, StatePayload

every_type = pytest.mark.parametrize(
    "dtype", [mx.bfloat16, mx.float16, mx.float32], ids=lambda dtype: str(dtype)
)


def make_array(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def flip_last_bit(array: mx.array) -> mx.array:
    """The same array but for one bit of its last number."""
    raw = np.array(mx.contiguous(array).view(mx.uint8))
    raw.reshape(-1)[-array.dtype.size] ^= 1
    return mx.array(raw).view(array.dtype)


def kv(*arrays: mx.array) -> KVPayload:
    num_tokens = arrays[0].shape[2]
    return KVPayload((Span(Block(arrays, num_tokens), 0, num_tokens),))


@every_type
def test_one_bit_of_a_state_changes_its_fingerprint(dtype: mx.Dtype) -> None:
    conv, state = make_array((2, 3, 8), dtype), make_array((2, 4, 8, 8), mx.float32)
    fingerprint = StatePayload((conv, state)).fingerprint()
    assert StatePayload((conv + 0, state + 0)).fingerprint() == fingerprint
    assert StatePayload((flip_last_bit(conv), state)).fingerprint() != fingerprint
    assert StatePayload((conv, flip_last_bit(state))).fingerprint() != fingerprint


@every_type
def test_one_bit_of_kv_changes_the_fingerprint_of_the_part_that_holds_it(dtype: mx.Dtype) -> None:
    keys, values = make_array((2, 3, 20, 8), dtype), make_array((2, 3, 20, 8), dtype)
    sound, spoiled = kv(keys, values), kv(keys, flip_last_bit(values))
    assert sound.fingerprint() == kv(keys + 0, values + 0).fingerprint()
    assert sound.fingerprint() != spoiled.fingerprint()
    (head, tail), (same_head, other_tail) = sound.split(7), spoiled.split(7)
    assert head.fingerprint() == same_head.fingerprint()
    assert tail.fingerprint() != other_tail.fingerprint()


def test_a_fingerprint_does_not_depend_on_how_an_array_lies_in_memory() -> None:
    lies_otherwise = make_array((8, 3, 2), mx.bfloat16).transpose(2, 1, 0)
    same = mx.contiguous(lies_otherwise)
    assert StatePayload((lies_otherwise,)).fingerprint() == StatePayload((same,)).fingerprint()
