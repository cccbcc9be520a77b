"""What a step of a checkpoint's model cannot avoid: its products, and what a row's context adds.

Nothing here knows how a model is put together: shapes come from the checkpoint's headers, and a few
numbers from its config.json. Knows no device.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pippin.bench.servers.endless_copy import read_header
from pippin.types import Component, ModelSpec

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
NOT_IN_A_STEP = ("visual", "vision", "mtp")  # parts of a checkpoint that text does not run through
EXPERT = re.compile(r"\.experts\.(\d+\.)?")


@dataclass(frozen=True)
class Experts:
    """Products of one shape [out, in], of which a token takes a few."""

    number: int
    num_per_token: int
    shape: tuple[int, int]

    def num_read(self, rows: int) -> float:
        """Distinct ones that so many tokens take, where each takes any with the same chance."""
        return float(self.number * (1 - (1 - self.num_per_token / self.number) ** rows))


@dataclass(frozen=True)
class Products:
    """The shapes [out, in] of a forward pass's matrix products."""

    layers: list[tuple[int, int]]
    head: tuple[int, int]
    dtype: str  # as stored
    experts: tuple[Experts, ...] = ()

    def flops_per_token(self) -> int:
        """Without the head, which sees the last token of a prompt alone."""
        dense = sum(2 * prod(shape) for shape in self.layers)
        return dense + sum(2 * e.num_per_token * prod(e.shape) for e in self.experts)

    def step_numbers(self, rows: int) -> float:
        """Of weights, that a decode step of so many rows has to read."""
        dense = sum(map(prod, self.layers)) + prod(self.head)
        return dense + sum(e.num_read(rows) * prod(e.shape) for e in self.experts)


@dataclass(frozen=True)
class Context:
    """What attention and states add to the products of one row."""

    spec: ModelSpec
    head_numbers: int  # of all query heads of a layer; 0: not known

    def step_bytes(self, length: int) -> int:
        """That a token of a row behind so many others has to read, and of its state to write."""
        spec = self.spec
        windowed = min(length, spec.window) * spec.window_bytes_per_token
        return length * spec.kv_bytes_per_token + windowed + 2 * spec.state_bytes

    def prompt_flops(self, length: int) -> float:
        """Of queries with keys and of what they choose with values, of a whole prompt."""
        kinds = (Component.ATTENTION, Component.WINDOW)
        layers = [layer for layer in self.spec.layers if layer.component in kinds]
        return sum(4.0 * self.head_numbers * _num_pairs(length, one.window) for one in layers)


def _num_pairs(length: int, window: int | None) -> float:
    """Of a token and one that it sees."""
    seen = min(length, window or length)
    return seen * seen / 2 + (length - seen) * seen


def read_context(model_dir: Path, spec: ModelSpec) -> Context:
    text = _text_config(model_dir)
    heads = int(text.get("num_attention_heads") or 0)
    each = text.get("head_dim") or int(text.get("hidden_size") or 0) // max(heads, 1)
    return Context(spec, 0 if "kv_lora_rank" in text else heads * int(each))


def read_products(model_dir: Path) -> Products | None:
    """The products of a checkpoint; None if it is quantized, where shapes do not tell."""
    shapes: dict[str, tuple[int, int]] = {}
    experts: Counter[tuple[str, tuple[int, int]]] = Counter()
    dtypes: Counter[str] = Counter()
    for path in sorted(model_dir.glob("*.safetensors")):
        header, _ = read_header(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in ITEM_BYTES:
                return None
            shape = tuple(entry["shape"])
            if any(part in name for part in NOT_IN_A_STEP):
                continue
            if EXPERT.search(name) and len(shape) in (2, 3):
                number = shape[0] if len(shape) == 3 else 1
                experts[EXPERT.sub(".experts.", name), (shape[-2], shape[-1])] += number
            elif len(shape) == 2:
                shapes[name] = (shape[0], shape[1])
            else:
                continue
            dtypes[entry["dtype"]] += prod(shape)
    embedding = next((n for n in shapes if n.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return None
    table = shapes.pop(embedding)
    head = next((n for n in shapes if n.endswith("lm_head.weight")), None)
    top = shapes.pop(head) if head else table  # tied: the embedding is the head
    taken = _num_per_token(model_dir) if experts else 0
    of_experts = tuple(Experts(n, min(taken, n), shape) for (_, shape), n in experts.items())
    return Products(list(shapes.values()), top, dtypes.most_common(1)[0][0], of_experts)


def _num_per_token(model_dir: Path) -> int:
    text = _text_config(model_dir)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
    return next((int(text[name]) for name in names if text.get(name)), 1)


def _text_config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return config | (config.get("text_config") or {})
