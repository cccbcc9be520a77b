"""The Metal source that mlx generates for a custom kernel, and what Metal asks of its signature.

mlx writes the text while it traces a call, on machines without Metal too, and prints it.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx


class KernelFault(Exception):
    """A kernel that Metal would refuse, or that does what Metal leaves undefined."""


Array = mx.array | int | float | bool


@dataclass(frozen=True)
class Parameter:
    type: str  # as written, such as `const device float*`
    name: str
    attribute: str  # `buffer`, or what Metal fills in, such as `thread_position_in_grid`
    index: int | None = None  # of a buffer


@dataclass(frozen=True)
class GeneratedSource:
    text: str  # the header and the function
    call: str  # the function's name with its template arguments
    parameters: tuple[Parameter, ...]


def generate(
    kernel: Callable[..., Any], inputs: Sequence[Array], **options: Any
) -> GeneratedSource:
    """`kernel` comes from mlx's own `metal_kernel`; `options` are those of its call."""
    arrays = [index for index, each in enumerate(inputs) if isinstance(each, mx.array)]

    def call(*traced: mx.array) -> Any:
        given = list(inputs)
        for index, array in zip(arrays, traced, strict=True):
            given[index] = array
        return kernel(inputs=given, verbose=True, **options)

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        kept = os.dup(1)
        try:
            with printed.open("wb") as file:
                os.dup2(file.fileno(), 1)
            mx.export_function(
                str(Path(folder, "function")), call, *(inputs[index] for index in arrays)
            )
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        return parse(printed.read_text())


def parse(printed: str) -> GeneratedSource:
    found = re.search(r"```\n(.*)\n```", printed, re.DOTALL)
    assert found, f"mlx printed no source: {printed!r}"
    text = found[1]
    signature = re.search(r"\[\[kernel\]\] void (\S+?)\((.*?)\) \{\n", text, re.DOTALL)
    assert signature, f"no kernel in what mlx printed: {text!r}"
    parameters = tuple(
        Parameter(*words, int(index) if index else None)
        for *words, index in re.findall(
            r"\s*(.+?)\s*(\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", signature[2]
        )
    )
    instance = re.search(r"decltype\((.*)\) \S+?<.*>;\s*$", text)
    if instance:
        text = text[: text.rindex("template [[host_name(")]
    return GeneratedSource(text, instance[1] if instance else signature[1], parameters)


MOST_THREADS = 1024  # of a threadgroup


LANES = 32  # of a SIMD group


MOST_BUFFERS = 31


NUMBERS = (
    "bool",
    "float",
    "half",
    "float16_t",
    "bfloat16_t",
    *(f"{s}int{n}_t" for s in ("", "u") for n in (8, 16, 32, 64)),
)


# Of positions and sizes in three dimensions, and of numbers.
ATTRIBUTE_TYPES = {
    "uint3": (
        *("thread_position_in_grid", "thread_position_in_threadgroup", "threads_per_grid"),
        *("threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_threadgroup"),
        "dispatch_threads_per_threadgroup",
    ),
    "uint": (
        *("thread_index_in_threadgroup", "thread_index_in_simdgroup", "threads_per_simdgroup"),
        *("simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"),
        "thread_execution_width",
    ),
}


def check_signature(
    source: GeneratedSource, inputs: Sequence[str], outputs: Sequence[str], threads: Sequence[int]
) -> None:
    """`threads`: of a threadgroup, in three dimensions."""
    for fault in _faults(source, inputs, outputs, math.prod(threads)):
        raise KernelFault(fault)


def _faults(
    source: GeneratedSource, inputs: Sequence[str], outputs: Sequence[str], num_threads: int
) -> Iterator[str]:
    if not 0 < num_threads <= MOST_THREADS:
        yield f"a threadgroup of {num_threads} threads: Metal runs 1 to {MOST_THREADS}"
    if num_threads % LANES:
        yield f"a threadgroup of {num_threads} threads: no multiple of a SIMD group's {LANES}"
    buffers = [each for each in source.parameters if each.attribute == "buffer"]
    if len(buffers) > MOST_BUFFERS:
        yield f"{len(buffers)} buffers: Metal takes {MOST_BUFFERS}"
    if [each.index for each in buffers] != list(range(len(buffers))):
        yield "buffers are not numbered one after the other"
    yield from _missing(source.parameters, [*inputs, *outputs])
    for each in source.parameters:
        if each.attribute == "buffer":
            yield from _buffer_faults(each, inputs, outputs, source.text)
        elif each.attribute not in ATTRIBUTE_TYPES.get(each.type, ()):
            yield f"{each.name} is declared as {each.type} [[{each.attribute}]]"


def _missing(parameters: Sequence[Parameter], names: Sequence[str]) -> Iterator[str]:
    declared = {each.name for each in parameters}
    yield from (f"{name} is no parameter of the kernel" for name in names if name not in declared)


def _buffer_faults(
    buffer: Parameter, inputs: Sequence[str], outputs: Sequence[str], text: str
) -> Iterator[str]:
    """mlx places inputs of fewer than eight numbers in `constant`, and Metal lets no pointer to
    `device` point there."""
    number = "|".join(NUMBERS)
    if buffer.name in outputs:
        allowed = rf"device (?:{number}|atomic<\w+>)\*"
    elif buffer.name in inputs:
        allowed = rf"const (?:device|constant) (?:{number})[*&]"
    else:
        allowed = r"const constant int(?:64_t)?[*&]"
    if not re.fullmatch(allowed, buffer.type):
        yield f"{buffer.name} is declared as {buffer.type}"
    other = "device" if "constant" in buffer.type else "constant"
    if re.search(rf"\b{other}\b[^;=]*\*\s*\w+\s*=\s*{buffer.name}\b", text):
        yield f"a pointer to {other} points into {buffer.name}, which is a {buffer.type}"
