"""Requests whose grammars are being compiled: they wait, and nobody waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from builders import Client, ToyGrammar, check_idle, make_loop, make_prompt, oracle
from pippin.errors import RequestError
from pippin.types import GrammarSpec

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


class CopiedToy(ToyGrammar):
    def copy(self) -> ToyGrammar:
        return ToyGrammar(self.modulus, run=self.run)


@dataclass
class SlowCompiler:
    """Compiles when it is told to."""

    futures: dict[str, Future[Any]] = field(default_factory=dict)
    closed: bool = False

    def compile(self, spec: GrammarSpec) -> Future[Any]:
        return self.futures.setdefault(spec.text, Future())

    def finish(self, text: str) -> None:
        self.futures[text].set_result(CopiedToy(int(text)))

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def make_compiling_client(**kwargs: Any) -> tuple[Client, SlowCompiler]:
    loop, compiler = make_loop(**kwargs), SlowCompiler()
    loop.scheduler.grammars.compiler = compiler  # type: ignore[assignment]
    return Client(loop), compiler


@both_modes
def test_a_request_waits_for_its_grammar_and_others_go_on(overlap: bool) -> None:
    client, compiler = make_compiling_client(overlap=overlap)
    slow = client.submit(make_prompt(20), regex="5", max_tokens=9)
    other = client.submit(make_prompt(20, 1), max_tokens=9)
    while other.finish is None:
        client.step()
    assert (other.tokens, other.finish) == oracle(make_prompt(20, 1), max_tokens=9)
    assert not slow.tokens
    assert client.loop.status()["waiting"] == 1
    assert not client.loop.idle
    compiler.finish("5")
    client.run()
    expected = oracle(make_prompt(20), grammar=ToyGrammar(5), max_tokens=9)
    assert (slow.tokens, slow.finish) == expected
    check_idle(client)


def test_it_is_told_which_requests_are_compiled_no_more() -> None:
    client, compiler = make_compiling_client()
    told: list[list[str]] = []
    client.loop.scheduler.grammars.on_compiled = told.append
    replies = [client.submit(make_prompt(20, n), regex=str(n + 4)) for n in range(3)]
    client.submit(make_prompt(20, 3))
    client.step()
    assert told == []
    compiler.finish("4")
    compiler.finish("6")
    client.step()
    assert told == [[replies[0].id, replies[2].id]]
    compiler.finish("5")
    client.run()
    assert told[1:] == [[replies[1].id]]


def test_requests_of_one_grammar_follow_copies_of_it() -> None:
    client, compiler = make_compiling_client()
    replies = [client.submit(make_prompt(20, n), regex="4", max_tokens=9) for n in range(3)]
    client.step()
    compiler.finish("4")
    client.run()
    for number, reply in enumerate(replies):
        expected = oracle(make_prompt(20, number), grammar=ToyGrammar(4), max_tokens=9)
        assert (reply.tokens, reply.finish) == expected
    check_idle(client)


@both_modes
def test_what_is_no_grammar_ends_its_own_request(overlap: bool) -> None:
    client, compiler = make_compiling_client(overlap=overlap)
    wrong = client.submit(make_prompt(20), regex="(")
    broken = client.submit(make_prompt(20), regex="[")
    other = client.submit(make_prompt(20, 1))
    client.step()
    compiler.futures["("].set_exception(RequestError("regex: unclosed group", param="regex"))
    compiler.futures["["].set_exception(ZeroDivisionError("a bug"))
    client.run()
    assert (wrong.finish, wrong.error, wrong.error_status) == (
        "error",
        "regex: unclosed group",
        400,
    )
    assert (broken.error, broken.error_status) == ("the grammar failed: a bug", 500)
    assert other.finish == "length"
    check_idle(client)


@pytest.mark.parametrize("leaves_by", ["abort", "finish"])
def test_a_client_may_leave_while_its_grammar_is_compiled(leaves_by: str) -> None:
    client, compiler = make_compiling_client()
    reply = client.submit(make_prompt(20), regex="3")
    client.step()
    getattr(client.loop, leaves_by)(reply.id)
    client.step()
    assert reply.finish == ("abort" if leaves_by == "abort" else "stop")
    assert client.loop.idle
    compiler.finish("3")
    check_idle(client)


def test_the_queues_bound_counts_those_that_wait_for_a_grammar() -> None:
    client, compiler = make_compiling_client(max_queue=2)
    for _ in range(2):
        client.submit(make_prompt(20), regex="3")
    third = client.submit(make_prompt(20), regex="3")
    client.step()
    assert (third.finish, third.error_status) == ("error", 503)
    compiler.finish("3")
    client.run()


def test_the_queues_bound_in_tokens_counts_those_that_wait_for_a_grammar() -> None:
    client, compiler = make_compiling_client(max_queue_tokens=100)
    client.submit(make_prompt(60), regex="3")
    second = client.submit(make_prompt(60), max_tokens=1)
    client.step()
    assert (second.finish, second.error_status) == ("error", 503)
    assert "requests of 60 tokens are waiting" in (second.error or "")
    compiler.finish("3")
    client.run()


def test_nobody_left_hears_of_the_end() -> None:
    client, _ = make_compiling_client()
    reply = client.submit(make_prompt(20), regex="3")
    client.step()
    client.loop.scheduler.fail_all(RuntimeError("the engine stops"))
    deltas = client.loop.scheduler.take_outbox()
    assert [(delta.id, delta.error) for delta in deltas] == [(reply.id, "the engine stops")]
