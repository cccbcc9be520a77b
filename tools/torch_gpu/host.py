"""What comes back from the host's memory: the same tokens, how soon, and what streams notice of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_gpu.plays import random_model, tiny_model

from pippin.backends.base import Backend
from pippin.backends.torch.backend import TorchBackend
from pippin.types import SamplingParams

PROMPTS_EACH = 4  # of a length; the first is not timed
REPLY_TOKENS = 24
MOST_FIRST_MS = 60.0  # of a stream's gap


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when tokens came
    asked: float = 0.0
    cached: int = 0
    from_host: int = 0
    ended: bool = False

    @property
    def first_ms(self) -> float:
        return (self.times[0] - self.asked) * 1e3


class Asker:
    """A client of a loop in this process."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.answers: dict[str, Answer] = {}

    def submit(self, prompt: Sequence[int], max_tokens: int = REPLY_TOKENS, params: SamplingParams | None = None, *, embeds: bool = False) -> Answer:
        from pippin.messages import Submit, pack_tokens

        name, answer = f"r{len(self.answers)}", Answer(asked=time.perf_counter())
        self.answers[name] = answer
        params = params or SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.loop.submit(Submit(name, pack_tokens(prompt), params, [], [], embeds=embeds))
        return answer

    def step(self) -> None:
        for delta in self.loop.step():
            answer = self.answers[delta.id]
            if delta.error is not None:
                raise AssertionError(f"{delta.id} failed: {delta.error}")
            answer.tokens += delta.tokens
            answer.times += [time.perf_counter()] * bool(delta.tokens)
            answer.cached += delta.cached_tokens or 0
            answer.from_host += delta.host_tokens
            answer.ended = delta.finish is not None

    def ask(self, prompt: Sequence[int]) -> Answer:
        answer = self.submit(prompt)
        while not answer.ended:
            self.step()
        return answer

    def drain(self) -> None:
        """Until all that is to be copied to the host has been, however slowly: to hurry such a tier is to forget it."""
        (host,) = self.loop.scheduler.traffic.tiers
        spills = host.spills
        while not self.loop.idle or spills.busy(now=float("inf")):
            self.step()

    def empty_device(self) -> None:
        """Evict whatever no request holds: the host has it."""
        self.drain()
        self.loop.scheduler.cache.flush()


def make_loop(backend: Backend, memory: str, host_cache: str | None, max_running: int = 16, speculate: str = "off") -> Any:
    from pippin.engine.build_loop import build_loop
    from pippin.config import Config, EngineConfig, ModelConfig

    engine = EngineConfig(max_running=max_running, memory=memory, host_cache=host_cache, speculate=speculate)
    return build_loop(Config(ModelConfig("random", backend="torch"), engine), lambda _: None, backend=backend)


def make_prompts(rng: np.random.Generator, vocab: int, length: int, number: int) -> list[list[int]]:
    return [rng.integers(10, vocab, length).tolist() for _ in range(number)]


def come_back(loop: Any, lengths: Iterable[int], name: str, *, exact: bool) -> None:
    """Each prompt cold, again from the device's own tree, and from the host. `exact`: a restored prompt says what it said
    cold; in half precision two tokens are often on a level, and chunks round otherwise than a whole hit does. Loads are made
    whatever they take: of a tiny model computing is faster."""
    loop.scheduler.pace.compute_seconds = float  # as if a token took a second
    asker, rng = Asker(loop), np.random.default_rng(0)
    for length in lengths:
        prompts = make_prompts(rng, loop.scheduler.spec.vocab_size, length, PROMPTS_EACH)
        cold = [asker.ask(prompt) for prompt in prompts]
        asker.drain()
        warm = [asker.ask(prompt) for prompt in prompts]
        asker.empty_device()
        back = [asker.ask(prompt) for prompt in prompts]
        like_cold = sum(a.tokens == b.tokens for a, b in zip(cold, back))
        like_warm = sum(a.tokens == b.tokens for a, b in zip(warm, back))
        times = [statistics.median(a.first_ms for a in answers[1:]) for answers in (cold, warm, back)]
        print(
            f"{name}, {length:,} tokens: first token {times[0]:.1f} ms cold, {times[1]:.1f} in the device's tree, {times[2]:.1f} from the host "
            f"({times[2] / times[0]:.0%} of cold); from there {[a.from_host for a in back]}; of {len(back)} replies {like_cold} as cold, {like_warm} as from the tree",
            flush=True,
        )
        assert all(a.from_host == a.cached > length - 64 for a in back), "a prompt was computed though the host had it"
        assert like_warm == len(back), "what came from the host says otherwise than what the device held"
        assert like_cold == len(back) or not exact, "what came from the host says otherwise than cold"
        asker.empty_device()


def gaps(loop: Any, length: int, num_streams: int, num_tokens: int, num_prompts: int) -> dict[str, float]:
    """Streams' gaps alone, while prompts come from the host, and while they are computed; the longest of each, ms."""
    asker, rng = Asker(loop), np.random.default_rng(1)
    vocab = loop.scheduler.spec.vocab_size
    known, new = (make_prompts(rng, vocab, length, num_prompts) for _ in range(2))
    for prompt in known:
        asker.ask(prompt)
    asker.empty_device()
    longest: dict[str, float] = {}
    ways: dict[str, list[list[int]]] = {"alone": [], "prompts from the host": known, "prompts computed": new}
    for way, prompts in ways.items():
        streams = [asker.submit(prompt, num_tokens) for prompt in make_prompts(rng, vocab, 64, num_streams)]
        waiting, asked = list(prompts), []
        every = num_tokens // (num_prompts + 2)
        while not all(stream.ended for stream in streams):
            if waiting and len(streams[0].tokens) >= every * (len(asked) + 1):
                asked.append(asker.submit(waiting.pop(0), 1))
            asker.step()
        asker.drain()
        between = sorted(np.concatenate([np.diff(stream.times) for stream in streams]) * 1e3)
        p50, p99 = (between[int(share * (len(between) - 1))] for share in (0.5, 0.99))
        firsts = statistics.median(a.first_ms for a in asked) if asked else 0.0
        print(
            f"{num_streams} streams, {way}: gaps p50 {p50:.2f}, p99 {p99:.2f}, longest {between[-1]:.2f} ms; "
            f"{len(asked)} prompts of {length:,}, first token after {firsts:.1f} ms, {sum(a.from_host for a in asked):,} tokens from the host",
            flush=True,
        )
        longest[way] = between[-1]
        asker.empty_device()
    return longest


def tell(loop: Any) -> None:
    told = loop.counters()["host"]
    names = ("entries", "nbytes", "spilled_bytes", "loads", "loaded", "late_loads", "declined_loads", "failed_loads", "load_bytes_per_second")
    print("host tier:", {name: told[name] for name in names}, flush=True)
    assert not told["failed_loads"], "loads failed"
    assert not told["unreadable_entries"], "what was read is not what was written"


def run(loop: Any, parts: Callable[[Any], None]) -> None:
    try:
        parts(loop)
        tell(loop)
    finally:
        loop.close()


def host() -> None:
    tiny = TorchBackend(tiny_model("float32"), num_slots=16, pool_bytes=1 << 26)
    run(make_loop(tiny, "6GB", "1GB"), lambda loop: come_back(loop, (1000, 3000), "tiny, float32", exact=True))
    backend = TorchBackend(random_model(), num_slots=16, pool_bytes=1 << 26)
    began = time.perf_counter()
    loop = make_loop(backend, "24GB", "12GB")
    print(f"engine with 12 GB pinned after {time.perf_counter() - began:.1f} s", flush=True)
    loop.warm_up.run_at_load(lambda _: None)
    print(f"and warmed up after {time.perf_counter() - began:.1f} s", flush=True)

    def measure(loop: Any) -> None:
        firsts = gaps(loop, 4096, num_streams=8, num_tokens=200, num_prompts=4)  # nothing was moved before
        assert firsts["prompts from the host"] < MOST_FIRST_MS, "streams stop when a prompt first comes from the host"
        computes = loop.scheduler.pace.compute_seconds
        come_back(loop, (2048, 4096, 8192), "0.8B, bfloat16", exact=False)
        loop.scheduler.pace.compute_seconds = computes
        gaps(loop, 4096, num_streams=8, num_tokens=400, num_prompts=8)

    run(loop, measure)
