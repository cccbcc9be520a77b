"""Gated DeltaNet on Metal as we run it: mlx-lm's kernels, in slices where states are tapped.

Against mlx-lm's plain operations, token by token; and a layer that verifies drafts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from metal.emulator import FORWARD, needs_clang, use_emulator
from pippin.backends.mlx import substitutions
from pippin.backends.mlx.layout import LayerCache
from pippin.backends.mlx.recurrent import recurrences, replay
from pippin.backends.mlx.recurrent.replay import DraftStates, Replay, kept_shapes
from pippin.backends.mlx.recurrent.taps import tap_states
from pippin.types import Component

pytestmark = [needs_clang, pytest.mark.slow]

UPDATE = "gated_delta_update"
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
TOLERANCES = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own choice of kernel, with each kernel in the emulator."""
    use_emulator(monkeypatch, orders=(FORWARD,))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(recurrences, "on_metal", lambda: True)
    for masked in (False, True):
        kernel = gated_delta._make_gated_delta_kernel(has_mask=masked)
        monkeypatch.setattr(gated_delta, "_gated_delta_kernel" + "_masked" * masked, kernel)
    packed = gated_delta._make_gated_delta_packed_kernel()
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", packed)


def arguments(
    rows: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype
) -> dict[str, Any]:
    """`heads` and `dims`: of keys and of values."""
    mx.random.seed(tokens)
    keys = {
        name: mx.random.normal((rows, tokens, heads[0], dims[0])) * dims[0] ** -0.5 for name in "qk"
    }
    values = {"v": (heads[1], dims[1]), "a": (heads[1],), "b": (heads[1],)}
    drawn = keys | {name: mx.random.normal((rows, tokens, *own)) for name, own in values.items()}
    layer = {"A_log": mx.random.normal((heads[1],)), "dt_bias": mx.random.normal((heads[1],))}
    state = mx.random.normal((rows, heads[1], dims[1], dims[0]))
    return {name: array.astype(dtype) for name, array in drawn.items()} | layer | {"state": state}


def as_served(given: dict[str, Any]) -> tuple[mx.array, mx.array]:
    """As a layer's call runs inside of our forwards."""
    with substitutions.active():
        y, state = substitutions._DISPATCHERS[UPDATE](**given)
    return y, state


def plain(given: dict[str, Any]) -> tuple[mx.array, mx.array]:
    y, state = gated_delta.gated_delta_update(**given, use_kernel=False)
    return y, state


def first_tokens(given: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    per_token = {name: given[name][:, :num_tokens] for name in ("mask", *"qkvab") if name in given}
    return given | per_token


def worst(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a.astype(F32) - b.astype(F32)).max())


@pytest.mark.parametrize(
    ("rows", "heads", "dims", "dtype"),
    [
        # Served where a layer has no kernel of ours. Heads of keys are independent: two of 16.
        (1, (2, 2), (128, 128), BF16),  # as Qwen3.5 0.8B and 2B
        (2, (2, 4), (128, 128), F16),  # Qwen3.5 4B and 9B, Qwen3-Next 80B
        (1, (2, 6), (128, 128), BF16),  # Qwen3.5 27B
        (1, (2, 8), (128, 128), F32),  # Qwen3.5 122B-A10B and 397B-A17B
        (64, (1, 2), (128, 16), BF16),
        (3, (2, 4), (64, 32), F32),
    ],
)
def test_a_decode_step(
    rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype
) -> None:
    given = arguments(rows, 1, heads, dims, dtype)
    y, state = as_served(given)
    expected, expected_state = plain(given)
    assert y.dtype == dtype
    assert state.dtype == F32
    assert worst(y, expected) < TOLERANCES[dtype]
    assert worst(state, expected_state) < TOLERANCES[F32]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_chunk_gives_its_states_at_every_64_tokens(rows: int, dtype: mx.Dtype) -> None:
    """And the numbers of one call, to the bit. Two rows are of two lengths."""
    given = arguments(rows, 150, (1, 2), (128, 8), dtype)
    lengths = mx.array([150, 70][:rows])
    if rows > 1:
        given["mask"] = mx.arange(150) < lengths[:, None]
    whole, last = as_served(given)
    with tap_states() as taps:
        y, state = as_served(given)
    assert mx.array_equal(y, whole).item()
    assert mx.array_equal(state, last).item()
    (states,) = taps.states
    assert [*states] == [0, 1, 2]
    with tap_states([128]) as taps:
        y, _ = as_served(given)
    assert mx.array_equal(y, whole).item()
    (few,) = taps.states
    assert [*few] == [1, 2]
    assert mx.array_equal(few[1], states[1]).item()
    for end, tapped in zip((64, 128, 150), (states[n] for n in range(3)), strict=True):
        expected, expected_state = plain(first_tokens(given, end))
        assert worst(tapped, expected_state) < TOLERANCES[F32]
    keep = (mx.arange(150) < lengths[:, None])[..., None, None]
    assert worst(mx.where(keep, y, 0), mx.where(keep, expected, 0)) < TOLERANCES[dtype]


def token_by_token(layer: Any, inputs: mx.array) -> tuple[mx.array, list[mx.array]]:
    """What mlx-lm's own layer makes of one row [1, n, hidden] in plain operations, and its state
    entries after all but the last token."""
    cache: Any = ArraysCache(size=2)
    layer.train()  # without a kernel
    outs, entries = [], list[mx.array]()
    for token in range(inputs.shape[1]):
        entries = list(cache.cache)
        outs.append(GatedDeltaNet.__call__(layer, inputs[:, token : token + 1], cache=cache))
    layer.eval()
    return mx.concatenate(outs, axis=1), entries


@pytest.mark.parametrize("metal", [True, False], ids=["kernel", "plain operations"])
def test_a_layer_that_verifies_drafts_replays_those_that_were_accepted(
    metal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of three drafts; the first accepted all of one row, none and one of the others."""
    monkeypatch.setattr(recurrences, "on_metal", lambda: metal)
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    mx.random.seed(1)
    layer: Any = GatedDeltaNet(
        TextModelArgs(hidden_size=24, linear_value_head_dim=16, linear_conv_kernel_dim=4, **sizes)
    )
    layer.eval()
    layer.__class__ = replay.ReplayedDeltaNet
    depth, accepted = 3, [3, 0, 1]
    inputs = mx.random.normal((3, 1 + depth, 24))
    later = mx.random.normal((3, 1 + depth, 24))
    shapes = ((3, layer.conv_dim), (2, 16, 32))
    own = LayerCache(0, Component.STATE, shapes=shapes, dtypes=(F32, F32))
    blanks = [mx.zeros((3, *shape)) for shape in (*shapes, *kept_shapes(own, 4))]
    first = DraftStates(own, blanks, Replay(mx.zeros((3,), mx.int32), 4, 1 + depth))
    seen = layer(inputs, cache=first)
    counts = mx.array(accepted, mx.int32)
    second = DraftStates(own, first.entries(), Replay(counts, 4, 1 + depth))
    found = layer(later, cache=second)
    folded = layer.folded(first.entries(), counts)
    for row, count in enumerate(accepted):
        text = mx.concatenate([inputs[row, : 1 + count], later[row]])[None]
        expected, _ = token_by_token(layer, text)
        assert worst(seen[row, : 1 + count], expected[0, : 1 + count]) < TOLERANCES[F32]
        assert worst(found[row], expected[0, 1 + count :]) < TOLERANCES[F32]
        _, held = token_by_token(layer, text[:, : 2 + count])
        for ours, theirs in zip(folded, held, strict=True):
            assert worst(ours[row], theirs[0]) < TOLERANCES[F32]
