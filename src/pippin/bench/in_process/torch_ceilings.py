"""What this machine could do at best with a checkpoint's weights, measured now. Knows torch.

A bare chain of the products that a step cannot avoid, and the fastest that memory gives up its
bytes, both on the device that torch computes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.bench.in_process.products import Products

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REPEATS = 5
MEMORY_BYTES = 1 << 30  # on a GPU; far larger than any cache
CPU_MEMORY_BYTES = 1 << 28
Chain = list[tuple[torch.Tensor, torch.Tensor]]  # weights, and what they are multiplied with


class TorchCeilings:
    """Holds random weights of a checkpoint's shapes and times what can be done with them."""

    def __init__(self, products: Products, dtype: str) -> None:
        on_gpu = torch.cuda.is_available() and torch.version.cuda is not None
        self._device = torch.device("cuda" if on_gpu else "cpu")
        stored = DTYPES[products.dtype] if on_gpu else torch.float32
        self._dtype = stored if dtype == "auto" else NAMES[dtype]
        self._products = products
        self._layers = [self._random(shape) for shape in products.layers]
        self._head = self._random(products.head)
        self._experts = [self._random((e.number, *e.shape)) for e in products.experts]

    def step_bytes(self, rows: int) -> float:
        """What a decode step has to read at least, of weights."""
        return float(self._products.step_numbers(rows) * self._dtype.itemsize)

    def flops_per_token(self) -> int:
        return self._products.flops_per_token()

    def prefill_seconds(self, rows: int) -> float:
        """The layers' products for this many tokens; the head sees only the last of them."""
        return self._seconds(self._layers, rows)

    def decode_seconds(self, rows: int) -> float:
        return self._seconds([*self._layers, self._head], rows)

    def memory_bytes_per_second(self) -> float:
        """The faster of reading numbers, which adding them up does, and of copying them."""
        nbytes = MEMORY_BYTES if self._device.type == "cuda" else CPU_MEMORY_BYTES
        memory = torch.ones(nbytes // 4, dtype=torch.float32, device=self._device)
        other = torch.empty_like(memory)
        read = self._best(lambda: [memory.sum()])
        copied = self._best(lambda: [other.copy_(memory)])
        return max(nbytes / read, 2 * nbytes / copied)

    def _seconds(self, weights: Sequence[torch.Tensor], rows: int) -> float:
        """Experts: as many as these rows take, and as many rows of each as there are then."""
        inputs = {size: self._random((rows, size)) for size in {w.shape[1] for w in weights}}
        chain: Chain = [(weight.T, inputs[weight.shape[1]]) for weight in weights]
        for experts, held in zip(self._products.experts, self._experts, strict=True):
            number = max(1, round(experts.num_read(rows)))
            of_each = math.ceil(rows * experts.num_per_token / number)
            taken = self._random((number, of_each, held.shape[2]))
            chain.append((held[:number].transpose(1, 2), taken))
        return self._best(lambda: [given @ weight for weight, given in chain])

    def _best(self, work: Callable[[], list[torch.Tensor]]) -> float:
        """The shortest of a few runs: a ceiling is what happens when nothing gets in the way. On a
        GPU of a captured graph: the host's launches are not its limit."""
        run = self._captured(work)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run()
            self._finish()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def _captured(self, work: Callable[[], list[torch.Tensor]]) -> Callable[[], object]:
        if self._device.type == "cpu":
            on_cpu: Callable[[], object] = torch.inference_mode()(work)
            on_cpu()
            return on_cpu
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            work()
            torch.cuda.synchronize()
            recorded = CudaGraphs(self._device).record(work)
        recorded.replay()
        self._finish()
        return recorded.replay

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)
