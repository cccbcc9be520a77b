"""The bundled model against transformers on torch: a reference that shares no code with mlx-lm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import pippin
from pippin.backends.mlx.backend import MLXBackend
from pippin.messages import Submit
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Limits, Scheduler
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install 'pippin[reference]'", allow_module_level=True)

MODEL = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
MAX_TOKENS = 40
# mlx-lm adds the norms' 1 while the checkpoint is still float16; transformers adds it in float32.
TOLERANCE = 4e-3
PROMPTS = (
    "Once upon a time",
    "The little dog ran to the park because",
    "Lily and Tom wanted to bake a cake. First they",
    "One day, a big bear met a small rabbit in the wood. " * 7 + "The rabbit said:",
)

# In a process of its own: torch brings threads and a BLAS that are nobody else's business here.
REFERENCE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
path, max_tokens, prompts = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
answers = []
for prompt in prompts:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                             max_new_tokens=max_tokens, min_new_tokens=max_tokens)
        logprobs = torch.log_softmax(model(tokens).logits[0, -1], -1)
    answers.append({"tokens": out[0, len(prompt):].tolist(), "first": logprobs.tolist()})
print(json.dumps(answers))
"""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@cache
def prompts() -> tuple[list[int], ...]:
    return tuple(tokenizer().encode(text) for text in PROMPTS)


@cache
def reference() -> list[dict[str, list[float]]]:
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(MODEL), str(MAX_TOKENS)],
        input=json.dumps(prompts()),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, list[float]]] = json.loads(done.stdout)
    return answers


@cache
def backend() -> MLXBackend:
    return MLXBackend.load(MODEL, num_slots=len(PROMPTS), dtype="float32")


def generate(numbers: tuple[int, ...]) -> tuple[dict[int, list[int]], dict[int, dict[int, float]]]:
    """Greedy replies, and the likeliest first tokens with their log probabilities, by prompt."""
    loop = Loop(Scheduler(backend().spec, Limits(max_running=len(PROMPTS))), backend())
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=20)
    for number in numbers:
        loop.submit(Submit(str(number), prompts()[number], params))
    replies: dict[int, list[int]] = {number: [] for number in numbers}
    first: dict[int, dict[int, float]] = {}
    while not loop.idle:
        for delta in loop.step():
            assert delta.error is None, delta.error
            replies[int(delta.id)] += delta.tokens
            for entry in (delta.logprobs or [])[:1]:
                tops = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
                first.setdefault(int(delta.id), tops)
    return replies, first


def test_prompts_are_long_enough_to_cross_a_block_and_short_enough_not_to() -> None:
    lens = sorted(len(tokens) for tokens in prompts())
    assert lens[0] < 16
    assert lens[-1] > 64


def test_together_the_bundled_model_says_what_transformers_says() -> None:
    replies, _ = generate(tuple(range(len(PROMPTS))))
    for number, answer in enumerate(reference()):
        expected = [int(token) for token in answer["tokens"]]
        assert tokenizer().decode(replies[number]) == tokenizer().decode(expected)
        assert replies[number] == expected


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_alone_the_bundled_model_says_what_transformers_says(number: int) -> None:
    replies, first = generate((number,))
    answer = reference()[number]
    assert replies[number] == [int(token) for token in answer["tokens"]]
    found = first[number]
    expected = np.array(answer["first"])[list(found)]
    np.testing.assert_allclose(list(found.values()), expected, atol=TOLERANCE)
