"""Grammars are tried out in child processes: whatever happens there costs one request an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from walks import CountingProver, bundled_vocabulary

from bundled import BUNDLED_PATH
from hostile_grammars import FAMILIES
from pippin.decode.compile import GrammarCompiler
from pippin.decode.prover import NUM_SERVERS, STACK_BYTES, Prover, Verdict, lost
from pippin.errors import ContextOverflow, NotReady, PippinError, RequestError
from pippin.types import GrammarPart, GrammarSpec
from processes import children_of, environment, wait_until, wait_until_gone

STRANGE = (sys.executable, str(Path(__file__).parent / "strange_zygote.py"))
ZYGOTE = (sys.executable, "-m", "pippin.engine.grammar_zygote")


@contextmanager
def strange_prover(monkeypatch: pytest.MonkeyPatch, **setup: Any) -> Iterator[Prover]:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    prover = Prover(STRANGE)
    prover.set_up(**setup)
    yield prover
    prover.close()


def ask(prover: Prover, what: str) -> Verdict:
    return prover.prove(GrammarSpec("regex", what))


def told(prover: Prover) -> dict[str, Any]:
    verdict = ask(prover, "tell")
    assert verdict.error is not None
    return dict(json.loads(verdict.error))


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ("signal SIGSEGV", "16 MiB of stack"),
        ("signal SIGBUS", "16 MiB of stack"),
        ("signal SIGABRT", "512 MiB of memory"),
        ("signal SIGXCPU", "4 s"),
        ("compute", "4 s"),
        ("sleep 300", "4 s"),
        ("raise out of luck", "out of luck"),
    ],
)
def test_a_child_that_dies_or_is_late_is_a_400_that_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, what: str, limit: str
) -> None:
    wall = {"wall_seconds": 0.1} if what.startswith("sleep") else {}
    with strange_prover(monkeypatch, cpu_seconds=1, **wall) as prover:
        verdict = ask(prover, what)
        with pytest.raises(RequestError, match=rf"^regex is too complex: .*{limit}") as caught:
            verdict.raise_error()
        assert caught.value.param == "regex"
        assert verdict.is_final
        assert ask(prover, "refuse x").error == "x", "another child takes its place"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS")
def test_a_child_that_allocates_without_end_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover:
        assert "512 MiB of memory" in str(ask(prover, "allocate 2").error)


def test_a_real_overflow_of_the_stack_ends_the_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 chained rules that nothing checked before."""
    chain = FAMILIES["chained rules with choices"][0](9_000).text
    with strange_prover(monkeypatch, vocabulary=True) as prover:
        assert "MiB of stack" in str(ask(prover, f"compile {chain}").error)
        assert ask(prover, 'compile start: "a"\n').error is None


def test_an_error_raised_in_a_child_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover, pytest.raises(PippinError) as caught:
        ask(prover, 'refuse "words" of\nseveral lines \ud800').raise_error()
    assert type(caught.value) is ContextOverflow
    assert caught.value.message == '"words" of\nseveral lines \ud800'
    assert caught.value.param == "some.field"


def test_what_was_killed_from_outside_is_no_verdict_on_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with strange_prover(monkeypatch) as prover:
        verdict = ask(prover, "signal SIGKILL")
        assert not verdict.is_final
        with pytest.raises(NotReady, match="try again"):
            verdict.raise_error()


def test_a_zygote_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover:
        first = told(prover)["parent"]
        os.kill(first, signal.SIGKILL)
        wait_until_gone(first)
        assert told(prover)["parent"] != first


def test_servers_that_hang_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover:
        servers = {told(prover)["parent"] for _ in range(NUM_SERVERS)}
        assert prover._zygote is not None
        for channel, _ in prover._zygote._servers:
            channel.settimeout(0.1)
        for server in servers:
            os.kill(server, signal.SIGSTOP)
        assert told(prover)["parent"] not in servers
        for server in servers:
            wait_until_gone(server)


def test_a_child_has_nothing_open_but_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover:
        for _ in range(3):
            seen = told(prover)
            assert seen["open"][:3] == [0, 1, 2]
            assert len(seen["open"]) == 4
            assert seen["cores"] == 0


def test_each_grammar_has_a_child_of_its_own_and_none_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with strange_prover(monkeypatch) as prover, ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda _: told(prover), range(40)))
        assert len({each["pid"] for each in seen}) == 40
        servers = {each["parent"] for each in seen}
        assert len(servers) <= NUM_SERVERS
        wait_until(lambda: all(len(children_of(server)) == 1 for server in servers))
    for pid in (*servers, *(each["pid"] for each in seen)):
        wait_until_gone(pid)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while one compiles"])
def test_nothing_outlives_an_engine_that_was_killed(busy: bool) -> None:
    code = f"""
from pippin.decode.prover import Prover
from pippin.types import GrammarSpec
prover = Prover({STRANGE!r})
prover.set_up()
verdict = prover.prove(GrammarSpec("regex", "tell"))
print(verdict.error, flush=True)
prover.prove(GrammarSpec("regex", "sleep 1000"))
"""
    if not busy:
        code = code.replace('"sleep 1000"', '"tell"') + "import time; time.sleep(1000)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline()
        [zygote] = children_of(engine.pid)
        servers = children_of(zygote)
        wait_until(lambda: all(children_of(server) for server in servers))
        time.sleep(0.2 * busy)
        children = [child for server in servers for child in children_of(server)]
        assert len(children) == NUM_SERVERS
        engine.kill()
    for pid in (zygote, *servers, *children):
        wait_until_gone(pid)


def test_a_closed_prover_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with strange_prover(monkeypatch) as prover:
        zygote = told(prover)["parent"]
    wait_until_gone(zygote)
    assert not ask(prover, "tell").is_final


# ---- with the bundled model's vocabulary -------------------------------------------------------


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        prover = Prover(ZYGOTE)
        prover.set_up(model_dir=str(BUNDLED_PATH), vocab_size=8192)
        prover.load()
        yield prover
        prover.close()


@pytest.mark.parametrize("share", [0.3, 0.95, 1.05, 3.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_hostile_grammar_of_any_size_is_compiled_or_refused(
    prover: Prover, name: str, share: float
) -> None:
    """Around what is too large: if the check lets it pass, a child finds out."""
    family, large, _ = FAMILIES[name]
    verdict = prover.prove(family(max(1, int(large * share))))
    assert verdict.is_final
    assert verdict.error is None or verdict.param in ("ebnf", "regex", "json_schema")
    if share >= 1:
        assert "too large" in str(verdict.error)


def test_a_part_that_is_no_grammar_by_itself_is_named(prover: Prover) -> None:
    part = GrammarPart("lark", 'start: "a" }\nb: {', "tools[0].format.definition")
    whole = f"start: n\nn: %lark {{\n{part.text}\n}}\n"
    assert prover.prove(GrammarSpec("ebnf", whole, (part,))).param == part.field


def test_what_is_proven_can_be_followed_on_a_small_stack(prover: Prover) -> None:
    """Masks are made by the engine's thread, which on macOS may have half a megabyte."""
    compiler = GrammarCompiler(bundled_vocabulary, prover)
    try:
        followed = 0
        for family, large, small in FAMILIES.values():
            for size in (small, min(large // 2, 5 * small)):
                future = compiler.compile(family(size))
                if future.exception() is not None:
                    continue
                done = threading.Event()
                grammar = future.result()

                def follow(grammar: Any = grammar, done: threading.Event = done) -> None:
                    copied = grammar.copy()
                    with suppress(RequestError):  # too complex: an error is what it may be
                        for _ in range(8):
                            tokens = copied.forced()
                            copied.advance(tokens)
                            if not tokens or copied.finished:
                                break
                    done.set()

                before = threading.stack_size(512 << 10)
                thread = threading.Thread(target=follow)
                thread.start()
                threading.stack_size(before)
                thread.join()
                assert done.is_set()
                followed += 1
        assert followed > len(FAMILIES)
    finally:
        compiler._threads.shutdown()


# ---- the compiler ------------------------------------------------------------------------------


def test_a_refusal_is_remembered_and_pushes_no_grammar_out() -> None:
    prover = CountingProver()
    compiler = GrammarCompiler(bundled_vocabulary, prover)
    good = compiler.compile(GrammarSpec("regex", "a"))
    good.result()
    prover.verdict = Verdict("too complex", RequestError.code, param="regex")
    for number in range(100):
        with pytest.raises(RequestError, match="too complex"):
            compiler.compile(GrammarSpec("regex", f"b{number}")).result()
    with pytest.raises(RequestError, match="too complex"):
        compiler.compile(GrammarSpec("regex", "b0")).result()
    assert prover.asked.count("b0") == 1
    assert compiler.compile(GrammarSpec("regex", "a")) is good
    compiler.close()
    assert prover.closed


def test_what_was_lost_is_tried_again() -> None:
    prover = CountingProver(lost("it was killed"))
    compiler = GrammarCompiler(bundled_vocabulary, prover)
    with pytest.raises(NotReady):
        compiler.compile(GrammarSpec("regex", "a")).result()
    prover.verdict = Verdict()
    assert not compiler.compile(GrammarSpec("regex", "a")).result().finished
    compiler.close()


def test_what_no_child_has_compiled_is_not_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(spec: GrammarSpec, _: Any) -> Any:
        raise AssertionError(spec)

    monkeypatch.setattr("pippin.decode.compile.compile_grammar", never)
    compiler = GrammarCompiler(bundled_vocabulary, CountingProver(Verdict("no", RequestError.code)))
    with pytest.raises(RequestError):
        compiler.compile(GrammarSpec("regex", "a")).result()
    compiler.close()


def test_the_engines_threads_have_more_stack_than_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child's stack just holds is compiled again, with the whole chain."""
    sizes: list[int] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name.startswith("grammar"):
            sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    compiler = GrammarCompiler(bundled_vocabulary, CountingProver())
    compiler.compile(GrammarSpec("regex", "a")).result()
    compiler.close()
    assert sizes
    assert min(sizes) > STACK_BYTES


def test_a_zygote_whose_engine_was_killed_ends_without_a_word() -> None:
    """The engine had a verdict to read: its end resets the connection."""
    script = (
        "import socket; from pippin.decode import prover; a, b = socket.socketpair(); "
        "b.sendall(b'verdict'); a.close(); prover._serve(b, None)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
