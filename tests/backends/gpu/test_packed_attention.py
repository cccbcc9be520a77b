"""Attention over packed rows: the kernel and its plain form against numpy, in float64.

Where there is no Metal, the kernel runs in the emulator of tests/metal.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal.compiled_kernel import CLANG
from metal.emulator import BACKWARD, FORWARD, EmulatedKernel, use_emulator
from metal.packed_rows import CURSOR, TAIL, Rows
from pippin.backends.mlx.attention.head_ropes import Norm, Rope
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, AttendPacked
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.gpu.packed_attention import Form, attend_packed, cut

KERNEL = pytest.param(
    attend_packed,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            not (mx.metal.is_available() or CLANG), reason="needs Metal, or clang for the emulator"
        ),
    ],
    id="kernel",
)
JOINED = pytest.param(attend_joined, id="joined")


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the emulator, unless there is Metal."""
    if not mx.metal.is_available():
        use_emulator(monkeypatch)


@pytest.mark.parametrize(
    ("function", "lengths", "heads", "dim"),
    [
        (attend_joined, [512], (8, 2), 256),
        (attend_joined, [512, 40, 7, 300], (8, 2), 256),
        (attend_joined, [8000, 300], (16, 8), 128),
        pytest.param(attend_packed, [2000, 300], (4, 2), 128, marks=KERNEL.marks),
    ],
)
def test_half_precision(
    function: AttendPacked, lengths: list[int], heads: tuple[int, int], dim: int
) -> None:
    rows = Rows(lengths, heads, dim, seed=1)
    rows.round_to(mx.bfloat16)
    out, *_ = rows.attend(function, sinks=False, dtype=mx.bfloat16)
    expected = rows.expected(sinks=False)
    assert np.abs(out - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "sinks"),
    [
        ([5], (16, 8), 128, False),
        ([300, 0, 77], (4, 1), 256, True),
        ([700, 1], (8, 1), 64, True),
        ([100, 3, 64, 65, 99], (9, 3), 64, False),
        ([130, 400], (8, 1), 96, True),
    ],
)
def test_rows_of_all_lengths(
    function: AttendPacked, sinks: bool, lengths: list[int], heads: tuple[int, int], dim: int
) -> None:
    rows = Rows(lengths, heads, dim, seed=len(lengths))
    num_segments = 1 + len(lengths) % MOST_SEGMENTS
    out, keys, values = rows.attend(function, sinks=sinks, num_segments=num_segments)
    np.testing.assert_allclose(out, rows.expected(sinks=sinks), atol=2e-6)
    for tail, old, new in zip((keys, values), rows.tails, rows.new, strict=True):
        np.testing.assert_array_equal(tail[:, :, CURSOR], new[:, :, 0])
        others = np.arange(TAIL) != CURSOR
        np.testing.assert_array_equal(tail[:, :, others], old[:, :, others])


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize(
    ("first", "length", "sinks"), [(0, 5, True), (0, 300, False), (7, 90, True)]
)
def test_the_only_row(function: AttendPacked, sinks: bool, first: int, length: int) -> None:
    """`first`: columns that its window has passed by."""
    rows = Rows([length], (9, 3), 64, seed=length, first=first)
    out, keys, values = rows.attend(function, sinks=sinks)
    np.testing.assert_allclose(out, rows.expected(sinks=sinks), atol=2e-6)
    np.testing.assert_array_equal(keys[:, :, CURSOR], rows.new[0][:, :, 0])
    np.testing.assert_array_equal(values[:, :, CURSOR], rows.new[1][:, :, 0])


@pytest.mark.parametrize("function", [KERNEL])
def test_what_no_row_sees_may_be_anything(function: AttendPacked) -> None:
    rows = Rows([40, 9], (8, 2), 128, seed=0)
    expected = rows.expected(sinks=False)
    rows.mains[:, :, 49:] = np.nan
    hidden = ~rows.visible
    for row in range(2):
        rows.tails[:, row][:, :, hidden[row]] = np.inf
    out, *_ = rows.attend(function, sinks=False)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("function", [KERNEL, JOINED])
def test_a_row_reads_no_columns_of_others(function: AttendPacked) -> None:
    rows = Rows([40, 9, 30], (8, 2), 128, seed=0)
    expected = rows.expected(sinks=False)
    rows.mains[:, :, :40] = np.nan  # row 0 overflowed
    rows.mains[:, :, 79:] = np.nan
    out, *_ = rows.attend(function, sinks=False, num_segments=2)
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)


def test_a_form_leaves_no_channel_out() -> None:
    for heads in ((8, 2), (16, 8), (32, 1), (9, 3), (7, 7)):
        for dim in (32, 64, 96, 128, 256, 512):
            for size in (2, 4):
                form = Form.of(*heads, (dim, dim), size)
                assert form.queries * form.shares == heads[0] // heads[1]
                assert dim % (form.lanes * form.vec) == 0
                assert form.vec * size <= 16
                shared = form.most_threads // 32 * form.queries * (dim + 2) + dim
                assert shared * 4 <= 32_768
                assert 2 * form.queries * dim // form.lanes <= 64  # numbers that a lane keeps
                assert form.most_threads in (128, 256)


F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
RAGGED, MANY = (40, 0, 1), (1, 0, 30, 2) * 16
WINDOW, SHARED = {"first": 9}, {"shared": True}


@pytest.mark.parametrize("function", [KERNEL])
@pytest.mark.parametrize(
    ("heads", "dim", "lengths", "more", "tail", "sinks", "dtype"),
    [  # every model with two types, every two of the other columns together
        ((32, 8), 128, RAGGED, {}, "some", False, F16),  # Llama-3 8B, Qwen3 4B and 8B
        ((32, 8), 128, (90,), WINDOW, "empty", True, BF16),
        ((64, 8), 128, (50, 50), SHARED, "full", False, BF16),  # Llama-3 70B, Qwen3 32B
        ((64, 8), 128, (3,), {}, "empty", False, F32),
        ((16, 8), 128, RAGGED, WINDOW, "full", True, F32),  # Qwen3 0.6B and 1.7B
        ((16, 8), 128, (600, 3), {}, "some", False, BF16),
        ((40, 8), 128, RAGGED, SHARED, "empty", False, F16),  # Qwen3 14B
        ((32, 4), 128, RAGGED, {}, "empty", True, F32),  # Qwen3 30B-A3B
        ((32, 4), 128, (50, 50), WINDOW, "some", False, F16),
        ((64, 4), 128, (3,), {}, "full", True, F16),  # Qwen3 235B-A22B
        ((64, 4), 128, RAGGED, {}, "some", False, BF16),
        ((8, 2), 256, (70, 70, 70), SHARED, "some", True, F16),  # Qwen3.5 0.8B and 2B
        ((8, 2), 256, RAGGED, {}, "empty", False, F32),
        ((16, 4), 256, RAGGED, {}, "full", False, BF16),  # Qwen3.5 4B and 9B
        ((24, 4), 256, RAGGED, {}, "some", False, BF16),  # Qwen3.5 27B
        ((16, 2), 256, (3,), {}, "some", False, F32),  # Qwen3.5 35B-A3B
        ((32, 2), 256, RAGGED, {}, "full", False, F16),  # Qwen3.5 122B-A10B and 397B-A17B
        ((4, 1), 256, MANY, {}, "some", False, BF16),  # Gemma 3 1B
        ((8, 4), 256, RAGGED, WINDOW, "full", False, F16),  # Gemma 3 4B
        ((16, 8), 256, (3,), WINDOW, "empty", False, F32),  # Gemma 3 12B
        ((32, 16), 128, (3,), WINDOW, "some", False, BF16),  # Gemma 3 27B
        ((64, 8), 64, RAGGED, WINDOW, "full", True, BF16),  # gpt-oss
        ((64, 8), 64, (300, 3), SHARED, "empty", True, F32),
        ((96, 8), 128, (3,), {}, "some", False, BF16),  # GLM-4.5, 4.6 and 4.7
        ((32, 2), 128, RAGGED, {}, "full", False, F32),  # GLM-4 9B
    ],
)
def test_head_shapes_of_served_models(
    function: AttendPacked,
    heads: tuple[int, int],
    dim: int,
    lengths: tuple[int, ...],
    more: dict[str, Any],
    tail: str,
    sinks: bool,
    dtype: mx.Dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in one order of threads: both are run elsewhere, and cost twice the time."""
    monkeypatch.setattr(EmulatedKernel, "orders", (BACKWARD if sinks else FORWARD,))
    rows = Rows(lengths, heads, dim, seed=dim, **more)
    rows.round_to(dtype)
    if tail != "some":
        rows.visible[:] = tail == "full"
        rows.visible[:, CURSOR] = True
    out, *tails = rows.attend(function, sinks=sinks, dtype=dtype, num_segments=1 + dim % 3)
    expected = rows.expected(sinks=sinks)
    atol = {F32: 2e-6, F16: 1e-3, BF16: 8e-3}[dtype]
    np.testing.assert_allclose(out, expected, atol=atol * max(1, np.abs(expected).max()))
    for new_tail, old, new in zip(tails, rows.tails, rows.new, strict=True):
        old[:, :, CURSOR] = new[:, :, 0]
        np.testing.assert_array_equal(new_tail, old)


@pytest.mark.parametrize(
    ("heads", "dim", "lengths", "rotation", "normed", "dtype"),
    [  # dims, whether traditional, base; of 600 columns a row has two stretches
        ((4, 2), 64, (40, 0, 1), (64, False, 1e6), True, F32),  # Qwen3, Gemma 3
        ((4, 2), 128, (600, 3), (128, False, 1e4), True, BF16),
        ((8, 2), 256, (7, 7), (64, False, 1e7), True, F16),  # Qwen3.5: a quarter
        ((8, 1), 64, (3,), (64, False, None), False, BF16),  # gpt-oss: frequencies
        ((4, 4), 32, (9, 2), (16, True, 1e4), False, F32),  # GLM-4: pairs side by side
    ],
)
@pytest.mark.parametrize("function", [KERNEL])
def test_queries_and_keys_are_normed_and_rotated(
    function: AttendPacked,
    heads: tuple[int, int],
    dim: int,
    lengths: tuple[int, ...],
    rotation: tuple[int, bool, float | None],
    normed: bool,
    dtype: mx.Dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mlx's own operations do it, in float32, at positions far apart."""
    monkeypatch.setattr(EmulatedKernel, "orders", (FORWARD,))
    rows = Rows(lengths, heads, dim, seed=dim)
    rows.round_to(dtype)
    dims, traditional, base = rotation
    freqs = None if base is not None else mx.exp(mx.arange(dims // 2) * 0.3)
    norms = [Norm(mx.random.normal((dim,), key=mx.random.key(n)), 1e-5) for n in (0, 1)]
    ropes = tuple(
        Rope(dims, traditional, base, 0.5, freqs, norm if normed else None, 1.0 if base else 1.3)
        for norm in norms
    )
    options: dict[str, Any] = {"sinks": False, "num_segments": 2, "ropes": ropes}
    found = rows.attend(function, dtype=dtype, **options)
    expected = rows.attend(attend_joined, **options)
    atol = {F32: 5e-6, F16: 2e-3, BF16: 1.6e-2}[dtype]
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=atol * max(1, np.abs(plain).max()))


@pytest.mark.parametrize(
    ("architecture", "stretches"),
    [("applegpu_g13g", 20), ("applegpu_g16s", 40), ("applegpu_g14d", 80), ("sm_90", 20)],
)
def test_short_rows_are_one_stretch_and_long_ones_fill_a_gpu(
    architecture: str, stretches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda _: {"architecture": architecture})
    form = Form.of(16, 8, (128, 128), 2)
    assert cut(8, 100, form) == cut(256, 500, form) == (1, 256)
    assert cut(8, 8000, form) == (stretches, 128)
    assert cut(8, 1000, form) == (15, 128)  # of 64 columns at least
    assert cut(80, 8000, form) == (stretches // 10, 128)
    assert cut(2048, 100_000, form) == (1, 128)
