"""A CUDA kernel of ours, called like those of `mx.fast.cuda_kernel` but there sooner.

mlx puts its own headers and cooperative groups before a kernel's source, and keeps no such kernel
on disk: two seconds for each, at every start and whenever a server first meets a variant of one.
Our sources need none of those headers. So they go to the same compiler by themselves, which is done
in a fraction of that, and mlx gets the machine code. Where that fails, mlx compiles as it would.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from pippin.backends.mlx.gpu.nvrtc import CannotCompile, loaded_compiler

# What a source may say of numbers of two bytes: read them as floats, round to them, copy them.
NUMBERS = """
struct alignas(2) bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  __device__ bfloat16(float value) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const unsigned all = __float_as_uint(value);
    bits = value != value ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
#endif
  }
  __device__ operator float() const {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
};
struct alignas(2) float16 {
  unsigned short bits;
  float16() = default;
  __device__ float16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
"""
TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.bool_: "bool",
}

logger = logging.getLogger(__name__)

Constant = int | bool | mx.Dtype
Template = Sequence[tuple[str, Constant]]
Compile = Callable[[str], bytes]  # a source to machine code for this device


class Form(NamedTuple):
    """All that a kernel's machine code depends on but for its source."""

    inputs: tuple[tuple[mx.Dtype, int], ...]  # types, and numbers of axes
    outputs: tuple[mx.Dtype, ...]
    template: tuple[tuple[str, Constant], ...]


class Built(NamedTuple):
    name: str  # in the machine code, and for mlx
    code: bytes


def compile_for_device(source: str) -> bytes:
    info = mx.device_info(mx.default_device())
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    own = "a" if int(major) >= 9 else ""  # with what only this architecture has, as mlx does
    return loaded_compiler().compile(source, f"sm_{major}{minor}{own}")


class CudaKernel:
    """Inputs arrive row by row without gaps: others are copied. Strides cannot be asked for."""

    def __init__(
        self,
        name: str,
        *,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        compile: Compile = compile_for_device,
    ) -> None:
        self.name = name
        self._input_names = input_names
        self._output_names = output_names
        self._source = source
        self._header = header
        self._compile = compile
        self._shaped = [  # inputs whose shape the source asks for
            number for number, given in enumerate(input_names) if f"{given}_shape" in source
        ]
        self._built: dict[Form, Built] = {}
        self._mlx_own: Callable[..., list[mx.array]] | None = None

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        built = self._find(
            Form(
                tuple((array.dtype, array.ndim) for array in inputs),
                tuple(output_dtypes),
                tuple(template),
            )
        )
        if built is None:
            assert self._mlx_own is not None
            return self._mlx_own(
                inputs=inputs,
                template=list(template),
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=output_shapes,
                output_dtypes=output_dtypes,
            )
        return mx.fast.precompiled_cuda_kernel(
            name=built.name,
            compiled_source=built.code,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[extent for number in self._shaped for extent in inputs[number].shape],
            grid=grid,
            threadgroup=threadgroup,
            ensure_row_contiguous=True,
        )

    def _find(self, form: Form) -> Built | None:
        """None: mlx is to compile it itself, now and from now on."""
        built = self._built.get(form)
        if built is None and self._mlx_own is None:
            try:
                built = self._built[form] = self._build(form)
            except CannotCompile as error:
                logger.warning("%s is left to mlx, which takes longer: %s", self.name, error)
                self._mlx_own = mx.fast.cuda_kernel(  # type: ignore[assignment]
                    name=self.name,
                    input_names=self._input_names,
                    output_names=self._output_names,
                    source=self._source,
                    header=self._header,
                )
        return built

    def _build(self, form: Form) -> Built:
        """Named by its source: mlx keeps one module for a name."""
        body = self._body(form)
        name = f"{self.name}_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
        signature = f'extern "C" __global__ void {name}'
        return Built(name, self._compile(f"{NUMBERS}{self._header}\n{signature}{body}"))

    def _body(self, form: Form) -> str:
        """Arguments in mlx's order: inputs, outputs, extents of inputs; then the source."""
        names = [*self._input_names, *self._output_names]
        dtypes = [*(dtype for dtype, _ in form.inputs), *form.outputs]
        named = [value for _, value in form.template if isinstance(value, mx.Dtype)]
        if unknown := [str(dtype) for dtype in (*dtypes, *named) if dtype not in TYPES]:
            raise CannotCompile(f"numbers of type {unknown[0]}")
        kinds = [*["const "] * len(form.inputs), *[""] * len(form.outputs)]
        arguments = [
            f"{kind}{TYPES[dtype]}* {name}"
            for kind, dtype, name in zip(kinds, dtypes, names, strict=True)
        ]
        lines = [_constant(name, value) for name, value in form.template]
        for number in self._shaped:
            name, (_, num_axes) = names[number], form.inputs[number]
            extents = [f"{name}_extent_{axis}" for axis in range(num_axes)]
            arguments += [f"int {extent}" for extent in extents]
            lines.append(f"const int {name}_shape[] = {{{', '.join(extents)}}};")
        return "\n".join([f"({', '.join(arguments)}) {{", *lines, self._source, "}\n"])


def _constant(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {TYPES[value]};"
