"""Attention over packed rows: the kernel and its plain form against numpy, in float64.

Where there is no Metal, the kernel runs in the emulator of tests/metal.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from metal.compiled_kernel import CLANG
from metal.emulator import use_emulator
from pippin.backends.mlx.attention.paths import AttendPacked, PackedCall
from pippin.backends.mlx.attention.plain_attention import attend_in_pieces, attend_joined
from pippin.backends.mlx.gpu import packed_attention
from pippin.backends.mlx.gpu.packed_attention import Form, attend_packed, cut

TAIL, CURSOR = 64, 17
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
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the emulator, unless there is Metal."""
    packed_attention._kernels.cache_clear()
    if not mx.metal.is_available():
        use_emulator(monkeypatch)
    yield
    packed_attention._kernels.cache_clear()


class Rows:
    def __init__(self, lengths: list[int], heads: tuple[int, int], dim: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        width, (q_heads, kv_heads) = len(lengths), heads

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        self.q = normal(width, q_heads, 1, dim)
        self.new = normal(2, width, kv_heads, 1, dim)
        self.tails = normal(2, width, kv_heads, TAIL, dim)
        self.mains = normal(2, kv_heads, sum(lengths) + 37, dim)
        self.visible = rng.random((width, TAIL)) < 0.4
        self.visible[:, CURSOR] = True
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.places = np.stack([starts, lengths], axis=1).astype(np.int32)
        self.sinks = normal(q_heads)
        self.longest = max(lengths)

    def expected(self, *, sinks: bool) -> np.ndarray:
        width, q_heads, _, dim = self.q.shape
        repeats = q_heads // self.mains.shape[1]
        tails = self.tails.astype(np.float64)
        tails[:, :, :, CURSOR] = self.new[:, :, :, 0]
        out = np.zeros(self.q.shape)
        for row, head in np.ndindex(width, q_heads):
            start, n = self.places[row]
            keys, values = (
                np.concatenate([main[start : start + n], tail[self.visible[row]]])
                for main, tail in zip(
                    self.mains[:, head // repeats].astype(np.float64),
                    tails[:, row, head // repeats],
                    strict=True,
                )
            )
            scores = keys @ self.q[row, head, 0] * dim**-0.5
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(self.sinks[head]) if sinks else 0.0)
            out[row, head, 0] = weights @ values / total
        return out

    def round_to(self, dtype: mx.Dtype) -> None:
        """Numbers that this type holds."""
        for name in ("q", "new", "tails", "mains"):
            rounded = mx.array(getattr(self, name)).astype(dtype).astype(mx.float32)
            setattr(self, name, np.array(rounded))

    def attend(
        self, function: AttendPacked, *, sinks: bool, dtype: mx.Dtype = mx.float32
    ) -> list[np.ndarray]:
        def pair(sides: np.ndarray) -> tuple[mx.array, mx.array]:
            return mx.array(sides[0]).astype(dtype), mx.array(sides[1]).astype(dtype)

        call = PackedCall(
            mx.array(self.q).astype(dtype),
            *pair(self.new),
            pair(self.tails),
            pair(self.mains),
            mx.array(self.places),
            mx.array(self.visible),
            mx.array([CURSOR], dtype=mx.int32),
            self.q.shape[-1] ** -0.5,
            mx.array(self.sinks) if sinks else None,
            self.longest,
        )
        return [np.array(array.astype(mx.float32)) for array in function(call)]


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [
        ([512], (8, 2), 256),
        ([512], (16, 8), 128),
        ([512, 40, 7, 300], (8, 2), 256),
        ([4096], (8, 2), 256),
        ([8000, 300], (16, 8), 128),
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
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [
        ([5], (16, 8), 128),
        ([300, 0, 77], (8, 2), 256),
        ([2000, 1], (32, 4), 64),
        ([100, 3, 64, 65, 99], (9, 3), 64),
        ([130, 700], (32, 1), 96),
    ],
)
def test_rows_of_all_lengths(
    function: AttendPacked, sinks: bool, lengths: list[int], heads: tuple[int, int], dim: int
) -> None:
    rows = Rows(lengths, heads, dim, seed=len(lengths))
    out, keys, values = rows.attend(function, sinks=sinks)
    np.testing.assert_allclose(out, rows.expected(sinks=sinks), atol=2e-6)
    for tail, old, new in zip((keys, values), rows.tails, rows.new, strict=True):
        np.testing.assert_array_equal(tail[:, :, CURSOR], new[:, :, 0])
        others = np.arange(TAIL) != CURSOR
        np.testing.assert_array_equal(tail[:, :, others], old[:, :, others])


@pytest.mark.parametrize("function", [KERNEL, JOINED])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("first", "length"), [(0, 5), (0, 300), (7, 90)])
def test_the_only_row(function: AttendPacked, sinks: bool, first: int, length: int) -> None:
    """`first`: columns that its window has passed by."""
    rows = Rows([first + length], (9, 3), 64, seed=length)
    rows.places[0] = first, length
    for attend in (function, attend_in_pieces):
        out, keys, values = rows.attend(attend, sinks=sinks)
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
    out, *_ = rows.attend(function, sinks=False)
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)


def test_a_form_leaves_no_channel_out() -> None:
    for heads in ((8, 2), (16, 8), (32, 1), (9, 3), (7, 7)):
        for dim in (32, 64, 96, 128, 256, 512):
            for size in (2, 4):
                form = Form.of(*heads, (dim, dim), size)
                assert form.queries * form.shares == heads[0] // heads[1]
                assert dim % (form.lanes * form.vec) == 0
                assert form.vec * size <= 16
                shared = form.most_threads // 32 * form.queries * (dim + 2)
                assert shared * 4 <= 32_768
                assert 2 * form.queries * dim // form.lanes <= 64  # numbers that a lane keeps
                assert form.most_threads in (128, 256)


@pytest.mark.parametrize("function", [KERNEL])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim"),
    [
        *(((16, 8), 128), ((32, 8), 128), ((32, 4), 128), ((64, 8), 128), ((64, 4), 128)),
        *(((8, 2), 256), ((16, 2), 256), ((32, 2), 256), ((4, 1), 256), ((64, 8), 64)),
    ],
)
def test_head_shapes_of_served_models(
    function: AttendPacked, heads: tuple[int, int], dim: int, dtype: mx.Dtype
) -> None:
    """Tails that are full, and that hold one token alone."""
    rows = Rows([40, 0, 1], heads, dim, seed=dim)
    rows.round_to(dtype)
    rows.visible[0] = True
    rows.visible[1] = np.arange(TAIL) == CURSOR
    out, *_ = rows.attend(function, sinks=True, dtype=dtype)
    expected = rows.expected(sinks=True)
    atol = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(out, expected, atol=atol * max(1, np.abs(expected).max()))


def test_short_rows_are_one_stretch_and_long_ones_fill_a_gpu() -> None:
    form = Form.of(16, 8, (128, 128), 2)
    assert cut(8, 100, form) == cut(256, 500, form) == (1, 256)
    assert cut(8, 8000, form) == (66, 128)
    assert cut(256, 8000, form) == (2, 128)
    assert cut(2048, 100_000, form) == (1, 128)
