"""A kernel attends to packed rows if it computes at load what plain operations do."""

from __future__ import annotations

import mlx.core as mx
import pytest

from families import build
from pippin.backends.mlx import load, trial_run
from pippin.backends.mlx.attention import plain_attention
from pippin.backends.mlx.attention.paths import AttendPacked, PackedCall
from pippin.backends.mlx.attention.plain_attention import LONG, attend_joined
from pippin.backends.mlx.load import LoadedModel

Attended = tuple[mx.array, mx.array, mx.array]


def prepared(
    monkeypatch: pytest.MonkeyPatch, kernel: AttendPacked, dtype: str = "float32"
) -> LoadedModel:
    """As on a GPU that has this kernel."""
    monkeypatch.setattr(load, "on_cpu", lambda: False)
    monkeypatch.setattr(load, "_merge_linear_layers", lambda *_: None)
    monkeypatch.setattr(trial_run, "kernel_of", lambda _: kernel)
    return load.prepare(*build("qwen3"), dtype=dtype)


def test_a_kernel_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, attend_joined).attention.kernel is attend_joined


def test_a_kernel_that_rounds_less_than_plain_operations_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few bits of sharp scores are off by more than any kernel; and layer after layer by more."""

    def exact(call: PackedCall) -> Attended:
        sharp = plain_attention._in_float32(call)
        out, *tail = attend_joined(sharp)
        return out.astype(call.q.dtype), *(side.astype(call.q.dtype) for side in tail)

    assert prepared(monkeypatch, exact, "bfloat16").attention.kernel is exact


def test_a_kernel_that_is_off_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def off(call: PackedCall) -> Attended:
        out, *tail = attend_joined(call)
        return out * 1.5, tail[0], tail[1]

    assert prepared(monkeypatch, off).attention.kernel is None
    assert "the kernel is off" in caplog.text


def test_a_kernel_that_is_off_for_long_rows_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has another form for them, and a model's own rows at load are short."""
    asked: list[int] = []

    def off_for_long_rows(call: PackedCall) -> Attended:
        asked.append(call.num_columns)
        out, *tail = attend_joined(call)
        return (out if call.num_columns < LONG else 0 * out), tail[0], tail[1]

    assert prepared(monkeypatch, off_for_long_rows).attention.kernel is None
    assert "the kernel is off" in caplog.text
    assert asked.count(LONG) == 1, "layers are all of one kind"


def test_a_kernel_that_cannot_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(call: PackedCall) -> Attended:
        raise RuntimeError("no such kernel")

    assert prepared(monkeypatch, broken).attention.kernel is None
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize("long", [False, True])
def test_drafts_are_left_to_plain_operations_where_their_form_of_a_kernel_is_off(
    long: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One token of each row stays with the kernel."""
    asked: list[tuple[int, int]] = []

    def off_for_drafts(call: PackedCall) -> Attended:
        num_tokens = call.q.shape[2]
        asked.append((num_tokens, call.num_columns))
        out, *tail = attend_joined(call)
        off = num_tokens > 1 and (call.num_columns == LONG) is long
        return (0 * out if off else out), tail[0], tail[1]

    paths = prepared(monkeypatch, off_for_drafts).attention
    assert "plain operations attend to drafts: the kernel is off" in caplog.text
    assert paths.kernel is not None
    drafting, asked[:] = trial_call(3), []
    for call in (trial_call(1), drafting):
        expected = attend_joined(call)
        assert all(map(mx.array_equal, paths.kernel(call), expected))
    assert [num_tokens for num_tokens, _ in asked] == [1]


def trial_call(num_tokens: int) -> PackedCall:
    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(sum(shape)))

    call = PackedCall(
        *(drawn(2, 4, 1, 32), drawn(2, 2, 1, 32), drawn(2, 2, 1, 32)),
        tail=(drawn(2, 2, 64, 32), drawn(2, 2, 64, 32)),
        mains=[(drawn(2, 256, 32), drawn(2, 256, 32))],
        places=mx.array([[[0, 100]], [[100, 7]]], dtype=mx.int32),
        visible_tail=mx.arange(64)[None] <= mx.array([[3], [0]]),
        cursor=mx.array([3, 0], dtype=mx.int32),
        scale=0.2,
        sinks=None,
        num_columns=128,
    )
    return call if num_tokens == 1 else plain_attention.of_drafts(call, num_tokens)
