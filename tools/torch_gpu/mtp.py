"""The bundled model with its MTP head: the same tokens as without drafts, and how much faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_gpu.plays import GREEDY, Requests

import pippin
from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import load

PATH = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
PROMPT_TOKENS, MAX_DEPTH = 48, 4


class HeadPlay(Requests):
    """Random prompts; every step verifies what the one before left, and is launched ahead of its result."""

    def __init__(self, backend: TorchBackend, num_rows: int, depth: int) -> None:
        super().__init__(backend, num_rows)
        rng = np.random.default_rng(0)
        self._depth = depth
        self.tokens: dict[int, list[int]] = {}
        self._bounds: dict[int, int] = {}
        for slot in self.slots:
            prompt = rng.integers(10, backend.spec.vocab_size, PROMPT_TOKENS).astype(np.int32)
            row = PrefillRow(slot, 0, prompt, samples=True, num_drafts=depth)
            result = self.launch(admit=(Admit(slot, GREEDY, (), prompt, slot),), prefill=(row,)).wait()
            self.tokens[slot], self._bounds[slot] = list(result.tokens[slot]), PROMPT_TOKENS

    def decode(self, num_tokens: int) -> tuple[float, float]:
        """Until every row has so many: seconds, and the share of drafts that were accepted."""
        began, waiting, num_steps = time.perf_counter(), None, 0
        while min(map(len, self.tokens.values())) < num_tokens:
            rows = [DecodeRow(s, self._bounds[s], depth=self._depth, num_drafts=self._depth) for s in self.slots]
            launched = self.launch(decode=tuple(rows))
            for slot in self.slots:
                self._bounds[slot] += 1 + self._depth
            if waiting is not None:
                self._settle(waiting)
            waiting, num_steps = launched, num_steps + 1
        self._settle(waiting)
        said = sum(map(len, self.tokens.values())) - len(self.tokens)
        drafts = num_steps * len(self.tokens) * self._depth
        accepted = said - num_steps * len(self.tokens)
        return time.perf_counter() - began, accepted / drafts if drafts else 0.0

    def _settle(self, step: Any) -> None:
        for slot, found in step.wait().tokens.items():
            self.tokens[slot] += found
            self._bounds[slot] -= self._depth - (len(found) - 1)


def mtp(
    num_tokens: int = 160,
    widths: Sequence[int] = (1, 8, 32),
    depths: Sequence[int] = (1, 2, 3, 4),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> None:
    for dtype in dtypes:
        loaded = load(PATH, dtype=dtype, mtp=True)
        backend = TorchBackend(loaded, num_slots=max(widths), pool_bytes=1 << 28, max_depth=MAX_DEPTH)
        for num_rows in widths:
            plain, seconds = {}, 0.0
            for depth in (0, *depths):
                for _ in range(2):  # the first time captures
                    play = HeadPlay(backend, num_rows, depth)
                    took, share = play.decode(num_tokens)
                    play.end()
                found = {slot: tokens[:num_tokens] for slot, tokens in play.tokens.items()}
                rate = sum(len(tokens) - 1 for tokens in play.tokens.values()) / took
                if not depth:
                    plain, seconds = found, rate
                    print(f"{dtype}, {num_rows} rows: {rate:,.0f} tokens a second without drafts", flush=True)
                    continue
                others = sum(found[slot] != plain[slot] for slot in found)
                print(f"    depth {depth}: {rate / seconds:.2f}x, {share:.0%} of drafts accepted, {others} replies say otherwise", flush=True)
                assert dtype != "float32" or not others, "drafts change what is said in float32"
        backend.close()
