"""What is chosen for GPUs at load: stacked layers, products of experts, rotations, a kernel."""

from __future__ import annotations

import gc
import io
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cases import cases
from families import build
from pippin.backends.mlx import load, trial_run
from pippin.backends.mlx.attention import packed_rows
from pippin.backends.mlx.attention.head_ropes import (
    DeferredRopes,
    deferring,
    rms_norm,
    rope,
    what_is_left,
)
from pippin.backends.mlx.attention.packed_rows import LONG, AttendPacked, PackedCall, attend_joined
from pippin.backends.mlx.gpu.experts import gather_mm, gather_qmm
from pippin.backends.mlx.linear_groups import FEW_ROWS, find_linear_groups, stack_linear_layers
from pippin.backends.mlx.load import LoadedModel

ROUNDING = 5e-5  # of numbers of about one


class Block(nn.Module):
    """Queries, keys and values of one input; two layers of another kind; one that reads alone."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(64, 96, bias=bias)
        self.k = nn.Linear(64, 32, bias=bias)
        self.v = nn.Linear(64, 32, bias=bias)
        self.wide = nn.Linear(64, 64, bias=not bias)
        self.out = nn.Linear(96, 64, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = mx.concatenate([q[..., :32] * k, v, q[..., 64:]], axis=-1)
        y: mx.array = self.out(mixed) + self.wide(x)
        return y


def block_of(*, bias: bool = False, bits: int | None = None) -> Block:
    mx.random.seed(0)
    block = Block(bias)
    if bits is not None:
        nn.quantize(block, group_size=32, bits=bits)
    mx.eval(block.parameters())
    return block


def merged(block: Block) -> list[list[nn.Module]]:
    groups = find_linear_groups(block, lambda: block(mx.zeros((1, 1, 64))))
    stack_linear_layers(groups)
    return groups


def test_groups_are_the_layers_of_one_input_that_can_be_stacked() -> None:
    block = block_of()
    groups = find_linear_groups(block, lambda: block(mx.zeros((1, 1, 64))))
    assert [[id(part) for part in group] for group in groups] == [
        [id(block.q), id(block.k), id(block.v)]
    ]
    assert type(block.q) is nn.Linear  # watching leaves no trace


@cases("bits", [None, 4, 8])
@cases("bias", [False, True])
@cases("num_rows", [1, 7, FEW_ROWS + 1])
def test_merged_layers_give_the_same_numbers(num_rows: int, bias: bool, bits: int | None) -> None:
    block = block_of(bias=bias, bits=bits)
    x = mx.random.normal((1, num_rows, 64))
    want = np.array(block(x))
    merged(block)
    for _ in range(2):  # what the first call left behind must not be seen by the second
        np.testing.assert_allclose(np.array(block(x)), want, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(
        np.array(block(-x)), np.array(block_of(bias=bias, bits=bits)(-x)), rtol=0, atol=ROUNDING
    )


def num_products(out: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, out)
    return text.getvalue().count('"Matmul"') + text.getvalue().count('"AddMM"')


def test_few_rows_take_one_product_for_a_group() -> None:
    block = block_of()
    x = mx.random.normal((1, 4, 64))
    apart = num_products(block(x))
    merged(block)
    assert num_products(block(x)) == apart - 2
    assert num_products(block(mx.random.normal((1, FEW_ROWS + 1, 64)))) == apart


@pytest.mark.slow
def test_weights_are_not_stored_twice() -> None:
    parts = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    mx.eval([part.parameters() for part in parts])
    gc.collect()  # what earlier tests left
    mx.synchronize()
    before = mx.get_active_memory()
    stack_linear_layers([parts])
    gc.collect()
    mx.synchronize()
    weights = 3 * parts[0].weight.nbytes  # 12 MB: far more than others have under way
    assert mx.get_active_memory() - before < weights / 2


EXPERTS = mx.array([[[0, 3]], [[2, 2]], [[1, 0]]], dtype=mx.uint32)


@pytest.mark.parametrize(
    "options",
    [
        {"rhs_indices": EXPERTS},
        {"rhs_indices": mx.sort(EXPERTS, axis=None).reshape(3, 1, 2), "sorted_indices": True},
        {"rhs_indices": EXPERTS, "lhs_indices": mx.array([[[2]], [[1]], [[0]]], dtype=mx.uint32)},
    ],
    ids=["rows as they lie", "sorted", "given rows"],
)
def test_the_same_numbers_as_mlx(options: dict[str, Any]) -> None:
    mx.random.seed(0)
    x = mx.random.normal((3, 1, 1, 1, 64))
    weights = mx.random.normal((4, 64, 32))
    ours, theirs = (f(x, weights, **options) for f in (gather_mm, mx.gather_mm))
    assert mx.array_equal(ours, theirs).item()
    packed = mx.quantize(mx.random.normal((4, 32, 64)), group_size=32, bits=4)
    ours, theirs = (
        f(x, *packed, transpose=True, group_size=32, bits=4, **options)
        for f in (gather_qmm, mx.gather_qmm)
    )
    assert mx.array_equal(ours, theirs).item()


def test_row_numbers_by_position_are_mlx_s() -> None:
    x, weights = mx.random.normal((3, 1, 64)), mx.random.normal((4, 64, 32))
    rows, experts = mx.array([2, 0], dtype=mx.uint32), mx.array([1, 3], dtype=mx.uint32)
    ours, theirs = (f(x, weights, rows, experts) for f in (gather_mm, mx.gather_mm))
    assert mx.array_equal(ours, theirs).item()


POSITIONS = mx.array([3, 9], dtype=mx.int32)


WEIGHT = mx.ones(8)


OPTIONS = {"traditional": False, "base": 1e4, "scale": 1.0}


def heads_of(heads: int) -> mx.array:
    return mx.random.normal((2, 1, heads, 8), key=mx.random.key(heads))


def ropes() -> DeferredRopes:
    return DeferredRopes(POSITIONS, {id(WEIGHT): WEIGHT})


def test_what_a_model_does_to_queries_and_keys_is_found_again() -> None:
    heads = heads_of(4), heads_of(2)
    with deferring(ropes()):
        normed = [rms_norm(each, WEIGHT, 1e-5).transpose(0, 2, 1, 3) for each in heads]
        q, k = (rope(each, 8, offset=POSITIONS, **OPTIONS) for each in normed)
    *arrays, found = what_is_left(q, k * 0.5)
    assert found is not None
    for one, own, array, gain in zip(found, heads, arrays, (1.0, 0.5), strict=True):
        usual = mx.fast.rms_norm(own, WEIGHT, 1e-5).transpose(0, 2, 1, 3)
        usual = mx.fast.rope(usual, 8, offset=POSITIONS, **OPTIONS)
        assert mx.allclose(one.apply(array, POSITIONS), gain * usual, atol=1e-6).item()


def test_other_norms_and_other_positions_are_computed() -> None:
    with deferring(ropes()):
        assert not mx.allclose(rms_norm(heads_of(4), mx.ones(8), 1e-5), heads_of(4)).item()
        elsewhere = rope(heads_of(4).swapaxes(1, 2), 8, offset=POSITIONS + 1, **OPTIONS)
    assert not mx.allclose(elsewhere, heads_of(4).swapaxes(1, 2)).item()


def test_what_is_changed_on_the_way_is_an_error() -> None:
    with deferring(ropes()):
        q, k = (rope(heads_of(n).swapaxes(1, 2), 8, offset=POSITIONS, **OPTIONS) for n in (4, 2))
        other = rope(heads_of(2).swapaxes(1, 2), 4, offset=POSITIONS, **OPTIONS)
    for change in (lambda: q + 1, lambda: q.astype(mx.float16), lambda: q * mx.ones(2)):
        with pytest.raises((AttributeError, TypeError)):
            change()
    for queries, keys in ((q, k.x), (q.x, k), (q, other)):
        with pytest.raises(TypeError, match="does not pass on what"):
            what_is_left(queries, keys)
    assert what_is_left(q.x, k.x) == (q.x, k.x, None)


def test_a_norm_without_a_rotation_after_it_is_an_error() -> None:
    with pytest.raises(TypeError, match="does not pass on what"), deferring(ropes()):
        rms_norm(heads_of(4), WEIGHT, 1e-5)


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
        sharp = packed_rows._in_float32(call)
        out, *tail = attend_joined(sharp)
        return out.astype(call.q.dtype), *(side.astype(call.q.dtype) for side in tail)

    assert prepared(monkeypatch, exact, "bfloat16").attention.kernel is exact


def off(call: PackedCall) -> Attended:
    out, *tail = attend_joined(call)
    return out * 1.5, tail[0], tail[1]


def off_for_long_rows(call: PackedCall) -> Attended:
    """It has another form for them, and a model's own rows at load are short."""
    out, *tail = attend_joined(call)
    return (out if call.num_columns < LONG else 0 * out), tail[0], tail[1]


def broken(call: PackedCall) -> Attended:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [(off, "the kernel is off"), (off_for_long_rows, "the kernel is off"), (broken, "no such k")],
)
def test_a_kernel_that_is_off_is_not_used(
    kernel: AttendPacked,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def noted(call: PackedCall) -> Attended:
        asked.append(call.num_columns)
        return kernel(call)

    assert prepared(monkeypatch, noted).attention.kernel is None
    assert words in caplog.text
    assert asked.count(LONG) <= 1, "layers are all of one kind"


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
    return call if num_tokens == 1 else packed_rows.of_drafts(call, num_tokens)
