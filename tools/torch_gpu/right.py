"""Is it right? Kernels and captured graphs against plain operations, on the GPU and on the CPU."""

from __future__ import annotations

from torch_gpu.plays import DRAWN, GREEDY, PENALISED, Play, tiny_model

from make_random_hybrid import TINY
from pippin.backends.torch.backend import TorchBackend
from pippin.types import SamplingParams

WAYS = (
    ("cpu, plain", "cpu", {"kernels": False}),
    ("gpu, plain", "cuda", {"kernels": False}),
    ("gpu, kernels", "cuda", {"kernels": True, "chunk_graphs": False}),
    ("gpu, all captured", "cuda", {"kernels": True, "chunk_graphs": True}),
)

SHAPE, CONTEXT, NUM_STEPS = TINY, 150, 24


def correct() -> None:
    """A tiny hybrid in four ways: the same tokens in float32, much the same numbers in bfloat16."""
    for dtype in ("float32", "bfloat16"):
        backends = {name: TorchBackend(tiny_model(dtype, SHAPE, device), num_slots=8, **options) for name, device, options in WAYS}
        for rows in (1, 3):
            if dtype == "float32":
                for params in (GREEDY, DRAWN, PENALISED):
                    same_tokens(backends, rows, params)
            near_numbers(dtype, backends, rows)
        for backend in backends.values():
            backend.runner.pools.arena.check_integrity()


def same_tokens(backends: dict[str, TorchBackend], num_rows: int, params: SamplingParams) -> None:
    said = {name: reply_of(backend, num_rows, params).tokens for name, backend in backends.items()}
    expected = said["cpu, plain"]
    for name, tokens in said.items():
        same = tokens == expected
        print(f"float32, {num_rows} rows, temperature {params.temperature}: {name}: {'same' if same else 'DIFFERS'}", flush=True)
        if not same:
            print("   ", tokens[1][:16], "\n   ", expected[1][:16])


def reply_of(backend: TorchBackend, num_rows: int, params: SamplingParams) -> Play:
    play = Play(backend, num_rows, CONTEXT, params)
    play.decode(NUM_STEPS)
    play.end()
    return play


def near_numbers(dtype: str, backends: dict[str, TorchBackend], num_rows: int) -> None:
    """Log probabilities of the five likeliest tokens, as long as the same tokens were said."""
    params = SamplingParams(temperature=0.0, logprobs=5)
    plays = {name: reply_of(backend, num_rows, params) for name, backend in backends.items()}
    expected = plays["cpu, plain"]
    for name, play in plays.items():
        worst, compared = 0.0, 0
        for slot in play.slots:
            pairs = zip(play.tokens[slot], expected.tokens[slot], play.logprobs[slot], expected.logprobs[slot])
            for token, other, found, wanted in pairs:
                if token != other:
                    break
                compared += 1
                worst = max(worst, *(abs(a - b) for a, b in zip(found.top_logprobs, wanted.top_logprobs)))
        print(f"{dtype}, {num_rows} rows: {name}: log probabilities differ by {worst:.1e} at most, in {compared} tokens", flush=True)
        assert dtype != "float32" or worst < 1e-2, f"{name} computes something else"
