"""Which models are loaded: rules one by one, and random events against what must always hold."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cases import cases
from pippin.errors import NotReady, Overloaded
from pippin.switching import ModelTurn, State, Ticket, Turns

TURN = 10.0


def build_turns(
    *sizes: int, budget: int = 10, keep_alive: float | None = None, max_waiting: int = 1000
) -> Turns:
    models = [ModelTurn(name, size, keep_alive) for name, size in zip("ABCDE", sizes, strict=False)]
    return Turns(models, budget=budget, turn_s=TURN, max_waiting=max_waiting)


def load(turns: Turns, name: str, now: float) -> Ticket:
    """A request for a model that fits, which is loaded at once; it has a lease."""
    ticket = turns.ask(name, now)
    assert turns.decide(now).start == [name]
    turns.loaded(name, now)
    assert turns.decide(now).granted == [ticket]
    return ticket


def test_a_model_is_started_by_its_first_request_and_others_share_the_load() -> None:
    turns = build_turns(5, 5)
    first = turns.ask("A", 0.0)
    assert turns.decide(0.0).start == ["A"]
    second = turns.ask("A", 1.0)
    assert (first.place, second.place) == (1, 2)
    assert turns.decide(1.0).start == []
    turns.loaded("A", 2.0)
    assert turns.decide(2.0).granted == [first, second]
    assert turns.ask("A", 3.0).place == 0


def test_the_least_recently_used_engine_without_a_request_is_stopped() -> None:
    turns = build_turns(5, 5, 5)
    load(turns, "A", 0.0)
    load(turns, "B", 1.0)
    turns.release("B", 2.0)
    turns.release("A", 3.0)
    turns.ask("C", 4.0)
    decision = turns.decide(4.0)
    assert (decision.stop, decision.start) == (["B"], [])
    turns.stopped("B")
    assert turns.decide(5.0).start == ["C"]


def test_nothing_is_stopped_that_would_not_make_enough_room() -> None:
    turns = build_turns(3, 7, 9)
    load(turns, "A", 0.0)
    turns.release("A", 0.0)
    load(turns, "B", 1.0)  # and its reply runs
    turns.ask("C", 2.0)
    assert turns.decide(2.0).stop == []
    turns.decide(2.0 + TURN)
    turns.release("B", 2.0 + TURN)
    assert sorted(turns.decide(2.0 + TURN).stop) == ["A", "B"]


def test_a_busy_engine_yields_after_its_turn_and_its_reply_is_not_cut() -> None:
    turns = build_turns(10, 10)
    load(turns, "A", 0.0)
    waiting = turns.ask("B", 5.0)
    assert turns.decide(5.0).stop == []
    assert turns.next_time(5.0) == TURN
    during = turns.ask("A", 6.0)  # before A yields
    assert turns.decide(6.0).granted == [during]
    assert turns.next_time(TURN) == 5.0 + TURN
    turns.decide(5.0 + TURN)
    later = turns.ask("A", 5.0 + TURN)
    decision = turns.decide(5.0 + TURN)
    assert (decision.granted, decision.stop) == ([], []), "A gives no new lease and runs on"
    turns.release("A", 20.0)
    assert turns.decide(20.0).stop == [], "one of two replies still runs"
    turns.release("A", 21.0)
    assert turns.decide(21.0).stop == ["A"]
    turns.stopped("A")
    assert turns.decide(22.0).start == ["B"]
    turns.loaded("B", 23.0)
    assert turns.decide(23.0).granted == [waiting]
    assert later.id in turns.models["A"].waiting, "A waits for its next turn"


def test_engines_serve_again_when_the_one_that_waited_disconnects() -> None:
    turns = build_turns(10, 10)
    load(turns, "A", 0.0)
    waiting = turns.ask("B", 1.0)
    turns.decide(1.0 + TURN)
    queued = turns.ask("A", 2.0 + TURN)
    assert turns.decide(2.0 + TURN).granted == []
    turns.cancel(waiting)
    assert turns.decide(3.0 + TURN).granted == [queued]


def test_an_idle_engine_is_stopped_after_its_keep_alive() -> None:
    turns = build_turns(5, keep_alive=300.0)
    load(turns, "A", 0.0)
    assert turns.decide(1000.0).stop == [], "a reply runs"
    turns.release("A", 1000.0)
    assert turns.models["A"].expires_at == 1300.0
    assert turns.next_time(1000.0) == 1300.0
    assert turns.decide(1299.9).stop == []
    assert turns.decide(1300.0).stop == ["A"]


def test_requests_beyond_the_limit_are_refused_with_a_time_to_retry() -> None:
    turns = build_turns(10, 10, max_waiting=2)
    for _ in range(2):
        turns.ask("A", 0.0)
    with pytest.raises(Overloaded, match="2 requests wait for the model A") as refused:
        turns.ask("A", 0.0)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= TURN
    turns.ask("B", 0.0)


def test_a_model_that_failed_is_refused_for_a_while_and_longer_each_time() -> None:
    turns = build_turns(5)
    now, waits = 0.0, []
    for _ in range(3):
        ticket = turns.ask("A", now)
        assert turns.decide(now).start == ["A"]
        assert turns.failed("A", "no such weights", now) == [ticket]
        with pytest.raises(NotReady, match="no such weights") as refused:
            turns.ask("A", now)
        assert refused.value.retry_after_s is not None
        waits.append(refused.value.retry_after_s)
        now += refused.value.retry_after_s
    assert waits == [5, 10, 20]


# ---- random events ---------------------------------------------------------------------------


@dataclass
class Simulation:
    """Loads, stops and replies of random durations, on a clock of its own."""

    random: random.Random
    turns: Turns
    now: float = 0.0
    longest_reply: float = 0.0
    asked: dict[int, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    wakes: set[float] = field(default_factory=set)
    count: int = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, event))

    def run(self) -> None:
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.advance()

    def advance(self) -> None:
        turns, chance = self.turns, self.random
        decision = turns.decide(self.now)
        for name in decision.stop:
            assert turns.models[name].num_open == 0, "an engine with a lease was stopped"
            self.after(chance.uniform(0.0, 1.0), lambda name=name: turns.stopped(name))
        for name in decision.start:
            self.after(chance.uniform(0.1, 5.0), lambda name=name: self.end_load(name))
        for ticket in decision.granted:
            self.waits.append(self.now - self.asked.pop(ticket.id))
            reply_s = chance.choice([0.1, 1.0, 20.0])
            self.longest_reply = max(self.longest_reply, reply_s)
            self.after(reply_s, lambda name=ticket.name: turns.release(name, self.now))
        used = sum(m.nbytes for m in turns.models.values() if m.state is not State.STOPPED)
        assert used <= turns.budget
        time = turns.next_time(self.now)
        if time is not None and time not in self.wakes:
            self.wakes.add(time)
            self.after(time - self.now, lambda: None)

    def end_load(self, name: str) -> None:
        if self.random.random() < 0.1:
            for ticket in self.turns.failed(name, "chance", self.now):
                del self.asked[ticket.id]
        else:
            self.turns.loaded(name, self.now)

    def ask(self) -> None:
        try:
            ticket = self.turns.ask(self.random.choice(list(self.turns.models)), self.now)
        except NotReady:  # its load failed
            return
        self.asked[ticket.id] = self.now
        if self.random.random() < 0.05:
            self.after(self.random.uniform(0.0, 10.0), lambda: self.leave(ticket))

    def leave(self, ticket: Ticket) -> None:
        if self.asked.pop(ticket.id, None) is not None:
            self.turns.cancel(ticket)


@cases("seed", range(40))
def test_random_requests_are_all_served_within_the_bound_and_no_reply_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    num_models = chance.randint(2, 5)
    budget = chance.choice([10, 15, 25])
    sizes = [chance.randint(1, 10) for _ in range(num_models)]
    turns = build_turns(
        *sizes, budget=budget, keep_alive=chance.choice([None, 0.0, 30.0]), max_waiting=10**6
    )
    simulation = Simulation(chance, turns)
    time = 0.0
    for _ in range(400):
        time += chance.expovariate(chance.choice([0.2, 2.0]))
        simulation.after(time, simulation.ask)
    simulation.run()
    assert not simulation.asked, "a request waits for ever"
    assert all(model.num_open == 0 and not model.waiting for model in turns.models.values())
    assert len(simulation.waits) > 100
    # A turn of the engine in its way and one of its own, the longest reply, a stop and a load, for
    # itself and for each claimant before it.
    bound = num_models * (2 * TURN + simulation.longest_reply + 1.0 + 5.0)
    assert max(simulation.waits) <= bound
