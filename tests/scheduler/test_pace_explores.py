"""The pace finds the chunks that a device's costs allow, whatever these are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from builders import FixedPace, make_client, make_prompt
from pippin.scheduler.pace import SMALLEST_CHUNK, CostModel, Fit, Pace, Timed, _guess

NUM_DEVICES = 1000
MIXED_STEPS = 50
LAST_BIT = 2.0**-52

Measured = Callable[[float], float]  # what a clock shows of so many seconds


@dataclass(frozen=True)
class Device:
    decode: float  # seconds of a step with streams,
    row: float  # more for each of these,
    forward: float  # of a step with prompts,
    token: float  # and more for each of their tokens

    def seconds(self, rows: int, tokens: int) -> float:
        return self.decode + self.row * rows + (self.forward + self.token * tokens) * (tokens > 0)

    def within(self, noise: float) -> list[Device]:
        """Devices that are not to be told from this one."""
        factors = itertools.product((1 - 3 * noise, 1 + 3 * noise), repeat=3) if noise else ()
        return [
            Device(self.decode * a, self.row * a, self.forward * b, self.token * c)
            for a, b, c in factors
        ]


@dataclass(frozen=True)
class Load:
    device: Device
    num_streams: int
    num_prompts: int
    max_gap: float


def draw_load(rng: random.Random) -> Load:
    decode, token = 10 ** rng.uniform(-3.0, -1.5), 10 ** rng.uniform(-5.5, -3.0)
    row, forward = decode * 10 ** rng.uniform(-3, -1), token * 10 ** rng.uniform(0.5, 3.5)
    device = Device(decode, row, forward, token)
    num_streams = rng.choice([1, 2, 4, 8, 16, 32])
    tight = device.seconds(num_streams, SMALLEST_CHUNK) * rng.uniform(1.1, 4.0)
    return Load(device, num_streams, rng.choice([1, 2, 8]), rng.choice([math.inf, 0.2, tight]))


@dataclass
class KnownCosts(CostModel):
    """Costs that need not be learnt."""

    device: Device = field(default_factory=lambda: Device(1.0, 1.0, 1.0, 1.0))
    known = True

    def knows_decode(self, rows: int) -> bool:
        return True

    def predicts(self, rows: int, tokens: int) -> bool:
        return True

    def observe(self, step: Timed) -> None:
        pass

    def __post_init__(self) -> None:
        device = self.device
        costs = {"decode": device.decode, "row": device.row}
        self._fit = replace(GUESS, **costs, forward=device.forward, token=device.token)

    def _fitted(self) -> Fit:
        assert self._fit is not None
        return self._fit


GUESS = _guess((1, 1, 1, 1, 0, 1.0, 1))


def allowed(load: Load, device: Device) -> float:
    """The chunk of a pace that knows the costs."""
    pace = Pace(8192, load.max_gap, costs=KnownCosts(device=device))
    return median(mixed_steps(pace, load, 3, lambda seconds: seconds))


def mixed_steps(pace: Pace, load: Load, num_steps: int, measured: Measured) -> list[int]:
    chunks: list[int] = []
    while len(chunks) < num_steps:
        tokens = pace.budget(load.num_streams, load.num_prompts)
        pace.spend(tokens)
        seconds = measured(load.device.seconds(load.num_streams, tokens))
        pace.observe(Timed(seconds, load.num_streams, tokens))
        chunks.extend([tokens] if tokens else [])
    return chunks


def noisy(rng: random.Random, noise: float, seconds: float) -> float:
    """What a clock shows of so many seconds; the last bit is never to be trusted."""
    return seconds * (1.0 + rng.choice([-1, 0, 1]) * LAST_BIT) * rng.lognormvariate(0.0, noise)


def test_within_50_mixed_steps_chunks_are_what_any_costs_allow_and_the_gap_is_kept() -> None:
    """With no noise but the last bit, and with 2% and 5%: then what costs allow that are as near
    to the true ones as the noise."""
    for seed in range(NUM_DEVICES):
        rng, noise = random.Random(seed), (0.0, 0.02, 0.05)[seed % 3]
        load = draw_load(rng)
        pace = Pace(8192, load.max_gap)
        chunks = mixed_steps(pace, load, MIXED_STEPS, partial(noisy, rng, noise))
        wanted = min(allowed(load, device) for device in [load.device, *load.device.within(noise)])
        assert median(chunks[-10:]) >= 0.8 * wanted, (seed, load, chunks)
        smallest = load.device.seconds(load.num_streams, SMALLEST_CHUNK)
        longest = max(load.device.seconds(load.num_streams, tokens) for tokens in chunks)
        assert longest <= (1.05 + 6 * noise) * max(load.max_gap, smallest), (seed, load, chunks)


def test_where_only_shorter_chunks_can_explore_few_do_though_noise_leaves_costs_unsure() -> None:
    """Each costs a prompt a forward more."""
    load = Load(Device(0.0012, 1e-5, 0.003, 5.2e-6), num_streams=8, num_prompts=1, max_gap=0.2)
    chunks = mixed_steps(Pace(8192), load, 600, partial(noisy, random.Random(5), 0.05))[200:]
    shorter = [tokens for tokens in chunks if tokens < 0.7 * median(chunks)]
    assert len(shorter) < len(chunks) // 20


def test_chunks_of_one_size_predict_no_other_size() -> None:
    """They do not show what a forward costs and what its tokens do; a second size does."""
    device = Device(0.004, 0.0, 0.040, 1.7e-5)
    costs = CostModel()
    for _ in range(50):
        costs.observe(Timed(device.seconds(8, 0), 8, 0))
        costs.observe(Timed(device.seconds(8, 32), 8, 32))
    assert costs.predicts(8, 32)
    assert not costs.predicts(8, 48)
    for tokens in (64, 64, 65, 65):
        costs.observe(Timed(device.seconds(8, tokens), 8, tokens))
    assert costs.predicts(8, 48)


def test_what_takes_n_tokens_takes_n_tokens_whatever_the_last_bits() -> None:
    """`prefill_tokens` undoes `prefill_seconds`: a chunk does not lose a token to rounding."""
    for seed in range(200):
        costs = KnownCosts(device=draw_load(random.Random(seed)).device)
        for tokens in (16, 31, 32, 1000, 8191):
            assert costs.prefill_tokens(costs.prefill_seconds(tokens)) == tokens


def test_a_chunk_that_explores_runs_though_it_is_shorter_than_the_smallest() -> None:
    """Else a pace that can only explore downwards would learn nothing."""
    client = make_client(num_slots=2, chunk=512)
    client.submit(make_prompt(8, 1), max_tokens=40)
    client.step()
    long = client.submit(make_prompt(200, 2), max_tokens=2)
    client.loop.scheduler.pace = FixedPace(SMALLEST_CHUNK)
    client.step()
    client.loop.scheduler.pace = FixedPace(SMALLEST_CHUNK // 2)
    for _ in range(2 * 200 // (SMALLEST_CHUNK // 2)):
        client.step()
    assert long.tokens
