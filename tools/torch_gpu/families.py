"""Every family on the GPU against transformers, on small random checkpoints that it wrote.

    python tools/torch_gpu/families.py FOLDER       writes them, where transformers is installed

`families` reads FOLDER from PIPPIN_FAMILIES, and writes it where it is missing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

from torch_gpu.plays import Requests

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import load
from pippin.types import SamplingParams

LENGTHS = (3, 40, 150)  # of prompts: shorter and longer than windows and blocks
NUM_TOKENS = 12
NEAR = 1e-2  # of log probabilities in float32
SCORED = SamplingParams(temperature=0.0, logprobs=5)


def write(folder: Path) -> None:
    """Of each family a checkpoint, and what transformers says to some prompts."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from transformers_families import WRITTEN_CONFIGS, score, written_model

    for name in WRITTEN_CONFIGS:
        model, path = written_model(name)
        target = folder / name
        target.mkdir(parents=True)
        for file in path.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        vocab = model.get_input_embeddings().weight.shape[0]
        texts = [np.random.default_rng(n).integers(2, vocab, n).tolist() for n in LENGTHS]
        prompts = [list(text) for text in texts]
        for _ in range(NUM_TOKENS):
            for text, rows in zip(texts, score(name, texts)):
                text.append(int(rows[-1].argmax()))
        rows = score(name, texts)
        said = {f"prompt{n}": np.array(prompt) for n, prompt in enumerate(prompts)}
        said |= {f"text{n}": np.array(text) for n, text in enumerate(texts)}
        said |= {f"scores{n}": each[len(p) - 1 : -1] for n, (p, each) in enumerate(zip(prompts, rows))}
        np.savez(target / "said.npz", **said)
        print(name, "written", flush=True)


def families() -> None:
    folder = os.environ.get("PIPPIN_FAMILIES")
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            write(Path(made))
        failed = [path.name for path in sorted(Path(folder or made).iterdir()) if not is_right(path)]
    assert not failed, f"they say something else than transformers: {', '.join(failed)}"


def is_right(path: Path) -> bool:
    began = time.perf_counter()
    loaded = load(path, dtype="float32", device=torch.device("cuda"))
    backend = TorchBackend(loaded, num_slots=len(LENGTHS), pool_bytes=256 << 20)
    expected = dict(np.load(path / "said.npz"))
    worst = max(off(backend, expected) for _ in range(2))  # launched, then replayed
    chunks = "" if backend._ways.chunk_kernels else ", prompts by plain operations"
    way = f"kernels and graphs{chunks}" if backend.has_kernels else "plain operations"
    print(f"{path.name}: {way}: log probabilities within {worst:.1e}, {time.perf_counter() - began:.1f} s", flush=True)
    backend.close()
    return worst < NEAR


def off(backend: TorchBackend, expected: dict[str, Any]) -> float:
    """Of requests that start and decode together; infinite where another token was said."""
    asked = Requests(backend, len(LENGTHS))
    prompts = {slot: expected[f"prompt{slot - 1}"].astype(np.int32) for slot in asked.slots}
    admit = tuple(Admit(slot, SCORED, (), prompt, seed=slot) for slot, prompt in prompts.items())
    rows = tuple(PrefillRow(slot, 0, prompt, samples=True) for slot, prompt in prompts.items())
    asked.take(asked.launch(admit=admit, prefill=rows))
    for step in range(NUM_TOKENS - 1):
        decode = tuple(DecodeRow(slot, len(prompt) + step) for slot, prompt in prompts.items())
        asked.take(asked.launch(decode=decode))
    asked.launch(retire=tuple(Retire(slot) for slot in prompts)).wait()
    worst = 0.0
    for slot, prompt in prompts.items():
        if asked.tokens[slot] != expected[f"text{slot - 1}"][len(prompt) :].tolist():
            return float("inf")
        for scored, row in zip(asked.logprobs[slot], expected[f"scores{slot - 1}"]):
            worst = max(worst, float(np.abs(np.array(scored.top_logprobs) - row[list(scored.top_ids)]).max()))
    return worst


if __name__ == "__main__":
    write(Path(sys.argv[1]))
