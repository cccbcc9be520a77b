"""Attention over packed latents: the kernel and its plain form against numpy, in float64.

Where there is no Metal, the kernel runs in the emulator of tests/metal.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS
from metal.compiled_kernel import CLANG
from metal.emulator import BACKWARD, FORWARD, EmulatedKernel, use_emulator
from metal.faults import KernelFault
from metal.latent_rows import LatentRows
from metal.packed_rows import CURSOR
from pippin.backends.mlx import trial_run
from pippin.backends.mlx.attention.head_ropes import Rope, head_norms
from pippin.backends.mlx.attention.paths import AttendPacked
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.gpu import latent_attention
from pippin.backends.mlx.gpu.latent_attention import BLOCKS_PER_CORE, LatentForm, attend_latents
from pippin.backends.mlx.gpu.packed_attention import num_stretches
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.load import prepare
from pippin.backends.mlx.trial_run import deferred_norms, kernel_of, packed_rows
from pippin.types import Component
from small_models import build_from

NEEDS_KERNEL = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (mx.metal.is_available() or CLANG), reason="needs Metal, or clang for the emulator"
    ),
]
KERNEL = pytest.param(attend_latents, marks=NEEDS_KERNEL, id="kernel")
JOINED = pytest.param(attend_joined, id="joined")
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
RAGGED, MANY = (40, 0, 1), (1, 0, 30, 2) * 16


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the emulator, unless there is Metal."""
    if not mx.metal.is_available():
        use_emulator(monkeypatch)


def check(
    rows: LatentRows, function: AttendPacked, *, dtype: mx.Dtype = F32, num_segments: int = 1
) -> None:
    rows.round_to(dtype)
    out, *tails = rows.attend_latents(function, dtype=dtype, num_segments=num_segments)
    expected = rows.expected()
    atol = {F32: 3e-6, F16: 1e-3, BF16: 1e-2}[dtype]
    np.testing.assert_allclose(out, expected, atol=atol * max(1, np.abs(expected).max()))
    tail = rows.tails[0]
    tail[:, :, CURSOR] = rows.new[0][:, :, 0]
    for found, expected in zip(tails, np.split(tail, [rows.dim], axis=-1), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("function", [KERNEL, JOINED])
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
    if tail != "some":
        rows.visible[:] = tail == "full"
        rows.visible[:, CURSOR] = True
    check(rows, function, dtype=dtype, num_segments=num_segments)


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize(("first", "lengths"), [(0, (700,)), (0, (300, 0)), (7, (90, 5))])
def test_rows_of_one_stretch_and_of_several(
    function: AttendPacked, first: int, lengths: tuple[int, ...]
) -> None:
    """`first`: columns that a window has passed by."""
    check(LatentRows(lengths, 6, (64, 32), seed=3, first=first), function, num_segments=2)


@pytest.mark.parametrize("function", [KERNEL])
def test_what_no_row_sees_may_be_anything(function: AttendPacked) -> None:
    rows = LatentRows([40, 9], 4, (64, 32), seed=0)
    rows.values_are_keys()
    expected = rows.expected()
    rows.mains[:, :, 49:] = np.nan
    for row in range(2):
        rows.tails[:, row][:, :, ~rows.visible[row]] = np.inf
    out, *_ = rows.attend_latents(function)
    np.testing.assert_allclose(out, expected, atol=3e-6)


@pytest.mark.parametrize("function", [KERNEL, JOINED])
def test_a_row_reads_no_columns_of_others(function: AttendPacked) -> None:
    rows = LatentRows([40, 9, 30], 4, (64, 32), seed=0)
    rows.values_are_keys()
    expected = rows.expected()
    rows.mains[:, :, :40] = np.nan  # row 0 overflowed
    rows.mains[:, :, 79:] = np.nan
    out, *_ = rows.attend_latents(function, num_segments=2)
    np.testing.assert_allclose(out[1:], expected[1:], atol=3e-6)


@pytest.mark.parametrize("function", [KERNEL])
@pytest.mark.parametrize(
    ("rotation", "dtype"),
    [((64, True, 1e4), F32), ((64, True, None), BF16), ((32, False, 1e6), F16)],
)
def test_queries_and_keys_are_rotated(
    function: AttendPacked, rotation: tuple[int, bool, float | None], dtype: mx.Dtype
) -> None:
    """As mlx's own operations do it, in float32, at positions far apart."""
    rows = LatentRows((150, 3), 4, (64, 64), seed=1)
    rows.round_to(dtype)
    dims, traditional, base = rotation
    freqs = None if base is not None else mx.exp(mx.arange(dims // 2) * 0.3)
    keys = Rope(dims, traditional, base, 0.5, freqs, None, 1.0 if base else 1.3)
    queries = Rope(dims, traditional, base, 0.5, freqs, None, keys.gain * rows.scale)
    ropes = queries, keys
    found = rows.attend_latents(function, dtype=dtype, num_segments=2, ropes=ropes)
    expected = rows.attend_latents(attend_joined, num_segments=2, ropes=ropes)
    atol = {F32: 5e-6, F16: 2e-3, BF16: 1.6e-2}[dtype]
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=atol * max(1, np.abs(plain).max()))


@pytest.mark.slow
@pytest.mark.parametrize("function", [KERNEL])
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
@pytest.mark.parametrize("function", [KERNEL])
def test_a_planted_fault_is_reported(
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
        rows.attend_latents(function)
