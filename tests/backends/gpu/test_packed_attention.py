"""Attention over packed rows and over latents: kernels and plain forms against numpy, in float64.

Where there is no Metal, the kernels run in the emulator of tests/metal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS
from metal.compiled_kernel import CLANG
from metal.emulator import BACKWARD, FORWARD, EmulatedKernel, use_emulator
from metal.generated_source import KernelFault
from metal.packed_rows import LatentRows, Rows
from pippin.backends.mlx import trial_run
from pippin.backends.mlx.attention.head_ropes import Norm, Rope, head_norms
from pippin.backends.mlx.attention.packed_rows import MOST_SEGMENTS, AttendPacked, attend_joined
from pippin.backends.mlx.gpu import latent_attention
from pippin.backends.mlx.gpu.latent_attention import BLOCKS_PER_CORE, LatentForm, attend_latents
from pippin.backends.mlx.gpu.packed_attention import Form, attend_packed, cut, num_stretches
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.load import prepare
from pippin.backends.mlx.trial_run import deferred_norms, kernel_of, packed_rows
from pippin.types import Component
from small_models import build_from

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


NEEDS_KERNEL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (mx.metal.is_available() or CLANG), reason="needs Metal, or clang for the emulator"
    ),
]


Make = Callable[[Sequence[int]], Rows]


def packed(lengths: Sequence[int]) -> Rows:
    return Rows(lengths, (8, 2), 128, seed=0)


def latents(lengths: Sequence[int]) -> Rows:
    return LatentRows(lengths, 4, (64, 32), seed=0)


KERNEL = pytest.param(attend_packed, marks=NEEDS_KERNEL, id="kernel")


LATENT_KERNEL = pytest.param(attend_latents, marks=NEEDS_KERNEL, id="kernel")


JOINED = pytest.param(attend_joined, id="joined")


KERNELS = [
    pytest.param(attend_packed, packed, marks=NEEDS_KERNEL, id="kernel"),
    pytest.param(attend_latents, latents, marks=NEEDS_KERNEL, id="kernel of latents"),
]


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the emulator, unless there is Metal."""
    if not mx.metal.is_available():
        use_emulator(monkeypatch)


def check(
    rows: Rows,
    function: AttendPacked,
    *,
    sinks: bool = False,
    dtype: mx.Dtype = mx.float32,
    num_segments: int = 1,
) -> None:
    rows.round_to(dtype)
    out, *tails = rows.attend(function, sinks=sinks, dtype=dtype, num_segments=num_segments)
    expected = rows.expected(sinks=sinks)
    atol = {F32: 3e-6, F16: 1e-3, BF16: 1e-2}[dtype]
    np.testing.assert_allclose(out, expected, atol=atol * max(1, np.abs(expected).max()))
    for found, wanted in zip(tails, rows.expected_tails(), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "sinks", "first"),
    [
        ([5], (16, 8), 128, False, 0),
        ([300, 0, 77], (4, 1), 256, True, 0),
        ([700, 1], (8, 1), 64, True, 0),
        ([100, 3, 64, 65, 99], (9, 3), 64, False, 0),
        ([130, 400], (8, 1), 96, True, 0),
        ([5], (9, 3), 64, True, 0),
        ([90], (9, 3), 64, True, 7),
    ],
)
def test_rows_of_all_lengths(
    function: AttendPacked,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    sinks: bool,
    first: int,
) -> None:
    """`first`: columns that a row's window has passed by."""
    rows = Rows(lengths, heads, dim, seed=len(lengths), first=first)
    check(rows, function, sinks=sinks, num_segments=1 + len(lengths) % MOST_SEGMENTS)


@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [([512], (8, 2), 256), ([512, 40, 7, 300], (8, 2), 256), ([8000, 300], (16, 8), 128)],
)
def test_half_precision(lengths: list[int], heads: tuple[int, int], dim: int) -> None:
    rows = Rows(lengths, heads, dim, seed=1)
    rows.round_to(mx.bfloat16)
    out, *_ = rows.attend(attend_joined, dtype=mx.bfloat16)
    expected = rows.expected()
    assert np.abs(out - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(("function", "make"), KERNELS)
def test_what_no_row_sees_may_be_anything(function: AttendPacked, make: Make) -> None:
    rows = make([40, 9])
    expected = rows.expected()
    rows.mains[:, :, 49:] = np.nan
    for row in range(2):
        rows.tails[:, row][:, :, ~rows.visible[row]] = np.inf
    out, *_ = rows.attend(function)
    np.testing.assert_allclose(out, expected, atol=3e-6)


@pytest.mark.parametrize(
    ("function", "make"), [*KERNELS, (attend_joined, packed), (attend_joined, latents)]
)
def test_a_row_reads_no_columns_of_others(function: AttendPacked, make: Make) -> None:
    rows = make([40, 9, 30])
    expected = rows.expected()
    rows.mains[:, :, :40] = np.nan  # row 0 overflowed
    rows.mains[:, :, 79:] = np.nan
    out, *_ = rows.attend(function, num_segments=2)
    np.testing.assert_allclose(out[1:], expected[1:], atol=3e-6)


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
    rows.see_of_tails(tail)
    check(rows, function, sinks=sinks, dtype=dtype, num_segments=1 + dim % 3)


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
    norms = [Norm(mx.random.normal((dim,), key=mx.random.key(n)), 1e-5) for n in (0, 1)]
    check_rotated(rows, function, rotation, norms if normed else [None, None], dtype)


def check_rotated(
    rows: Rows,
    function: AttendPacked,
    rotation: tuple[int, bool, float | None],
    norms: Sequence[Norm | None],
    dtype: mx.Dtype,
    query_gain: float = 1.0,
) -> None:
    dims, traditional, base = rotation
    freqs = None if base is not None else mx.exp(mx.arange(dims // 2) * 0.3)
    gain = 1.0 if base else 1.3
    ropes = (
        Rope(dims, traditional, base, 0.5, freqs, norms[0], gain * query_gain),
        Rope(dims, traditional, base, 0.5, freqs, norms[1], gain),
    )
    found = rows.attend(function, dtype=dtype, num_segments=2, ropes=ropes)
    expected = rows.attend(attend_joined, num_segments=2, ropes=ropes)
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


@pytest.mark.parametrize("function", [LATENT_KERNEL, JOINED])
@pytest.mark.parametrize(
    ("num_heads", "dims", "lengths", "tail", "num_segments", "dtype"),
    [
        (16, (512, 64), RAGGED, "some", 2, F16),  # DeepSeek V2 Lite
        (20, (512, 64), (3, 50), "full", 4, BF16),  # GLM-4.7-Flash
        (20, (512, 64), (30,), "empty", 1, F32),
        (32, (512, 64), (5,), "some", 3, F32),  # Kimi Linear
        (64, (512, 64), (7, 2), "empty", 2, BF16),  # Kimi K2, LongCat Flash
        (128, (512, 64), (9,), "empty", 1, F16),  # DeepSeek V3
        (128, (512, 64), (1,), "full", 1, F32),
        (4, (64, 32), MANY, "some", 1, F16),
        (4, (64, 32), MANY, "some", 4, F32),
        (18, (128, 32), (300, 3), "full", 2, BF16),  # the last block has a SIMD group to spare
        (7, (64, 32), RAGGED, "some", 2, F32),
    ],
)
def test_latents_of_served_models(
    function: AttendPacked,
    num_heads: int,
    dims: tuple[int, int],
    lengths: tuple[int, ...],
    tail: str,
    num_segments: int,
    dtype: mx.Dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in one order of threads: both are run elsewhere, and cost twice the time."""
    order = BACKWARD if num_segments % 2 else FORWARD
    monkeypatch.setattr(EmulatedKernel, "orders", (order,))
    rows = LatentRows(lengths, num_heads, dims, seed=num_heads)
    rows.see_of_tails(tail)
    check(rows, function, dtype=dtype, num_segments=num_segments)


@pytest.mark.parametrize("function", [LATENT_KERNEL, JOINED])
@pytest.mark.parametrize(("first", "lengths"), [(0, (700,)), (0, (300, 0)), (7, (90, 5))])
def test_rows_of_one_stretch_and_of_several(
    function: AttendPacked, first: int, lengths: tuple[int, ...]
) -> None:
    """`first`: columns that a window has passed by."""
    check(LatentRows(lengths, 6, (64, 32), seed=3, first=first), function, num_segments=2)


@pytest.mark.parametrize("function", [LATENT_KERNEL])
@pytest.mark.parametrize(
    ("rotation", "dtype"),
    [((64, True, 1e4), F32), ((64, True, None), BF16), ((32, False, 1e6), F16)],
)
def test_queries_and_keys_beside_latents_are_rotated(
    function: AttendPacked, rotation: tuple[int, bool, float | None], dtype: mx.Dtype
) -> None:
    rows = LatentRows((150, 3), 4, (64, 64), seed=1)
    rows.round_to(dtype)
    check_rotated(rows, function, rotation, (None, None), dtype, query_gain=rows.scale)


@pytest.mark.slow
@pytest.mark.parametrize("function", [LATENT_KERNEL])
def test_a_model_is_held_against_plain_operations_at_load(
    function: AttendPacked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rotations are left to the kernel; where that is off, it is not used."""
    monkeypatch.setattr(EmulatedKernel, "orders", (FORWARD,))
    monkeypatch.setattr(trial_run, "on_metal", lambda: True)
    config = CONFIGS["deepseek_v3"] | {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
    loaded = prepare(build_from(config), config)
    kernel = packed_rows(loaded.layout, loaded.forward)
    assert kernel is function
    norms = head_norms(loaded.model)
    assert deferred_norms(loaded.layout, loaded.forward, kernel, norms) is not None
    broken = latent_attention.ATTEND_LATENTS.replace("product *= scale;", "")
    monkeypatch.setattr(latent_attention, "ATTEND_LATENTS", broken)
    assert packed_rows(loaded.layout, loaded.forward) is None
    assert "the kernel is off" in caplog.text


def test_other_layers_have_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "on_metal", lambda: True)
    for dims, taken in (((512, 64), True), ((512, 16), False), ((1024, 64), False)):
        sides, types = ((1, dims[0]), (1, dims[1])), (F16, F16)
        cache = LayerCache(0, Component.ATTENTION, None, sides, types, Reads.LATENT)
        assert (kernel_of(Layout((cache,), (0,))) is attend_latents) is taken


def test_a_form_fits_a_device() -> None:
    for num_heads in (1, 7, 16, 20, 32, 40, 64, 128):
        for dims in ((512, 64), (256, 32), (256, 64), (64, 32)):
            for size in (2, 4):
                form = LatentForm.of(num_heads, dims, size)
                latent, rotated = (dim // 32 for dim in dims)
                assert form.queries * (latent * size / 4 + rotated + latent) <= 64
                assert form.queries * form.warps * form.blocks >= num_heads
                assert num_heads % form.queries == 0
                assert form.vec * size <= 16
                assert latent % form.vec == 0
                assert form.tile % 2 == 0
                assert (form.tile + 1) * sum(dims) * size + form.tile <= 32_768


@pytest.mark.parametrize(("architecture", "most"), [("applegpu_g15s", 120), ("applegpu_g14d", 240)])
def test_long_rows_fill_a_gpu(
    architecture: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda _: {"architecture": architecture})
    assert num_stretches(1, 100, BLOCKS_PER_CORE) == 1
    assert num_stretches(1, 512, BLOCKS_PER_CORE) == 8  # of 64 columns at least
    assert num_stretches(1, 100_000, BLOCKS_PER_CORE) == most
    assert num_stretches(8, 100_000, BLOCKS_PER_CORE) == most // 8
    assert num_stretches(1000, 100_000, BLOCKS_PER_CORE) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  // fresh\n", "", "race|which nothing has written"),
        ("  // tile\n", "", "race|which nothing has written"),
        ("  // all have read the tile\n", "", "race"),
        ("threadgroup_position_in_grid.z;", "threadgroup_position_in_grid.z + 1;", "out of bounds"),
        ("tile[Tile * CHUNKS]", "tile[(Tile - 1) * CHUNKS]", "race|out of bounds"),
        ("tile[Tile * CHUNKS]", "tile[32768 / sizeof(Chunk)]", "Metal has 32768"),
    ],
)
@pytest.mark.parametrize("function", [LATENT_KERNEL])
def test_a_fault_in_the_kernel_of_latents_is_reported(
    function: AttendPacked, old: str, new: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = latent_attention.ATTEND_LATENTS
    if not new:  # a barrier, by the comment behind it
        old = f"threadgroup_barrier(mem_flags::mem_threadgroup);{old}"
    assert source.count(old) == 1
    monkeypatch.setattr(latent_attention, "ATTEND_LATENTS", source.replace(old, new))
    monkeypatch.setattr(latent_attention, "num_stretches", lambda *_: 4)
    rows = LatentRows([40, 3], 16, (64, 32), seed=0)
    with pytest.raises(KernelFault, match=words):
        rows.attend(function)
