"""The Metal source that mlx generates for a custom kernel, and its signature. Compiles nothing.

mlx writes the text while it traces a call, on machines without Metal too, and prints it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

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
