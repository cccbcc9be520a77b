"""A copy of a checkpoint in float32 that never ends a reply by itself. Knows no model.

Both servers of a comparison read this copy: mlx-lm computes in the type it finds on disk, and
cannot be told to ignore the end of a reply. Only safetensors and JSON are touched.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pippin.bench.wire import BenchError

Header = dict[str, Any]
CAST = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}  # bf16: numpy has none, so its bits
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def write_float32_copy(source: Path, target: Path) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, target / path.name)
    for path in source.glob("*.safetensors"):
        _copy_tensors(path, target / path.name)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (target / name).exists():
            _drop_ends(target / name)


def read_header(path: Path) -> tuple[Header, int]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file, and where its data starts.

    The entry `__metadata__` is not a tensor.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: Header = json.loads(file.read(length))
    return header, 8 + length


def _copy_tensors(source: Path, target: Path) -> None:
    header, data_start = read_header(source)
    metadata = header.pop("__metadata__", {})  # mlx-lm reads the format from it
    raw = np.memmap(source, np.uint8, "r")
    cast = {}
    offset = 0
    for name, entry in header.items():
        if entry["dtype"] not in CAST:
            raise BenchError(f"{source.name}: {name} is {entry['dtype']}, no float16, 32 or bf16")
        nbytes = 4 * int(np.prod(entry["shape"], dtype=np.int64))
        cast[name] = {**entry, "dtype": "F32", "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps({"__metadata__": metadata, **cast}).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            stored = raw[data_start + begin : data_start + end].view(CAST[entry["dtype"]])
            file.write(_as_float32(stored, entry["dtype"]).tobytes())


def _as_float32(stored: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _drop_ends(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for section in (config, config.get("text_config", {})):
        section.pop("eos_token_id", None)
        section.pop("eos_token", None)
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
