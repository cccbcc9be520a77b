"""Kernels that are compiled without mlx's headers: what is compiled, when, and what if not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pippin.backends.mlx.gpu import (
    cuda_layer,
    cuda_prefill,
    cuda_scan,
    cuda_step,
    nvrtc,
    packed_attention,
)
from pippin.backends.mlx.gpu.cuda_kernel import CudaKernel
from pippin.backends.mlx.gpu.nvrtc import CannotCompile, Compiler, loaded_compiler

SOURCE = "out[threadIdx.x] = static_cast<T>(Scale * float(x[x_shape[0] + y_shape[1]]));"


class Device:
    """Stands in for mlx and the compiler: remembers what either is asked for."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.launched: list[dict[str, Any]] = []
        self.left_to_mlx: list[dict[str, Any]] = []
        self.error: CannotCompile | None = None

    def compile(self, source: str) -> bytes:
        self.sources.append(source)
        if self.error is not None:
            raise self.error
        return b"code %d" % len(self.sources)

    def precompiled(self, **call: Any) -> list[mx.array]:
        self.launched.append(call)
        return [mx.zeros(shape) for shape in call["output_shapes"]]

    def make_kernel(self, **made: Any) -> Callable[..., list[mx.array]]:
        def run(**call: Any) -> list[mx.array]:
            self.left_to_mlx.append(made | call)
            return [mx.zeros(shape) for shape in call["output_shapes"]]

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", device.precompiled)
    monkeypatch.setattr(mx.fast, "cuda_kernel", device.make_kernel)
    yield device
    packed_attention._kernels.cache_clear()  # what was made here is no kernel


@pytest.fixture
def kernel(device: Device) -> CudaKernel:
    return CudaKernel(
        "scaled",
        input_names=["x", "y"],
        output_names=["out"],
        source=SOURCE,
        header="#define HERE",
        compile=device.compile,
    )


def run(
    kernel: CudaKernel, dtype: mx.Dtype = mx.bfloat16, *, scale: int = 3, rows: int = 2
) -> None:
    (out,) = kernel(
        inputs=[mx.zeros((rows, 5), dtype), mx.zeros((7, 1), mx.int32)],
        template=[("T", dtype), ("Scale", scale), ("Whole", True)],
        grid=(rows, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[dtype],
    )
    assert out.shape == (rows,)


def test_the_source_has_its_arguments_in_mlx_order_and_its_constants(
    kernel: CudaKernel, device: Device
) -> None:
    run(kernel)
    (source,), (launch,) = device.sources, device.launched
    name = launch["name"]
    extents = "int x_extent_0, int x_extent_1, int y_extent_0, int y_extent_1"
    assert f"{name}(const bfloat16* x, const int* y, bfloat16* out, {extents}) {{" in source
    assert source.index("#define HERE") < source.index('extern "C" __global__ void') < len(source)
    for line in (
        "using T = bfloat16;",
        "constexpr int Scale = 3;",
        "constexpr bool Whole = true;",
        "const int y_shape[] = {y_extent_0, y_extent_1};",
        "const int x_shape[] = {x_extent_0, x_extent_1};",
        SOURCE,
    ):
        assert line in source
    assert launch["scalars"] == [2, 5, 7, 1], "what the extents are, in their order"
    assert launch["compiled_source"] == b"code 1"
    assert launch["ensure_row_contiguous"] is True, "no strides are sent"


def test_inputs_whose_shape_nobody_asks_for_send_none(device: Device) -> None:
    kernel = CudaKernel(
        "plain",
        input_names=["x"],
        output_names=["out"],
        source="out[0] = x[0];",
        compile=device.compile,
    )
    kernel(
        inputs=[mx.zeros((3,))],
        template=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    assert device.launched[0]["scalars"] == []
    assert "(const float* x, float* out) {" in device.sources[0]


def test_a_form_is_compiled_once_and_each_has_a_name_of_its_own(
    kernel: CudaKernel, device: Device
) -> None:
    """mlx keeps one module for a name, whatever code it is given later."""
    for _ in range(2):
        run(kernel)
        run(kernel, rows=4)  # extents are arguments
        run(kernel, mx.float16)
        run(kernel, scale=4)
    assert len(device.sources) == 3
    by_name = {launch["name"]: launch["compiled_source"] for launch in device.launched}
    assert sorted(by_name.values()) == [b"code 1", b"code 2", b"code 3"]


def test_what_does_not_compile_is_left_to_mlx_with_one_warning(
    kernel: CudaKernel, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.error = CannotCompile("no such thing")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run(kernel)
    assert len(device.sources) == 1
    assert [record.message for record in caplog.records] == [
        "scaled is left to mlx, which takes longer: no such thing"
    ]
    assert len(device.left_to_mlx) == 3
    asked = device.left_to_mlx[0]
    assert (asked["name"], asked["source"], asked["header"]) == ("scaled", SOURCE, "#define HERE")
    assert asked["template"][1] == ("Scale", 3)
    assert not device.launched


def test_forms_that_were_compiled_before_stay(kernel: CudaKernel, device: Device) -> None:
    run(kernel)
    device.error = CannotCompile("too old")
    run(kernel, mx.float16)
    run(kernel)
    assert (len(device.launched), len(device.left_to_mlx)) == (2, 1)


def test_numbers_that_no_source_knows_are_left_to_mlx(kernel: CudaKernel, device: Device) -> None:
    run(kernel, mx.complex64)
    assert not device.sources
    assert len(device.left_to_mlx) == 1


def test_a_process_without_the_library_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    monkeypatch.setattr(nvrtc, "MAPS", maps)
    for text in (
        None,
        "7f00-7f01 r--p 0000 fe:00 12 /usr/lib/libnvrtc-builtins.so.13\n7f02-7f03 r\n",
    ):
        loaded_compiler.cache_clear()
        if text is not None:
            maps.write_text(text)
        with pytest.raises(CannotCompile):
            loaded_compiler()
    maps.write_text(f"7f00-7f01 r-xp 0000 fe:00 12 {tmp_path}/libnvrtc.so.13\n")
    with pytest.raises(CannotCompile, match=r"libnvrtc\.so\.13"):  # not a library
        loaded_compiler()


@pytest.fixture(autouse=True)
def forget_compiler() -> Iterator[None]:
    yield
    loaded_compiler.cache_clear()


def find_compiler() -> Compiler | None:
    """mlx's, else that of NVIDIA's package: it needs no GPU."""
    try:
        return loaded_compiler()
    except CannotCompile:
        found = find_spec("nvidia")
        places = [] if found is None else list(found.submodule_search_locations or ())
        libraries = [path for place in places for path in Path(place).glob("*/lib/libnvrtc.so.*")]
        return Compiler(str(libraries[0])) if libraries else None


@pytest.mark.skipif(find_compiler() is None, reason="needs nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_every_kernel_compiles_without_headers(
    dtype: mx.Dtype, architecture: str, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    compiler = find_compiler()
    assert compiler is not None
    _, add_up = packed_attention._kernels("cuda")
    heads = [("Hk", 2), ("Dk", 128), ("Hv", 4), ("Dv", 128)]
    layer = [(3, dtype), (3, dtype), (2, dtype), (1, mx.float32), (1, dtype)]
    for kernel, inputs, outputs, template in (
        (
            cuda_prefill._PREPARE_KERNEL,
            [*layer, (1, mx.int32)],
            [*[mx.float32] * 5, dtype],
            [*heads, ("Taps", 4), ("Threads", 128)],
        ),
        (
            cuda_prefill._NORM_KERNEL,
            [(4, mx.float32), (3, dtype), (1, dtype), (1, mx.float32)],
            [dtype],
            [("T", dtype), *heads, ("Threads", 128)],
        ),
        (
            cuda_scan._KERNEL,
            [*[(4, mx.float32)] * 3, *[(3, mx.float32)] * 2, (4, mx.float32)],
            [mx.float32] * 3,
            [
                *[("T", mx.float32), *heads, ("Threads", 128), ("Lanes", 8)],
                *[("Tile", 16), ("Grid", 64), ("Taps", True)],
            ],
        ),
        (
            cuda_layer._KERNEL,
            [*layer, (1, dtype), (1, mx.float32), (4, mx.float32)],
            [dtype, dtype, mx.float32],
            [("T", dtype), *heads, ("Taps", 4)],
        ),
        (
            cuda_step._KERNEL,
            [*[(4, dtype)] * 3, *[(3, dtype)] * 2, (1, mx.float32), (1, dtype), (4, mx.float32)],
            [dtype, mx.float32],
            [("T", dtype), *heads, ("Beta", 1)],
        ),
        (
            add_up,
            [(4, mx.float32), (4, mx.float32), (1, mx.float32)],
            [dtype],
            [("T", dtype), ("Dv", 64), ("Sinks", True), ("Threads", 128)],
        ),
    ):
        assert isinstance(kernel, CudaKernel)
        monkeypatch.setattr(kernel, "_built", {})
        monkeypatch.setattr(kernel, "_compile", lambda s: compiler.compile(s, architecture))
        kernel(
            inputs=[mx.zeros((1,) * ndim, given) for ndim, given in inputs],
            template=template,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,) for _ in outputs],
            output_dtypes=outputs,
        )
    assert len(device.launched) == 6
    assert all(launch["compiled_source"].startswith(b"\x7fELF") for launch in device.launched)
