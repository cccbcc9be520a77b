"""Decode rows beside chunks of prompts; and captured chunks against launched ones."""

from __future__ import annotations

import numpy as np
import torch

from torch_gpu.plays import CONTEXT, DRAWN, GREEDY, Requests, gpu_ms, make_model, tiny_model

from make_random_hybrid import QWEN3_0_6B
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.words import StepSize, mixed_size_for, room_for, width_for
from pippin.types import SamplingParams

HELP = "chunks of prompts are not captured (the warning above says why): CHUNK_GRAPHS = False in backends/torch/backend.py launches them"
NEAR = {"float32": 1e-2, "bfloat16": 0.5}  # log probabilities after another order of sums


def compare(launched: TorchBackend, captured: TorchBackend, room: StepSize, dtype: str) -> None:
    """Prompts that fill the room, each in two chunks with states kept between, greedy and drawn."""
    for params in (GREEDY, DRAWN, SamplingParams(temperature=0.0, logprobs=5)):
        found, expected = (RoomPrompts(backend, room, params).run() for backend in (captured, launched))
        steps = captured.runner.forwards.steps
        assert steps is not None and steps.works(room), HELP
        if dtype == "float32":
            assert found.tokens == expected.tokens, f"{room}: captured {found.tokens}, launched {expected.tokens}"
        for slot, lines in found.logprobs.items():
            for mine, theirs in zip(lines, expected.logprobs[slot]):
                worst = max(abs(a - b) for a, b in zip(mine.top_logprobs, theirs.top_logprobs))
                assert worst < NEAR[dtype], f"{room}, slot {slot}: log probabilities differ by {worst:.1e}"
                if mine.top_ids[0] != theirs.top_ids[0]:
                    break  # two different texts from here on
    for backend in (launched, captured):
        backend.runner.pools.arena.check_integrity()
        assert backend.runner.pools.arena.used_bytes == 0


class RoomPrompts(Requests):
    """As many rows as the room is for, of different lengths."""

    def __init__(self, backend: TorchBackend, room: StepSize, params: SamplingParams) -> None:
        super().__init__(backend, room.least_chunks)
        each = room.num_tokens // room.least_chunks
        rng = np.random.default_rng(room.num_tokens)
        vocab = backend.spec.vocab_size
        # The second chunk has as many tokens as the room; the first one any.
        lengths = {slot: max(1, each - slot + 1) for slot in self.slots}
        self.prompts = {s: rng.integers(10, vocab, n + 70).astype(np.int32) for s, n in lengths.items()}
        self.params = params

    def run(self) -> RoomPrompts:
        first = [PrefillRow(s, 0, p[:70], captures=True, checkpoints=(64, 70)) for s, p in self.prompts.items()]
        admit = tuple(Admit(s, self.params, (), p, seed=s) for s, p in self.prompts.items())
        self.take(self.launch(admit=admit, prefill=tuple(first)))
        self.take(self.launch(prefill=self.second()))
        for step in range(3):
            self.take(self.launch(decode=tuple(DecodeRow(s, len(p) + step) for s, p in self.prompts.items())))
        self.end()
        return self

    def second(self) -> tuple[PrefillRow, ...]:
        return tuple(PrefillRow(s, 70, p[70:], samples=True, captures=True, checkpoints=(len(p),)) for s, p in self.prompts.items())


MIXED = "decode rows beside chunks"
PLAIN = QWEN3_0_6B | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}


def mixed() -> None:
    """Decode rows beside a chunk: the same tokens as apart, and the time of one forward against two."""
    loaded = tiny_model("float32", PLAIN)
    apart, together = (TorchBackend(loaded, num_slots=80) for _ in range(2))
    apart.runner.forwards.kinds -= {MIXED}
    for num_rows, num_tokens in ((3, 40), (8, 200), (60, 700)):
        for params in (GREEDY, DRAWN):
            found, expected = (Beside(backend, num_rows, num_tokens, params).run() for backend in (together, apart))
            assert found == expected, f"{num_rows} rows beside {num_tokens} tokens say something else"
    assert MIXED in {size.kind for size, _ in together.runner.forwards.steps.graphs}, "nothing was captured"
    print("decode rows beside chunks say what they say apart", flush=True)
    backend = TorchBackend(make_model(QWEN3_0_6B, torch.bfloat16), num_slots=72, pool_bytes=24 << 30)
    print("\nQwen3-0.6B\n\n| rows | tokens | decode, ms | chunk, ms | both in one, ms |\n|---|---|---|---|---|", flush=True)
    for num_rows in (64, 8):
        beside = Beside(backend, num_rows, 1024, GREEDY)
        for num_tokens in (64, 512):
            print("| {} | {} | {:.2f} | {:.2f} | {:.2f} |".format(num_rows, num_tokens, *beside.times(num_tokens)), flush=True)
        beside.end()


class Beside(Requests):
    """Rows of 512 tokens, and a prompt that arrives while they run."""

    def __init__(self, backend: TorchBackend, num_rows: int, num_tokens: int, params: SamplingParams) -> None:
        super().__init__(backend, num_rows + 1)
        rng, vocab = np.random.default_rng(num_rows), backend.spec.vocab_size
        *self.rows, self.last = self.slots
        prompts = {slot: rng.integers(10, vocab, CONTEXT).astype(np.int32) for slot in self.rows}
        for slot, prompt in prompts.items():
            self.take(self.launch(admit=(Admit(slot, params, (), prompt, seed=slot),), prefill=(PrefillRow(slot, 0, prompt, samples=True),)))
        self.context, self.params, self.num_tokens = CONTEXT, params, num_tokens
        self.prompt = rng.integers(10, vocab, 70 + num_tokens).astype(np.int32)

    def step(self, *chunks: PrefillRow) -> None:
        self.take(self.launch(decode=tuple(DecodeRow(slot, self.context) for slot in self.rows), prefill=chunks))
        self.context += 1

    def arrive(self, num_tokens: int) -> None:
        """In two chunks, and leave again."""
        prompt = self.prompt[: 70 + num_tokens]
        self.take(self.launch(admit=(Admit(self.last, self.params, (), prompt, seed=self.last),)))
        self.step(PrefillRow(self.last, 0, prompt[:70], captures=True, checkpoints=(64, 70)))
        self.step(PrefillRow(self.last, 70, prompt[70:], samples=True))
        self.take(self.launch(retire=(Retire(self.last),)))

    def run(self) -> dict[int, list[int]]:
        self.arrive(self.num_tokens)
        self.step()
        self.end()
        return self.tokens

    def times(self, num_tokens: int) -> tuple[float, float, float]:
        """Replays of what was captured, each with its words: a decode step, the chunk, both in one forward."""
        forwards, sent = self.backend.runner.forwards, {}
        steps, kinds = forwards.steps, forwards.kinds
        run = steps.run
        steps.run = lambda size, words, choice: (sent.update({size: words}), run(size, words, choice))[1]
        forwards.kinds = kinds - {MIXED}
        self.arrive(num_tokens)
        forwards.kinds = kinds
        self.arrive(num_tokens)
        del steps.run
        size = mixed_size_for(len(self.rows), num_tokens, 1)
        wanted = (
            (StepSize(width_for(len(self.rows))), Choice.GREEDY),
            (room_for(num_tokens, 1), Choice.GREEDY),
            (size, Choice.DRAWN),
        )

        def ms(size: StepSize, choice: Choice) -> float:
            steps._send(sent[size])
            return gpu_ms(steps.graphs[size, choice].replay, repeats=10)

        with torch.inference_mode(), torch.cuda.stream(self.backend._streams._forward):
            return tuple(ms(*each) for each in wanted)
