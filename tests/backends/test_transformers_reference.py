"""The bundled model against transformers on torch: a reference that shares no code with mlx-lm.

Transformers scores what was said, given what was said before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache

import numpy as np
import pytest

from builders import Client, Reply
from bundled import BUNDLED_PATH, load_bundled
from near_ties import assert_best
from pippin.backends.mlx.backend import MLXBackend
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from pippin.text.tokenizer import Tokenizer
from processes import is_installed

pytestmark = pytest.mark.slow

if not is_installed("torch"):
    pytest.skip("torch is not installed: pip install 'pippin[reference]'", allow_module_level=True)

MAX_TOKENS = 40
# mlx-lm adds the norms' 1 while the checkpoint is still float16; transformers adds it in float32.
TOLERANCE = 1e-2
PROMPTS = (
    "Once upon a time",
    "The little dog ran to the park because",
    "Lily and Tom wanted to bake a cake. First they",
    "One day, a big bear met a small rabbit in the wood. " * 7 + "The rabbit said:",
)

# In a process of its own: torch brings threads and a BLAS that are nobody else's business here.
SCORE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch, transformers
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
path, output = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
with torch.no_grad():
    logits = [model(torch.tensor([tokens])).logits[0] for tokens in json.load(sys.stdin)]
numpy.savez(output, *(torch.log_softmax(rows, -1).numpy() for rows in logits))
"""


@cache
def prompts() -> tuple[list[int], ...]:
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    return tuple(tokenizer.encode(text) for text in PROMPTS)


@cache
def replies_together() -> list[Reply]:
    return ask(*prompts())


@cache
def reply_alone(number: int) -> Reply:
    (reply,) = ask(prompts()[number])
    return reply


def ask(*prompts: list[int]) -> list[Reply]:
    backend = MLXBackend(load_bundled(), num_slots=len(PROMPTS))
    client = Client(Loop(Scheduler(backend, Limits(max_running=len(PROMPTS))), backend))
    replies = [client.submit(p, max_tokens=MAX_TOKENS, logprobs=20) for p in prompts]
    client.run()
    return replies


@cache
def scores() -> dict[tuple[int, ...], np.ndarray]:
    """By prompt and reply: log probabilities [tokens, vocab] of what may follow each token."""
    replies = [*replies_together(), *map(reply_alone, range(len(PROMPTS)))]
    sequences = sorted({(*reply.prompt, *reply.tokens) for reply in replies})
    with tempfile.NamedTemporaryFile(suffix=".npz") as output:
        done = subprocess.run(
            [sys.executable, "-c", SCORE, str(BUNDLED_PATH), output.name],
            input=json.dumps(sequences),
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(sequences, np.load(output.name).values(), strict=True))


def check(reply: Reply) -> None:
    assert (reply.finish, len(reply.tokens)) == ("length", MAX_TOKENS)
    rows = scores()[(*reply.prompt, *reply.tokens)][len(reply.prompt) - 1 : -1]
    assert_best(reply.tokens, rows, margin=2 * TOLERANCE)
    for scored, row in zip(reply.logprobs, rows, strict=True):
        expected = row[list(scored.top_ids)]
        np.testing.assert_allclose(scored.top_logprobs, expected, rtol=0, atol=TOLERANCE)


def test_prompts_are_long_enough_to_cross_a_block_and_short_enough_not_to() -> None:
    lens = sorted(len(tokens) for tokens in prompts())
    assert lens[0] < 16
    assert lens[-1] > 64


def test_together_the_bundled_model_says_what_transformers_says() -> None:
    for reply in replies_together():
        check(reply)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_alone_the_bundled_model_says_what_transformers_says(number: int) -> None:
    check(reply_alone(number))
