"""Drafts of the backend itself: the same tokens as without them, and how much faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_gpu.plays import GREEDY, Requests, make_model

import pippin
from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel, load

PATH = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
PROMPT_TOKENS, MAX_DEPTH = 48, 4
PLAIN = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


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
        compare_depths(load(PATH, dtype=dtype, mtp=True), num_tokens, widths, depths)


def draft_model(
    num_tokens: int = 64,
    widths: Sequence[int] = (1, 8),
    depths: Sequence[int] = (1, 3),
    config: dict[str, Any] = PLAIN,
    device: str = "cuda",
) -> None:
    """A random model that drafts for itself: nearly every draft is right in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        loaded = make_model(config, dtype, device)
        shares = compare_depths(replace(loaded, draft=loaded.decoder), num_tokens, widths, depths)
        assert dtype != torch.float32 or min(shares) > 0.9, "a model does not draft its own tokens"


def compare_depths(
    loaded: LoadedModel, num_tokens: int, widths: Sequence[int], depths: Sequence[int]
) -> list[float]:
    """The shares of drafts that were accepted."""
    backend = TorchBackend(loaded, num_slots=max(widths), pool_bytes=1 << 28, max_depth=MAX_DEPTH)
    dtype, shares = backend.dtype, []
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
            shares.append(share)
            others = sum(found[slot] != plain[slot] for slot in found)
            print(f"    depth {depth}: {rate / seconds:.2f}x, {share:.0%} of drafts accepted, {others} replies say otherwise", flush=True)
            assert dtype != "float32" or not others, "drafts change what is said in float32"
    backend.close()
    return shares
