"""A copy of a checkpoint that never ends a reply by itself, in float32 if need be. Knows no model.

mlx-lm's server has no option to ignore the end of a reply. In the copy what would have been the
end is a token like any other, so it is given text: a token without text comes as no event, and
would look like a pause of two steps. mlx-lm computes in the type it finds on disk, and on CPUs
float32 is much the fastest. Only safetensors and JSON are touched.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pippin.bench.errors import BenchError

Header = dict[str, Any]
CAST = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}  # bf16: numpy has none, so its bits
SPECIAL_NAMES = (
    *(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
    "additional_special_tokens",
    "extra_special_tokens",
)
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def write_endless_copy(source: Path, target: Path, *, float32: bool) -> None:
    """Without `float32` the weights are linked to, whatever their type."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, target / path.name)
    for path in source.glob("*.safetensors"):
        if float32:
            _copy_tensors(path, target / path.name)
        else:
            (target / path.name).symlink_to(path.resolve())
    for name in ("config.json", "generation_config.json"):
        _edit(target / name, _drop_ends)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _edit(target / name, _show_every_token)


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


def _edit(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
        edit(config)
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _drop_ends(config: dict[str, Any]) -> None:
    for section in (config, config.get("text_config", {})):
        section.pop("eos_token_id", None)


def _show_every_token(config: dict[str, Any]) -> None:
    """Name no token as special, and mark none."""
    for name in SPECIAL_NAMES:
        config.pop(name, None)
    decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder", {})
    for token in (*config.get("added_tokens", []), *decoder.values()):
        token["special"] = False
