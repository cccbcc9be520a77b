"""What a checkpoint's model cannot avoid in a step, and how fast this machine can do that.

Shapes come from the checkpoint's headers, and a few numbers from its config.json.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from pippin.types import Component, ModelSpec
from servers import read_header

REPEATS = 5
MEMORY_SIDE = 8192  # a square matrix far larger than any cache
MEMORY_BYTES = 1 << 30  # on a GPU; far larger than any cache
CPU_MEMORY_BYTES = 1 << 28
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
        for name, entry in read_header(path).items():
            if entry["dtype"] not in DTYPES:
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


class Library(Protocol):
    """What computes: arrays of random numbers, and the time that work on them takes."""

    item_bytes: int

    def random(self, shape: tuple[int, ...]) -> Any: ...
    def seconds(self, work: Callable[[], list[Any]]) -> float: ...
    def memory_bytes_per_second(self) -> float: ...


class Ceilings:
    """Holds random weights of a checkpoint's shapes and times what can be done with them: a bare
    chain of the products that a step cannot avoid."""

    def __init__(self, products: Products, library: Library) -> None:
        self._products, self._library = products, library
        self._layers = [library.random(shape) for shape in products.layers]
        self._head = library.random(products.head)
        self._experts = [library.random((e.number, *e.shape)) for e in products.experts]
        self.flops_per_token = products.flops_per_token
        self.memory_bytes_per_second = library.memory_bytes_per_second

    def step_bytes(self, rows: int) -> float:
        """What a decode step has to read at least, of weights."""
        return self._products.step_numbers(rows) * self._library.item_bytes

    def prefill_seconds(self, rows: int) -> float:
        """The layers' products for this many tokens; the head sees only the last of them."""
        return self._seconds(self._layers, rows)

    def decode_seconds(self, rows: int) -> float:
        return self._seconds([*self._layers, self._head], rows)

    def _seconds(self, weights: Sequence[Any], rows: int) -> float:
        """Experts: as many as these rows take, and as many rows of each as there are then."""
        random = self._library.random
        inputs = {size: random((rows, size)) for size in {w.shape[1] for w in weights}}
        chain = [(weight.T, inputs[weight.shape[1]]) for weight in weights]
        for experts, held in zip(self._products.experts, self._experts, strict=True):
            number = max(1, round(experts.num_read(rows)))
            of_each = math.ceil(rows * experts.num_per_token / number)
            taken = random((number, of_each, held.shape[2]))
            chain.append((held[:number].swapaxes(1, 2), taken))
        return self._library.seconds(lambda: [given @ weight for weight, given in chain])


def shortest(run: Callable[[], object]) -> float:
    """Of a few runs: a ceiling is what happens when nothing gets in the way."""
    run()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class Mlx:
    def __init__(self, stored: str, dtype: str) -> None:
        import mlx.core as mx

        from pippin.backends.mlx.cpu.blas import load_fast_blas

        load_fast_blas()
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        name = dtype if dtype != "auto" else "float32" if on_cpu else DTYPES[stored]
        self._mx, self._dtype = mx, getattr(mx, name)
        self.item_bytes = self._dtype.size

    def random(self, shape: tuple[int, ...]) -> Any:
        array = self._mx.random.normal(shape).astype(self._dtype)
        self._mx.eval(array)
        return array

    def seconds(self, work: Callable[[], list[Any]]) -> float:
        return shortest(lambda: self._mx.eval(work()))

    def memory_bytes_per_second(self) -> float:
        """The faster of a copy and of a product with one vector, which all cores can share."""
        matrix, vector = self.random((MEMORY_SIDE, MEMORY_SIDE)), self.random((1, MEMORY_SIDE))
        product = self.seconds(lambda: [vector @ matrix.T])
        copy = self.seconds(lambda: [matrix + 1])
        return float(max(matrix.nbytes / product, 2 * matrix.nbytes / copy))


class Torch:
    """On a GPU work is a captured graph: the host's launches are not its limit."""

    def __init__(self, stored: str, dtype: str) -> None:
        import torch

        self._torch = torch
        self._on_gpu = torch.cuda.is_available() and torch.version.cuda is not None
        self._device = torch.device("cuda" if self._on_gpu else "cpu")
        name = dtype if dtype != "auto" else DTYPES[stored] if self._on_gpu else "float32"
        self._dtype = getattr(torch, name)
        self.item_bytes = self._dtype.itemsize

    def random(self, shape: tuple[int, ...]) -> Any:
        return self._torch.randn(shape, dtype=self._dtype, device=self._device)

    def seconds(self, work: Callable[[], list[Any]]) -> float:
        if not self._on_gpu:
            return shortest(self._torch.inference_mode()(work))
        from pippin.backends.torch.graphs.capture import CudaGraphs

        cuda = self._torch.cuda
        with self._torch.inference_mode(), cuda.stream(cuda.Stream()):
            work()
            cuda.synchronize()
            recorded = CudaGraphs(self._device).record(work)

        def replay() -> None:
            recorded.replay()
            cuda.synchronize()

        return shortest(replay)

    def memory_bytes_per_second(self) -> float:
        """The faster of reading numbers, which adding them up does, and of copying them."""
        nbytes = MEMORY_BYTES if self._on_gpu else CPU_MEMORY_BYTES
        memory = self._torch.ones(nbytes // 4, dtype=self._torch.float32, device=self._device)
        other = self._torch.empty_like(memory)
        read = self.seconds(lambda: [memory.sum()])
        copied = self.seconds(lambda: [other.copy_(memory)])
        return max(nbytes / read, 2 * nbytes / copied)


def find_ceilings(model_dir: Path, backend: str, dtype: str) -> Ceilings | None:
    """None of quantized checkpoints, and on MLX of those with experts."""
    products = None if backend == "fake" else read_products(model_dir)
    if products is None or (products.experts and backend == "mlx"):
        return None
    library: Library = (Mlx if backend == "mlx" else Torch)(products.dtype, dtype)
    return Ceilings(products, library)
