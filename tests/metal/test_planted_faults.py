"""The emulator reports kernels with a fault in them, and runs those without one.

Of mlx-lm's they agree with its plain operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm

from metal.compiled_kernel import CompileError
from metal.emulator import RANDOM, EmulatedKernel, needs_clang, use_emulator
from metal.generated_source import KernelFault

pytestmark = [needs_clang, pytest.mark.slow]

REVERSE = """
    threadgroup float shared[SIZE];
    uint me = thread_position_in_threadgroup.x;
    shared[me] = inp[thread_position_in_grid.x];
    SYNC
    out[thread_position_in_grid.x] = shared[SIZE - 1 - me];
"""


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(source: str, *, threads: int = 64, size: int = 128, **options: Any) -> np.ndarray:
    kernel = EmulatedKernel("planted", ["inp"], ["out"], source, options.pop("header", ""))
    kernel.orders = options.pop("orders", kernel.orders)
    inputs = [mx.arange(size, dtype=mx.float32)]
    (out,) = launch(kernel, inputs, (size, mx.float32), size=size, threads=threads, **options)
    return np.array(out)


def launch(
    kernel: EmulatedKernel,
    inputs: Sequence[Any],
    *outputs: tuple[int | tuple[int, ...], mx.Dtype],
    size: int = 32,
    threads: int = 32,
    **options: Any,
) -> list[mx.array]:
    return kernel(
        inputs=inputs,
        output_shapes=[shape if isinstance(shape, tuple) else (shape,) for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=(size, 1, 1),
        threadgroup=(threads, 1, 1),
        **options,
    )


def reverse(size: int = 64, sync: str = BARRIER) -> str:
    return REVERSE.replace("SIZE", str(size)).replace("SYNC", sync)


def test_threads_exchange_numbers_through_threadgroup_memory() -> None:
    expected = np.arange(128.0).reshape(2, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(run(reverse(), orders=(0, 1, RANDOM)), expected)


@pytest.mark.parametrize(
    "sync",
    [
        "",
        "threadgroup_barrier(mem_flags::mem_device);",
        "threadgroup_barrier(mem_flags::mem_none);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
)
def test_a_missing_barrier_is_a_race(sync: str) -> None:
    """Whichever thread runs first: one of the two reads too early."""
    for order in (0, 1, RANDOM):
        with pytest.raises(KernelFault, match=r"race: read after write|which nothing has written"):
            run(reverse(sync=sync), orders=(order,))


def test_lanes_of_a_simd_group_need_its_barrier_alone() -> None:
    sync = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    expected = np.arange(128.0).reshape(4, 32)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(run(reverse(32, sync), threads=32), expected)


def test_a_missing_second_barrier_is_a_race() -> None:
    """Threads overwrite what others have not read yet."""
    again = "shared[me] = 0.0f;"
    with pytest.raises(KernelFault, match=r"race: (write after read|read after write)"):
        run(reverse() + again)
    run(reverse() + BARRIER + again)


def test_two_threads_that_write_one_place() -> None:
    write = "out[thread_position_in_grid.x / 2] = {};  out[64 + thread_position_in_grid.x / 2] = 0;"
    run(write.format("1.0f"))  # the same: mlx-lm's kernels do it
    with pytest.raises(KernelFault, match="race: write after write"):
        run(write.format("inp[thread_position_in_grid.x]"))


def test_two_threadgroups_that_write_one_place() -> None:
    with pytest.raises(KernelFault, match="another threadgroup"):
        run("out[thread_position_in_threadgroup.x] = inp[thread_position_in_grid.x];")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("out[i] = inp[i + 1];", "out of bounds: reads 4 bytes at byte 512 of inp, which has 512"),
        ("out[i + 1] = inp[i];", "out of bounds: writes 4 bytes at byte 512 of out"),
        ("out[i] = inp[int(i) - 1];", "out of bounds: reads 4 bytes at byte -4 of inp"),
        ("float own[4] = {}; out[i] = own[i % 5];", "an index past its array's end"),
        (
            "threadgroup float a[8], b[8]; a[i % 9] = 1; out[i] = 0;",
            "an index past its array's end",
        ),
        ("out[i] = i / (i - i);", "a division by zero"),
    ],
)
def test_an_index_out_of_bounds(source: str, words: str) -> None:
    with pytest.raises(KernelFault, match=words):
        run(f"uint i = thread_position_in_grid.x; {source}")


def test_memory_that_nothing_wrote() -> None:
    source = """
        threadgroup float tail[64];
        uint me = thread_position_in_threadgroup.x;
        if (me < 60) tail[me] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = tail[me];
    """
    with pytest.raises(KernelFault, match="byte 240 of threadgroup memory, which nothing has writ"):
        run(source)
    with pytest.raises(KernelFault, match="of out, which nothing has written"):
        run("out[thread_position_in_grid.x] += 1;")
    np.testing.assert_array_equal(run("out[thread_position_in_grid.x] += 1;", init_value=2), 3)


def test_an_output_that_is_not_written_is_not_a_number() -> None:
    out = run("uint i = thread_position_in_grid.x; if (i != 5) out[i] = 0;")
    assert np.isnan(out[5])
    assert not np.isnan(np.delete(out, 5)).any()


def test_threadgroup_memory_is_32_kib() -> None:
    source = """
        threadgroup float sums[8][8][SIZE], totals[8][8], tops[8][8];
        uint i = thread_position_in_threadgroup.x;
        sums[i / 8][i % 8][0] = totals[i / 8][i % 8] = tops[i / 8][i % 8] = 0;
        out[thread_position_in_grid.x] = 0;
    """
    np.testing.assert_array_equal(run(source.replace("SIZE", "126")), 0)
    with pytest.raises(KernelFault, match="33280 bytes of threadgroup memory: Metal has 32768"):
        run(source.replace("SIZE", "128"))


def test_a_simd_group_has_32_lanes() -> None:
    wide = """
        float sum = inp[thread_position_in_grid.x];
        for (int step = FIRST; step > 0; step /= 2) sum += simd_shuffle_xor(sum, step);
        out[thread_position_in_grid.x] = sum;
    """
    expected = np.arange(128.0).reshape(4, 32).sum(axis=1).repeat(32)
    np.testing.assert_array_equal(run(wide.replace("FIRST", "16")), expected)
    with pytest.raises(KernelFault, match="SIMD shuffle from lane 32 of 32"):
        run(wide.replace("FIRST", "32"))
    with pytest.raises(KernelFault, match="which does not take part"):
        run(wide.replace("FIRST", "16"), size=80)  # the last threadgroup has 16


def test_lanes_that_returned_take_no_part_in_a_sum() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = 0;
        if (i % 32 >= 4) return;
        out[i] = simd_sum(1.0f);
    """
    np.testing.assert_array_equal(run(source), (np.arange(128) % 32 < 4) * 4.0)


def test_threads_and_lanes_that_wait_at_different_places() -> None:
    source = "if (thread_position_in_threadgroup.x == 3) return; SYNC out[0] = 1;"
    with pytest.raises(KernelFault, match="threadgroup_barrier is reached by 63 of 64 threads"):
        run(source.replace("SYNC", BARRIER))
    source = """
        bool odd = thread_index_in_simdgroup % 2;
        out[thread_position_in_grid.x] = odd ? simd_sum(1.0f) : simd_shuffle_xor(1.0f, 2);
    """
    with pytest.raises(KernelFault, match="wait at different SIMD operations"):
        run(source)


def test_threads_of_a_threadgroup_are_limited() -> None:
    with pytest.raises(KernelFault, match="Metal runs 1 to 1024"):
        run("out[thread_position_in_grid.x] = 0;", threads=1056, size=2112)
    with pytest.raises(KernelFault, match="40 threads: no multiple of a SIMD group's 32"):
        run("out[thread_position_in_grid.x] = 0;", threads=40, size=80)


def test_a_name_that_mlx_does_not_declare_does_not_compile() -> None:
    """mlx looks for the names of attributes in the source, not in the header."""
    header = "#define HERE thread_position_in_threadgroup.x\n"
    with pytest.raises(CompileError, match="thread_position_in_threadgroup"):
        run("out[thread_position_in_grid.x] = HERE;", header=header)


@pytest.mark.parametrize(("size", "space"), [(4, "device"), (64, "constant")])
def test_a_pointer_into_the_other_address_space(size: int, space: str) -> None:
    """Metal's compiler refuses it; an input of fewer than eight numbers is in `constant`."""
    kernel = EmulatedKernel(
        *("points", ["inp"], ["out"]),
        f"const {space} float* first = inp + 1; out[thread_position_in_grid.x] = first[0];",
    )
    with pytest.raises(KernelFault, match=f"a pointer to {space} points into inp"):
        launch(kernel, [mx.zeros(size)], (32, mx.float32))


def test_metal_takes_31_buffers() -> None:
    names = [f"inp{n}" for n in range(31)]
    kernel = EmulatedKernel(
        "many", names, ["out"], f"out[thread_position_in_grid.x] = {' + '.join(names)};"
    )
    with pytest.raises(KernelFault, match="32 buffers: Metal takes 31"):
        launch(kernel, [1.0] * 31, (32, mx.float32))


def test_atomic_sums_are_no_race() -> None:
    kernel = EmulatedKernel(
        *("atomic_sum", ["inp"], ["out"]),
        "atomic_fetch_add_explicit(&out[0], inp[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    inputs = [mx.arange(128, dtype=mx.float32)]
    (out,) = launch(kernel, inputs, (1, mx.float32), size=128, init_value=0)
    assert out.item() == 127 * 64


def test_the_last_threadgroup_may_be_smaller() -> None:
    out = run("out[thread_position_in_grid.x] = threads_per_threadgroup.x;", size=80)
    np.testing.assert_array_equal(out, [64] * 64 + [16] * 16)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_small_floats_round_as_mlx_does(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    wide = mx.array(np.concatenate([bits, bits >> 5 << 5 | 0x3F000000])).view(mx.float32)
    kernel = EmulatedKernel(
        *("rounds", ["inp", "inp2"], ["out", "product", "widened"]),
        """
        uint i = thread_position_in_grid.x;
        out[i] = static_cast<T>(inp[i]);
        product[i] = inp2[i] * inp2[i] + T(1.5f);
        widened[i] = inp2[i];
        """,
    )
    small = wide.astype(dtype)
    size = wide.size
    outputs = [(size, dtype), (size, dtype), (size, mx.float32)]
    template = [("T", dtype)]
    out, product, widened = launch(
        kernel, [wide, small], *outputs, size=size, threads=64, template=template
    )
    for got, expected in (
        (out, small),
        (product, (small * small) + mx.array(1.5, dtype)),
        (widened, small.astype(mx.float32)),
    ):
        same = mx.array_equal(got, expected, equal_nan=True)
        assert same.item()


def test_inputs_may_be_slices() -> None:
    whole = mx.arange(128, dtype=mx.bfloat16).reshape(4, 32)
    part = whole[:, 8:16]
    kernel = EmulatedKernel(
        *("strided", ["inp"], ["out"]),
        """
        uint i = thread_position_in_grid.x;
        out[i] = inp[i / inp_shape[1] * inp_strides[0] + i % inp_shape[1] * inp_strides[1]];
        """,
        ensure_row_contiguous=False,
    )
    (out,) = launch(kernel, [part], ((4, 8), mx.bfloat16))
    assert mx.array_equal(out, part).item()


TOLERANCES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}


dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch)


def worst(one: mx.array, other: mx.array) -> float:
    difference = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()
    return float(difference) / max(1.0, float(mx.abs(other.astype(mx.float32)).max().item()))


def gated_delta_inputs(dtype: mx.Dtype, *, key_dim: int, vector_gate: bool) -> dict[str, mx.array]:
    mx.random.seed(key_dim)
    shape, key_heads, heads, dim = (2, 3), 2, 4, 16
    keys = {
        name: (mx.random.normal((*shape, key_heads, key_dim)) * key_dim**-0.5).astype(dtype)
        for name in "qk"
    }
    gates = (*shape, heads, key_dim) if vector_gate else (*shape, heads)
    return {
        **keys,
        "v": mx.random.normal((*shape, heads, dim)).astype(dtype),
        "g": mx.random.uniform(shape=gates),
        "beta": mx.random.uniform(shape=(*shape, heads)).astype(dtype),
        "state": mx.random.normal((shape[0], heads, dim, key_dim)),
    }


@dtypes
@pytest.mark.parametrize("vector_gate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, vector_gate: bool, masked: bool
) -> None:
    name = "_gated_delta_kernel" + "_vec" * vector_gate + "_masked" * masked
    kernel = gated_delta._make_gated_delta_kernel(has_mask=masked, vectorized=vector_gate)
    monkeypatch.setattr(gated_delta, name, kernel)
    inputs: dict[str, Any] = gated_delta_inputs(dtype, key_dim=64, vector_gate=vector_gate)
    mask = mx.array([[True, True, False], [True, False, True]])
    if masked:
        inputs["mask"] = mask
    y, state = gated_delta.gated_delta_kernel(**inputs)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs)
    if masked:
        expected = mx.where(mask[..., None, None], expected, 0)
    assert worst(y, expected) < TOLERANCES[dtype]
    assert worst(state, expected_state) < TOLERANCES[mx.float32]


@dtypes
def test_packed_gated_delta(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    """mlx-lm promises the same bits as its unpacked kernel with the sums written out."""
    packed = gated_delta._make_gated_delta_packed_kernel()
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", packed)
    unpacked = gated_delta._make_gated_delta_kernel_xtree()
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_xtree", unpacked)
    inputs = gated_delta_inputs(dtype, key_dim=128, vector_gate=False)
    y, state = gated_delta.gated_delta_kernel(**inputs)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs)
    assert worst(y, expected) < TOLERANCES[dtype]
    assert worst(state, expected_state) < TOLERANCES[mx.float32]
    for ours, theirs in zip(
        (y, state), gated_delta.gated_delta_kernel_xtree(**inputs), strict=True
    ):
        assert mx.array_equal(ours, theirs).item()


@dtypes
def test_ssm(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
    mx.random.seed(0)
    rows, heads, groups, dim, state_dim = 2, 4, 2, 8, 64
    x = mx.random.normal((rows, 1, heads, dim)).astype(dtype)
    b, c = (mx.random.normal((rows, 1, groups, state_dim)).astype(dtype) for _ in range(2))
    a_log, d, bias = (mx.random.normal((heads,)) for _ in range(3))
    dt = mx.random.normal((rows, 1, heads)).astype(dtype)
    state = mx.random.normal((rows, heads, dim, state_dim))
    call = (x, a_log, b, c, d, dt, bias, state, (0.001, 100.0))
    out, new_state = ssm.ssm_update_kernel(*call)
    expected, expected_state = ssm.ssm_attn(*call)
    assert worst(out, expected) < TOLERANCES[dtype]
    assert worst(new_state, expected_state) < TOLERANCES[dtype]


@dtypes
def test_a_norm_that_adds_up_in_threadgroup_memory(dtype: mx.Dtype) -> None:
    theirs = import_module("mlx_lm.kernels.norm_add_norm")
    kernel = EmulatedKernel(
        *("pre_norm", ["stream", "pre_w", "pre_eps"], ["normed"]),
        *(theirs._PRE_NORM_ONLY, theirs._BLOCK_SUM_ONCE_HEADER),
    )
    mx.random.seed(0)
    stream, weight = mx.random.normal((3, 200)), mx.random.normal((200,))
    template = [("T", dtype), ("D", 200), ("TG", 96)]
    given = [stream, weight, 1e-5]
    (out,) = launch(kernel, given, ((3, 200), dtype), size=3 * 96, threads=96, template=template)
    assert worst(out, mx.fast.rms_norm(stream, weight, 1e-5)) < TOLERANCES[dtype]
    assert kernel.threadgroup_bytes == 256
