"""Runs custom Metal kernels of mlx on a CPU, in place of `mx.fast.metal_kernel`.

The text that runs is the one that mlx generates. Threadgroups run one after the other, their
threads as fibers: forward, then backward, and both must give the same bytes. Every access is
checked (machine/memory.cpp). Knows nothing of time, registers and occupancy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal.compiled_kernel import CLANG, compile_kernel
from metal.generated_source import Array, GeneratedSource, KernelFault, check_signature, generate

MOST_THREADGROUP_BYTES = 32_768
GUARD = 4096  # bytes before and after each buffer that belong to none
FORWARD, BACKWARD, RANDOM = 0, 1, 12345

needs_clang = pytest.mark.skipif(CLANG is None, reason="the emulator needs clang on Linux")
_metal_kernel = mx.fast.metal_kernel


class Buffer(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("cell", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int32),
        ("initialised", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("num_buffers", ctypes.c_int32),
        ("buffers", Buffer * 32),
        ("fault", ctypes.c_char * 512),
    )


def numpy_of(array: mx.array) -> np.ndarray[Any, Any]:
    """With mlx's strides; bfloat16 as the 16 bits that it is."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


class EmulatedKernel:
    """What `mx.fast.metal_kernel` returns; takes the same arguments and options."""

    orders: Sequence[int] = (FORWARD, BACKWARD)

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object | None = None,
    ) -> None:
        self.threadgroup_bytes = 0  # of the last launch
        self._names = [*input_names], [*output_names]
        self._contiguous, self._atomic = ensure_row_contiguous, atomic_outputs
        self._generator = _metal_kernel(
            *(name, input_names, output_names, source, header),
            *(ensure_row_contiguous, atomic_outputs, compile_options),
        )

    def generate(self, inputs: Sequence[Array], **options: Any) -> GeneratedSource:
        return generate(self._generator, inputs, **options)

    def __call__(
        self,
        *,
        inputs: Sequence[Array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, object]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        threads = [min(pair) for pair in zip(threadgroup, grid, strict=True)]
        options: dict[str, Any] = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
            "template": template or [],
        }
        source = self.generate(inputs, **options)
        library = self._library(source)
        check_signature(source, *self._names, threads)
        arrays = [each if isinstance(each, mx.array) else mx.array(each) for each in inputs]
        results: list[list[np.ndarray[Any, Any]]] = []
        for order in self.orders:
            memory = _Memory(arrays, self._names, contiguous=self._contiguous)
            memory.add_outputs(output_shapes, output_dtypes, init_value)
            launch = memory.launch(source)
            launch.grid[:], launch.group[:], launch.order = grid, threads, order
            library.metal_launch(ctypes.byref(launch))
            if launch.fault:
                raise KernelFault(launch.fault.decode())
            results.append(memory.outputs())
        for others in results[1:]:
            for name, one, other in zip(self._names[1], results[0], others, strict=True):
                if not self._atomic and one.tobytes() != other.tobytes():
                    raise KernelFault(f"{name} depends on the order in which threads run")
        return [
            mx.array(raw).view(dtype).reshape(shape)
            for raw, dtype, shape in zip(results[0], output_dtypes, output_shapes, strict=True)
        ]

    def _library(self, source: GeneratedSource) -> ctypes.CDLL:
        library = compile_kernel(source)
        self.threadgroup_bytes = library.metal_threadgroup_bytes()
        if self.threadgroup_bytes > MOST_THREADGROUP_BYTES:
            raise KernelFault(
                f"{self.threadgroup_bytes} bytes of threadgroup memory: "
                f"Metal has {MOST_THREADGROUP_BYTES}"
            )
        return library


def use_emulator(
    monkeypatch: pytest.MonkeyPatch, orders: Sequence[int] = (FORWARD, BACKWARD)
) -> None:
    """Custom Metal kernels that are made from here on run in the emulator."""
    monkeypatch.setattr(EmulatedKernel, "orders", orders)
    monkeypatch.setattr(mx.fast, "metal_kernel", EmulatedKernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


class _Memory:
    """The buffers of one launch, each between guards."""

    def __init__(
        self, inputs: Sequence[mx.array], names: tuple[list[str], list[str]], *, contiguous: bool
    ) -> None:
        self._output_names = names[1]
        self._buffers: dict[str, tuple[np.ndarray[Any, Any], Buffer]] = {}
        for name, array in zip(names[0], inputs, strict=True):
            values = numpy_of(array)
            if contiguous:
                values = np.ascontiguousarray(values).reshape(values.shape)
            extent = values.itemsize + sum(
                (size - 1) * stride
                for size, stride in zip(values.shape, values.strides, strict=True)
            )
            room = self._add(name, extent if values.size else 0, values.itemsize)
            np.ndarray(values.shape, values.dtype, room.data, 0, values.strides)[...] = values
            steps = [stride // values.itemsize for stride in values.strides]
            self._add_values(f"{name}_shape", np.array(values.shape, np.int32))
            self._add_values(f"{name}_strides", np.array(steps, np.int64))
            self._add_values(f"{name}_ndim", np.array([values.ndim], np.int32))

    def _add(
        self,
        name: str,
        size: int,
        itemsize: int,
        *,
        writable: bool = False,
        initialised: bool = True,
    ) -> np.ndarray[Any, Any]:
        whole = np.full(size + 2 * GUARD, 0xFF, np.uint8)
        first = GUARD - whole.ctypes.data % 256
        room = whole[first : first + size]
        buffer = Buffer(
            *(whole.ctypes.data + first, size, min(itemsize, 4), name.encode()),
            *(writable, initialised),
        )
        self._buffers[name] = room, buffer
        return room

    def _add_values(self, name: str, values: np.ndarray[Any, Any]) -> None:
        self._add(name, values.nbytes, values.itemsize)[...] = values.view(np.uint8)

    def add_outputs(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> None:
        for name, shape, dtype in zip(self._output_names, shapes, dtypes, strict=True):
            size = int(np.prod(shape)) * dtype.size
            has_value = init_value is not None
            room = self._add(name, size, dtype.size, writable=True, initialised=has_value)
            if init_value is not None:
                room[...] = (
                    numpy_of(mx.full(tuple(shape), init_value, dtype)).reshape(-1).view(np.uint8)
                )

    def launch(self, source: GeneratedSource) -> Launch:
        names = [each.name for each in source.parameters if each.attribute == "buffer"]
        launch = Launch(num_buffers=len(names))
        for index, name in enumerate(names):
            launch.buffers[index] = self._buffers[name][1]
        return launch

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        return [self._buffers[name][0].copy() for name in self._output_names]
