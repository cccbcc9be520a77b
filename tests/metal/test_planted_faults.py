"""The emulator reports kernels with a fault in them, and runs the same kernels without it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal.compiled_kernel import CompileError
from metal.emulator import RANDOM, EmulatedKernel, needs_clang
from metal.faults import KernelFault

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
    (out,) = kernel(
        inputs=[mx.arange(size, dtype=mx.float32)],
        output_shapes=[(size,)],
        output_dtypes=[mx.float32],
        **{"grid": (size, 1, 1), "threadgroup": (threads, 1, 1), **options},
    )
    return np.array(out)


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


def test_a_barrier_that_some_threads_do_not_reach() -> None:
    source = "if (thread_position_in_threadgroup.x == 3) return; SYNC out[0] = 1;"
    with pytest.raises(KernelFault, match="threadgroup_barrier is reached by 63 of 64 threads"):
        run(source.replace("SYNC", BARRIER))


def test_lanes_that_wait_at_different_operations() -> None:
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
        kernel(
            inputs=[mx.zeros(size)],
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )


def test_metal_takes_31_buffers() -> None:
    names = [f"inp{n}" for n in range(31)]
    kernel = EmulatedKernel(
        "many", names, ["out"], f"out[thread_position_in_grid.x] = {' + '.join(names)};"
    )
    with pytest.raises(KernelFault, match="32 buffers: Metal takes 31"):
        kernel(
            inputs=[1.0] * 31,
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )


def test_atomic_sums_are_no_race() -> None:
    kernel = EmulatedKernel(
        *("atomic_sum", ["inp"], ["out"]),
        "atomic_fetch_add_explicit(&out[0], inp[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    (out,) = kernel(
        inputs=[mx.arange(128, dtype=mx.float32)],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        init_value=0,
        grid=(128, 1, 1),
        threadgroup=(32, 1, 1),
    )
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
    out, product, widened = kernel(
        inputs=[wide, small],
        template=[("T", dtype)],
        output_shapes=[(size,)] * 3,
        output_dtypes=[dtype, dtype, mx.float32],
        grid=(size, 1, 1),
        threadgroup=(64, 1, 1),
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
    (out,) = kernel(
        inputs=[part],
        output_shapes=[(4, 8)],
        output_dtypes=[mx.bfloat16],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert mx.array_equal(out, part).item()
