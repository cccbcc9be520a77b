"""python -m pippin.backends.mlx.cpu.warm MODEL_DIR DTYPE ENGINE_PID: build compiled steps' kernels.

Runs the compiled step on every form that its kernels can take: one row and several; where rows are
not listed, mains that are full and mains with padding, rows that share what they begin with.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.listed_kv import lister_for
from pippin.backends.mlx.attention.split_attention import SHARED_BLOCK
from pippin.backends.mlx.cpu.kernels import marker_path
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.prefill.chunk_forward import ChunkForward
from pippin.backends.mlx.rows.cohort_mains import SCATTERED_STEPS
from pippin.backends.mlx.rows.cohorts import COLUMN_STEP
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows

SHARED_LEN = 18 * SHARED_BLOCK - SCATTERED_STEPS + 1  # whole blocks when settled rows regroup
FULL, PADDED = COLUMN_STEP, COLUMN_STEP - 3  # tokens of a main
FORMS = ([FULL], [PADDED], [FULL, PADDED], [FULL, FULL])
LISTED_FORMS = ([PADDED], [PADDED, PADDED])
WATCH_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # see prctl(2)
NUM_STEPS = 4 * SCATTERED_STEPS
CHUNK_TOKENS = 16  # any number but one has the same kernels
SHARED_FORMS = ([SHARED_LEN, SHARED_LEN], [SHARED_LEN, SHARED_LEN - 3])


def forms_of(loaded: LoadedModel) -> Iterable[list[int]]:
    """The lengths of rows that join together."""
    listed = lister_for(loaded.layout) is not None
    return LISTED_FORMS if listed else (*FORMS, *SHARED_FORMS)


def prompt_of(loaded: LoadedModel, num_tokens: int) -> PromptState:
    prompt = PromptState()
    batch = ChunkBatch(loaded.layout, [np.zeros(num_tokens, dtype=np.int32)], [prompt])
    loaded.forward(batch.tokens, batch.caches)
    batch.advance()
    return prompt


def run(loaded: LoadedModel, lengths: list[int], num_steps: int) -> None:
    forward = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    rows = DecodeRows(loaded.layout)
    slots = list(range(1, len(lengths) + 1))
    lengths_by_slot = dict(zip(slots, lengths, strict=True))
    rows.join(
        [(slot, prompt_of(loaded, n)) for slot, n in lengths_by_slot.items()],
        {slot: np.zeros(n, dtype=np.int32) for slot, n in lengths_by_slot.items()},
    )
    for _ in range(num_steps):
        _, logits = rows.advance(slots, lambda at: mx.zeros(len(at), mx.int32), forward)
        mx.eval(logits, *rows.arrays())


def run_chunks(loaded: LoadedModel) -> None:
    """The kernels of a compiled chunk, whatever its length and what is before it."""
    forward = ChunkForward(loaded.layout, loaded.forward, loaded.head, lambda: True)
    prompt = PromptState()
    for _ in range(2):
        tokens = np.zeros(CHUNK_TOKENS, dtype=np.int32)
        batch = ChunkBatch(loaded.layout, [tokens], [prompt])
        logits, _ = forward(batch, prompt)
        batch.advance()
        mx.eval(logits, prompt.arrays())


def leave_with(engine: int) -> None:
    """Once the engine that wanted the kernels is gone, end at once, and the compilers with us.

    It says itself who it is: when we ask for our parent, that may be somebody else already.
    """
    while os.getppid() == engine:
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def be_killed_with_parent() -> None:
    """Linux does that also to a process that is stopped, and cannot look for its engine itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def build(loaded: LoadedModel) -> None:
    for lengths in forms_of(loaded):
        run(loaded, lengths, num_steps=NUM_STEPS)
    if loaded.compiles_chunks:
        run_chunks(loaded)
    marker_path(loaded).touch()


def main() -> int:
    os.nice(19)
    be_killed_with_parent()
    model_dir, dtype, engine = sys.argv[1:]
    threading.Thread(target=leave_with, args=(int(engine),), daemon=True).start()
    build(load(Path(model_dir), dtype=dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
