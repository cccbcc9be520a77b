"""The depth of drafts is what a device's costs and a text's chances allow, whatever these are, and
trying never costs more than a small share of what there would be without."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from zlib import crc32

import pytest

from builders import make_prompt, oracle
from oracle_drafter import OracleDrafter
from pippin.scheduler.pace import CostModel, Timed
from pippin.scheduler.speculation import Acceptance, Candidate, DepthPolicy, Speculation
from timed import LARGE_GPU, serve

NUM_WORLDS = 48
NUM_STEPS = 800
MAX_DEPTH = 6
MANY_ROWS = 32

Seconds = Callable[[int, Sequence[int]], float]  # of a step: of rows, and the drafts of each
Chooses = Callable[[int, Sequence[Candidate]], Sequence[int]]


# ---- worlds --------------------------------------------------------------------------------------


def linear(fixed: float, draft: float, rows: int, depths: Sequence[int]) -> float:
    """Verifying costs something by itself, and by draft."""
    return 1.0 + 0.02 * rows + fixed * any(depths) + draft * sum(depths)


def knee(tokens_free: int, rows: int, depths: Sequence[int]) -> float:
    """Memory decides up to so many tokens, then arithmetic does."""
    return max(1.0, (rows + sum(depths)) / tokens_free)


def stairs(step: int, height: float, rows: int, depths: Sequence[int]) -> float:
    """Tiles: a few tokens cost as much as many."""
    return 1.0 + height * math.ceil((rows + sum(depths)) / step)


def padded(draft: float, rows: int, depths: Sequence[int]) -> float:
    """Every row costs as much as the deepest."""
    return 1.0 + 0.02 * rows + draft * rows * max(depths)


def draw_device(rng: random.Random) -> Seconds:
    draft = 10 ** rng.uniform(-3.0, 0.0)
    fixed = rng.choice([0.0, rng.uniform(0.0, 0.5)])
    return rng.choice(
        [
            partial(linear, fixed, draft),
            partial(knee, rng.choice([4, 16, 64, 256])),
            partial(stairs, rng.choice([4, 8, 16, 64]), rng.uniform(0.01, 0.5)),
            partial(padded, draft / 10),
        ]
    )


def draw_chance(rng: random.Random, kind: str) -> tuple[float, float]:
    """Of a reply's drafts: to be right at the first place, and for each further place times."""
    if kind == "any":
        return rng.random(), rng.uniform(0.7, 1.0)
    if kind == "some":
        return (0.95, 1.0) if rng.random() < 0.3 else (0.02, 1.0)
    return {"none": (0.0, 1.0), "all": (1.0, 1.0), "half": (0.5, 0.9)}[kind]


@dataclass
class World:
    """Streams that end and are followed by others."""

    seed: int
    seconds: Seconds = field(init=False)
    took: float = 0.0
    plain: float = 0.0  # what the same tokens take without drafts
    _chances: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.seconds = draw_device(rng)
        self.kind = rng.choice(["any", "some", "none", "all", "half"])
        self.noise = rng.choice([0.0, 0.02, 0.05])
        self.num_rows = rng.choice([1, 1, 2, 4, 8, 16, 32, 64])
        self.steps_alike = rng.choice([NUM_STEPS, NUM_STEPS, 50, 150])  # of as many rows
        self.length = rng.choice([40, 200, 2000])
        self.proposes = rng.choice([1.0, 1.0, 0.3])  # share of rows and steps with a proposal
        self.rng = rng

    def chance(self, name: str) -> tuple[float, float]:
        if name not in self._chances:
            self._chances[name] = draw_chance(random.Random(f"{self.seed} {name}"), self.kind)
        return self._chances[name]

    def run(self, choose: Chooses, policy: DepthPolicy | None = None) -> float:
        """Speed-up over no drafts; results of a step are known when the next one is planned."""
        rng = self.rng
        left = [rng.randint(1, self.length) for _ in range(self.num_rows)]
        names = [str(number) for number in range(self.num_rows)]
        started, in_flight = self.num_rows, None
        for step in range(NUM_STEPS):
            rows = 1 + crc32(b"%d" % (step // self.steps_alike)) % self.num_rows
            if self.steps_alike == NUM_STEPS:
                rows = self.num_rows
            offers = [MAX_DEPTH if rng.random() < self.proposes else 0 for _ in range(rows)]
            offered = zip(names, offers, strict=False)
            depths = choose(rows, [Candidate(name, depth) for name, depth in offered])
            accepted = [self.accept(name, d) for name, d in zip(names, depths, strict=False)]
            took = self.seconds(rows, depths)
            self.took += took
            self.plain += (rows + sum(accepted)) * self.seconds(rows, [0] * rows) / rows
            if policy is not None and in_flight is not None:
                learn(policy, *in_flight)
            seen = took * rng.lognormvariate(0.0, self.noise)
            in_flight = seen, names[:rows], list(depths), accepted
            for row, num_right in enumerate(accepted):
                left[row] -= 1 + num_right
                if left[row] <= 0:
                    names[row], left[row] = str(started), self.length
                    started += 1
        return self.plain / self.took

    def accept(self, name: str, depth: int) -> int:
        chance, further = self.chance(name)
        accepted = 0
        while accepted < depth and self.rng.random() < chance:
            accepted, chance = accepted + 1, chance * further
        return accepted


def decide(policy: DepthPolicy, rows: int, candidates: Sequence[Candidate]) -> list[int]:
    return [0] * len(candidates) if policy.rests(rows) else policy.choose(rows, candidates)


def see(policy: DepthPolicy, timed: Timed) -> None:
    policy.costs.observe(timed)
    policy.observe(timed)


def learn(
    policy: DepthPolicy, seconds: float, names: list[str], depths: list[int], accepted: list[int]
) -> None:
    for name, depth, right in zip(names, depths, accepted, strict=True):
        if depth:
            policy.acceptance.observe(name, 0, depth, right)
    drafts = sum(depths), sum(accepted), max(depths, default=0)
    see(policy, Timed(seconds, len(names), 0, *drafts))


def speed_up(seed: int) -> float:
    policy = DepthPolicy()
    return World(seed).run(partial(decide, policy), policy)


def best_fixed(seed: int) -> float:
    """Of all rows of all steps: chosen by who knows."""

    def fixed(depth: int, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        return [min(depth, candidate.depth) for candidate in candidates]

    return max(World(seed).run(partial(fixed, depth)) for depth in range(MAX_DEPTH + 1))


# ---- what is shown -------------------------------------------------------------------------------


def test_drafts_never_cost_more_than_three_in_a_hundred() -> None:
    """Whatever a device's costs, the chances of drafts, the number of rows and the noise."""
    for seed in range(NUM_WORLDS):
        found = speed_up(seed)
        assert found >= 0.97, (seed, found, World(seed))


def test_a_loss_stops_drafts_before_the_estimates_follow() -> None:
    policy, row = DepthPolicy(), [Candidate("a", 4)]
    for _ in range(200):
        depths = decide(policy, 1, row)
        learn(policy, 1.0 + 0.01 * sum(depths), ["a"], depths, depths)
    depths = decide(policy, 1, row)
    assert depths == [4]
    learn(policy, 20.0, ["a"], depths, depths)  # all accepted, and yet slower by far
    assert decide(policy, 1, row) == [0]


def steps_with_drafts(seed: int) -> int:
    """Of 200, on a machine that takes three times as long for one step in five, by chance."""
    policy, rng, chosen = DepthPolicy(), random.Random(seed), []
    for _ in range(400):
        (depth,) = decide(policy, 1, [Candidate("a", 4)])
        pause = 3.0 if rng.random() < 0.2 else 1.0
        learn(policy, pause * (1.0 + 0.2 * depth), ["a"], [depth], [min(depth, 2)])
        chosen.append(depth)
    return sum(depth > 0 for depth in chosen[200:])


def test_pauses_of_a_machine_seldom_stop_drafts() -> None:
    """They meet steps with drafts and without alike."""
    assert sum(map(steps_with_drafts, range(5))) > 400


def test_a_step_that_only_drafts_for_the_next_is_no_step_without_drafts() -> None:
    policy = DepthPolicy()
    for _ in range(20):
        see(policy, Timed(1.0, 1, 0))
        for _ in range(4):
            see(policy, Timed(3.0, 1, 0, num_turns=1))
    assert policy.costs.plain_seconds(1) == 1.0


def test_the_first_step_of_a_shape_says_nothing_of_drafts() -> None:
    """It is compiled, which takes as long as fifty others."""
    policy = DepthPolicy()
    for _ in range(4):
        learn(policy, 1.0, ["a"], [0], [0])
    see(policy, Timed(50.0, 1, 0, 2, 2, 2, num_new=1))
    for _ in range(20):
        depths = decide(policy, 1, [Candidate("a", 2)])
        learn(policy, 1.0, ["a"], depths, depths)
    assert depths == [2]


def test_drafts_that_do_not_pay_are_looked_for_ever_more_rarely() -> None:
    policy, looks, chosen = DepthPolicy(), [], 0
    for step in range(1000):
        depths = [0]
        if not policy.rests(1):
            looks.append(step)
            depths = policy.choose(1, [Candidate("a", 4)])
        chosen += depths[0]
        learn(policy, 1.0 + 0.5 * depths[0], ["a"], depths, [0])
    assert len([step for step in looks if step >= 500]) < 40
    assert 10 < chosen < 40, "now and then they are tried again"


def test_drafts_gain_about_what_the_best_fixed_depth_does() -> None:
    """Which one that is, is not known beforehand."""
    shares = [speed_up(seed) / best_fixed(seed) for seed in range(0, NUM_WORLDS, 4)]
    assert mean(shares) >= 0.95
    assert min(shares) >= 0.85


def settled(policy: DepthPolicy, chances: Sequence[float], num_steps: int = 200) -> list[int]:
    """What it chooses in the end for rows whose drafts are right so often, at a draft's tenth."""
    rng = random.Random(0)
    names = [str(number) for number in range(len(chances))]
    seen: list[list[int]] = []
    for _ in range(num_steps):
        depths = decide(policy, len(names), [Candidate(name, MAX_DEPTH) for name in names])
        accepted = []
        for chance, depth in zip(chances, depths, strict=True):
            right = 0
            while right < depth and rng.random() < chance:
                right += 1
            accepted.append(right)
        learn(policy, linear(0.0, 0.1, len(names), depths), names, depths, accepted)
        seen.append(depths)
    return [round(median(row)) for row in zip(*seen[-40:], strict=True)]


def test_rows_have_one_depth_that_pays_for_all_of_them() -> None:
    """Devices run each as deep as the deepest."""
    least, *others = settled(DepthPolicy(), [0.0, 0.5, 0.99])
    assert others == [least] * 2
    assert 0 < least < settled(DepthPolicy(), [0.99] * 3)[0]
    assert settled(DepthPolicy(), [0.0, 0.0, 0.05]) == [0, 0, 0]


def test_a_row_whose_drafts_failed_is_tried_again() -> None:
    policy = DepthPolicy()
    assert settled(policy, [0.0]) == [0]
    assert settled(policy, [0.99])[0] >= MAX_DEPTH - 1


def test_short_matches_say_nothing_of_long_ones() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.observe("a", 0, 4, 0)
        acceptance.observe("a", 3, 4, 4)
    assert acceptance.survival("a", 0, 4)[0] < 0.1
    assert acceptance.survival("a", 3, 4)[-1] > 0.8
    assert acceptance.survival("b", 3, 4)[-1] > 0.7, "what others showed is believed at first"
    acceptance.forget("a")
    assert not acceptance._of_request


def test_requests_differ_in_how_often_drafts_are_right() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.observe("a", 0, 4, 0)
        acceptance.observe("b", 0, 4, 4)
    assert acceptance.survival("a", 0, 1)[0] < 0.2
    assert acceptance.survival("b", 0, 1)[0] > 0.8


def test_what_drafts_cost_is_learnt_apart_from_rows() -> None:
    """Else the pace of prompts would take verified drafts for slower streams."""
    costs, rng = CostModel(), random.Random(0)
    for _ in range(200):
        rows, drafts = rng.choice([2, 8, 16]), rng.choice([0, 0, 8, 24])
        costs.observe(Timed(0.01 + 0.001 * rows + 0.0005 * drafts, rows, 0, drafts))
    assert costs.decode_seconds(8) == pytest.approx(0.018, rel=0.02)
    assert costs.decode_seconds(8, 24) == pytest.approx(0.030, rel=0.02)


# ---- in the engine -------------------------------------------------------------------------------


def serve_seconds(num_rows: int, share_right: float | None, draft: float) -> float:
    """Until replies of so many rows ended, which are as they are without drafts."""
    asks = [(0.0, str(row), make_prompt(20, row), {"max_tokens": 400}) for row in range(num_rows)]
    replies = {name: oracle(prompt, max_tokens=400)[0] for _, name, prompt, _ in asks}
    speculation = None
    if share_right is not None:
        drafter = OracleDrafter(lambda request: replies[request.id], share_right, 97)
        policy = DepthPolicy()
        speculation = Speculation(drafter, 4, lambda running: 4, policy)
    heard = serve(replace(LARGE_GPU, draft=draft), asks, speculation=speculation)
    assert {name: one.reply.tokens for name, one in heard.items()} == replies
    if share_right is not None:
        learnt = policy.acceptance.survival("another", 0, 1)
        assert learnt == pytest.approx([share_right], abs=0.2)
    return max(one.times[-1] for one in heard.values())


@pytest.mark.parametrize("num_rows", [1, 12])
def test_right_drafts_make_an_engine_faster_and_wrong_ones_hardly_slower(num_rows: int) -> None:
    plain = serve_seconds(num_rows, None, 0.0)
    assert plain / serve_seconds(num_rows, 1.0, 2e-5) > 2.5
    assert plain / serve_seconds(num_rows, 0.0, 1e-3) > 0.97
