"""Hand-overs over a real connection, on the toy model: agreement, secrets, and hostile ends."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from builders import check_idle, make_prompt, oracle
from cases import cases
from live_peers import FAKE, LiveDecode, LivePrefill, ask, ask_all, pair_of, write
from pippin.cache.host_store import HostStore
from pippin.config import Config, EngineConfig, PeersConfig
from pippin.engine.peers import connection
from pippin.engine.peers.connection import (
    PROTOCOL,
    Ask,
    Cancel,
    Connection,
    EntryFrame,
    Facts,
    Frame,
    Hello,
    Mapped,
    Memory,
    Opening,
    OutgoingMemory,
    Proof,
    Refusal,
    Taken,
    ToPrefill,
    WireThread,
    difference,
    peer_facts,
    prove,
)
from pippin.engine.peers.peer_listener import MAX_OPENING
from pippin.errors import ConfigError, LoadError
from pippin.types import Component
from processes import wait_until

SECRET = "a secret of more than sixteen bytes"


def right(decode: LiveDecode, prompt: list[int], **kwargs: Any) -> list[int]:
    spec = decode.client.backend.spec
    components = tuple(c for c in spec.components if c is not Component.HIDDEN)
    return oracle(prompt, components=components, vocab_size=spec.vocab_size, **kwargs)[0]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LivePrefill, LiveDecode]]:
    with pair_of(FAKE) as (prefill, decode):
        yield prefill, decode


def test_a_prompt_is_computed_in_one_engine_and_decoded_in_another(
    pair: tuple[LivePrefill, LiveDecode],
) -> None:
    prefill, decode = pair
    prompts = [make_prompt(900, family) for family in (1, 2, 3)]
    replies = ask_all(prefill, decode, prompts, max_tokens=20)
    for reply, prompt in zip(replies, prompts, strict=True):
        assert (reply.peer_tokens, reply.tokens) == (900, right(decode, prompt, max_tokens=20))
    assert decode.client.loop.counters()["metrics"]["computed_tokens"] == 0
    assert prefill.pushes["sent"] == decode.handovers["arrived"] == 3
    assert prefill.pushes["sent_bytes"] == decode.handovers["arrived_bytes"] > 0
    assert decode.wait_for(shares_memory=True)
    check_idle(decode.client)


def test_an_entry_for_which_there_is_no_room_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_room, refusals = HostStore._make_room, [None] * 3
    monkeypatch.setattr(
        HostStore, "_make_room", lambda *args: refusals.pop() if refusals else make_room(*args)
    )
    with pair_of(FAKE) as (prefill, decode):
        assert ask(prefill, decode, make_prompt(900)).peer_tokens == 900
        assert not refusals
        assert decode.handovers["partial"] == 0


@pytest.mark.parametrize("nbytes", [1 << 20, 20_000, 64], ids=["all", "in turn", "small ones"])
def test_payloads_pass_through_shared_memory_if_they_fit_in(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OutgoingMemory] = []

    def make() -> OutgoingMemory:
        made.append(OutgoingMemory(nbytes))
        return made[-1]

    monkeypatch.setattr(connection, "OutgoingMemory", make)
    with pair_of(FAKE, prefill={"engine": EngineConfig(prefill_tokens=64)}) as (prefill, decode):
        prompts = [make_prompt(900, family) for family in (1, 2, 3)]
        first = ask(prefill, decode, prompts[0])
        decode.wait_for(shares_memory=True)
        replies = [first, *ask_all(prefill, decode, prompts[1:])]
        assert [reply.peer_tokens for reply in replies] == [900] * 3
        assert [reply.tokens for reply in replies] == [right(decode, one) for one in prompts]
        later_bytes = prefill.pushes["sent_bytes"] * 2 // 3
    (memory,) = made
    assert memory._head == memory._tail > 0
    assert (memory._head >= later_bytes) == (nbytes > 64)
    assert not memory._path.exists()


def test_engines_that_cannot_share_memory_use_their_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise OSError("it is the memory of another container")

    for end in ("IncomingMemory", "OutgoingMemory"):
        with monkeypatch.context() as context:
            context.setattr(connection, end, fail)
            with pair_of(FAKE) as (prefill, decode):
                prompt = make_prompt(900)
                assert ask(prefill, decode, prompt).peer_tokens == 900
                assert not decode.peer["peers"][0]["shares_memory"]


def test_a_payload_that_waits_for_room_ends_with_its_connection() -> None:
    async def run() -> None:
        one = connection.Connection(*await asyncio.open_connection(*server.getsockname()))
        one._outgoing = OutgoingMemory(64)
        one._outgoing.remove_name()
        frame = msgspec.structs.replace(ENTRY, nbytes=40)
        payload = [np.zeros(40, np.uint8)]
        await one.write_entry(frame, payload)
        second = asyncio.ensure_future(one.write_entry(frame, payload))
        await asyncio.sleep(0)
        assert not second.done()
        one.free(Taken(40))
        await second
        third = asyncio.ensure_future(one.write_entry(frame, payload))
        await asyncio.sleep(0)
        one.close()
        with pytest.raises(ConnectionResetError, match="waited for room"):
            await third
        await one._writer.wait_closed()

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(run())


def test_a_client_that_disconnects_stops_the_prefill(
    pair: tuple[LivePrefill, LiveDecode],
) -> None:
    prefill, decode = pair
    reply = decode.client.submit(make_prompt(4_000, 5))
    decode.client.step()
    prefill.receive()
    decode.client.loop.abort(reply.id)
    decode.client.run()
    prefill.receive()
    while not prefill.client.loop.idle:
        prefill.step()
    assert reply.finish == "abort"
    assert prefill.client.loop.counters()["metrics"]["requests_aborted"] == 1
    assert prefill.pushes["failed"] == 1
    check_idle(prefill.client)
    check_idle(decode.client)


# ---- agreement ----------------------------------------------------------------------------------


def test_an_engine_with_both_ends_asks_for_its_own_prompts_alone() -> None:
    first = LivePrefill(FAKE)
    middle = LivePrefill(FAKE, peer=(first.address,), peer_memory="64MB")
    middle.client.loop.scheduler.pace.compute_seconds = lambda n: 1.0 * n  # type: ignore[method-assign]
    last = LiveDecode(FAKE, middle.address)
    try:
        last.wait_for(connected=True)
        wait_until(lambda: middle.client.loop.counters()["peer"]["num_connected"])
        own, asked = make_prompt(700, family=1), make_prompt(800, family=2)
        reply = middle.client.submit(own)
        for _ in range(100_000):
            first.step()
            middle.step()
            if reply.finish:
                break
        assert (reply.peer_tokens, reply.tokens) == (700, right(last, own))
        there = ask(middle, last, asked)
        assert (there.peer_tokens, there.tokens) == (800, right(last, asked))
        assert (first.pushes["asked"], middle.pushes["sent"]) == (1, 1)
    finally:
        last.close()
        middle.close()
        first.close()


def test_the_first_fact_that_differs_is_named() -> None:
    facts = {"version": "1", "weights": "a", "dtype": "float32"}
    assert difference(facts, dict(facts)) is None
    assert difference(facts, facts | {"dtype": "float16", "weights": "b"}) == (
        "weights differs: a in the prefill engine, b in the decode engine; serve the same "
        "checkpoint with both"
    )
    assert difference(facts, {"version": "1", "weights": "a"}) == (
        "dtype differs: float32 in the prefill engine, unknown in the decode engine; give both the "
        "same --dtype"
    )


def test_engines_that_do_not_fit_refuse_each_other_by_name() -> None:
    strict = {"engine": EngineConfig(deterministic=True)}
    prefill = LivePrefill(FAKE)
    decode = LiveDecode(FAKE, prefill.address, **strict)
    try:
        error = decode.wait_for_refusal()
        assert "does not fit: refused by the other end: deterministic differs: no" in error
        prompt = make_prompt(500)
        reply = ask(prefill, decode, prompt)
        assert (reply.peer_tokens, reply.tokens) == (0, right(decode, prompt))
    finally:
        decode.close()
        prefill.close()


def refused_with(prefill: LivePrefill, decode: LiveDecode) -> str:
    try:
        return decode.wait_for_refusal()
    finally:
        decode.close()
        prefill.close()


def test_a_refusal_is_logged_once_for_each_host_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = LivePrefill(FAKE, peer_secret_file=write(tmp_path / "one", SECRET))
    strangers = [LiveDecode(FAKE, prefill.address) for _ in range(3)]
    try:
        for stranger in strangers:
            assert "the secrets differ" in stranger.wait_for_refusal()
    finally:
        for stranger in strangers:
            stranger.close()
        prefill.close()
    assert len([text for text in caplog.messages if "was refused: the secrets" in text]) == 1


def test_an_address_at_which_nothing_listens_is_reported_in_words() -> None:
    decode = LiveDecode(FAKE, "tcp://127.0.0.1:1")
    try:
        assert "no prefill engine listens there" in decode.wait_for_error()
    finally:
        decode.close()


def test_a_port_that_is_used_is_named() -> None:
    prefill = LivePrefill(FAKE)
    with pytest.raises(LoadError, match=r"peer_listen is tcp:.*\(Address already in use\): use an"):
        LivePrefill(FAKE, listen=prefill.address)
    prefill.close()


def test_an_end_without_tls_is_reported_in_words(tmp_path: Path) -> None:
    plain = LivePrefill(FAKE)
    secret = write(tmp_path / "secret", SECRET)
    address = f"tls://127.0.0.1:{plain.listener.port}"
    decode = LiveDecode(FAKE, address, peer_secret_file=secret)
    assert "both addresses have to begin with tcp:// or" in refused_with(plain, decode)


def test_a_secret_that_differs_is_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", SECRET), write(tmp_path / "other", SECRET + "!")
    prefill = LivePrefill(FAKE, peer_secret_file=one)
    decode = LiveDecode(FAKE, prefill.address, peer_secret_file=other)
    assert "the secrets differ" in refused_with(prefill, decode)
    prefill = LivePrefill(FAKE, peer_secret_file=one)
    assert "the secrets differ" in refused_with(prefill, LiveDecode(FAKE, prefill.address))
    prefill = LivePrefill(FAKE)
    decode = LiveDecode(FAKE, prefill.address, peer_secret_file=one)
    assert "the secrets differ" in refused_with(prefill, decode)


def certificate(folder: Path) -> dict[str, str]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", cert),
            *("-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return {"peer_cert": str(cert), "peer_key": str(key)}


def test_tls_with_a_secret(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    secret = {"peer_secret_file": write(tmp_path / "secret", SECRET)}
    prefill = LivePrefill(FAKE, listen="tls://127.0.0.1:0", **files, **secret)
    address = f"tls://127.0.0.1:{prefill.listener.port}"
    decode = LiveDecode(FAKE, address, peer_ca=files["peer_cert"], **secret)
    stranger = LiveDecode(FAKE, address, **secret)  # does not know the certificate
    other = address.replace("tls://127.0.0.1", "tcp://127.0.0.1")
    plain = LiveDecode(FAKE, other, **secret)
    try:
        decode.wait_for(connected=True)
        prompt = make_prompt(700)
        reply = ask(prefill, decode, prompt)
        assert (reply.peer_tokens, reply.tokens) == (700, right(decode, prompt))
        error = stranger.wait_for_refusal()
        assert "certificate is not accepted (" in error
        assert "): give --peer-ca with" in error
        assert "both addresses have to begin with tcp:// or with tls://" in plain.wait_for_refusal()
    finally:
        plain.close()
        stranger.close()
        decode.close()
        prefill.close()


@cases(
    ("options", "message"),
    [
        ({"role": "decode"}, "add --peer with its address"),
        ({"role": "prefill"}, "add --peer-listen tcp"),
        ({"peer": ("tcp://127.0.0.1:1",)}, "add --role decode, or remove --peer"),
        ({"role": "decode", "peer": ("127.0.0.1:1",)}, "use tcp://127.0.0.1:PORT"),
        ({"role": "decode", "peer": ("tcp://127.0.0.1:99999",)}, "use tcp://127.0.0.1:PORT"),
        ({"role": "decode", "peer": ("tcp://10.0.0.5:7000",)}, "have to be encrypted"),
        ({"role": "decode", "peer": ("tcp://box:7000",)}, "have to be encrypted"),
        ({"role": "prefill", "peer_listen": "tcp://0.0.0.0:7000"}, "have to be encrypted"),
        ({"role": "decode", "peer": ("tls://box:7000",)}, "--peer-secret-file"),
        (
            {"role": "prefill", "peer_listen": "tls://0.0.0.0:7000", "peer_secret_file": "x"},
            "--peer-cert",
        ),
        ({"peer_cert": "x"}, "require each other"),
        ({"peer_memory": "much"}, "peer_memory"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PeersConfig(**options)


def test_a_short_secret_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    short = write(tmp_path / "short", "abc")
    for name, message in ((short, "has 3 bytes"), (str(tmp_path / "none"), "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            LiveDecode(FAKE, "tcp://127.0.0.1:1", peer_secret_file=name)


# ---- hostile ends -------------------------------------------------------------------------------


class Raw:
    """An end of a connection that sends what a test says."""

    def __init__(self, connection: socket.socket, facts: Facts) -> None:
        self.socket = connection
        self.socket.settimeout(20)
        self.facts = dict(facts)

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        body = msgspec.msgpack.encode(frame)
        self.socket.sendall(len(body).to_bytes(4, "little") + body + payload)

    def receive(self, kind: Any) -> Any:
        nbytes = int.from_bytes(self._read(4), "little")
        return msgspec.msgpack.decode(self._read(nbytes), type=kind)

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self.socket.recv(nbytes - len(data))
            if not more:
                raise ConnectionResetError("closed")
            data += more
        return data

    def is_closed(self) -> bool:
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def open_as_decode(self) -> None:
        nonce = secrets.token_bytes(32)
        self.send(Hello(PROTOCOL, nonce))
        other = self.receive(Opening)
        nonces = (nonce, other.nonce)
        self.send(Proof(prove(b"", "decode", nonces, self.facts), self.facts, 1 << 20))
        assert isinstance(self.receive(Opening), Proof)

    def open_as_prefill(self) -> None:
        other = self.receive(Opening)
        nonce = secrets.token_bytes(32)
        self.send(Hello(PROTOCOL, nonce))
        assert isinstance(self.receive(Opening), Proof)
        nonces = (other.nonce, nonce)
        self.send(Proof(prove(b"", "prefill", nonces, self.facts), self.facts, 0))


@contextmanager
def raw_decode(prefill: LivePrefill) -> Iterator[Raw]:
    facts = peer_facts(Config(model=FAKE), prefill.client.loop.backend)
    with socket.create_connection(("127.0.0.1", prefill.listener.port)) as connection:
        yield Raw(connection, facts)


def test_what_is_not_the_protocol_closes_the_connection_and_nothing_else(
    pair: tuple[LivePrefill, LiveDecode],
) -> None:
    prefill, decode = pair
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x03\x00\x00\x00abc"):
        with raw_decode(prefill) as raw:
            raw.socket.sendall(text)
            assert raw.is_closed()
    with raw_decode(prefill) as raw:  # asks before it has proved anything
        raw.send(Ask("x", b"\0" * 64, b"", 0, [], 0))
        assert raw.is_closed()
    with raw_decode(prefill) as raw:
        raw.send(Hello(99, b"\0" * 32))
        assert "protocol differs: 1 here, 99 there" in raw.receive(Refusal).reason
    prompt = make_prompt(600, 11)
    assert ask(prefill, decode, prompt).peer_tokens == 600


@pytest.mark.parametrize(
    "bad",
    [
        Ask("x", b"", b"", 0, [], 0),
        Ask("x", b"abc", b"", 0, [], 0),
        Ask("x", b"\xff" * 400, b"", 0, [], 0),
        Ask("x", b"\0" * 400, b"", 101, [], 0),
        Ask("x", b"\0" * 4 * 8192, b"", 0, [], 0),
        Ask("x" * 65, b"\0" * 400, b"", 0, [], 0),
        Ask("x", b"\0" * 400, b"s" * 65, 0, [], 0),
        Ask("x", b"\0" * 400, b"", -1, [], 0),
        EntryFrame("x", "state", 0, 4, b"k" * 32, 4, b"d" * 16),
        Taken(0),
    ],
)
def test_a_prompt_that_cannot_be_closes_the_connection(
    pair: tuple[LivePrefill, LiveDecode], bad: Frame
) -> None:
    prefill, _ = pair
    with raw_decode(prefill) as raw:
        raw.open_as_decode()
        raw.send(bad)
        assert raw.is_closed()
    assert not prefill.client.loop.scheduler.pushes.targets  # type: ignore[union-attr]


def test_a_prompt_that_is_asked_for_twice_closes_the_connection(
    pair: tuple[LivePrefill, LiveDecode],
) -> None:
    prefill, _ = pair
    with raw_decode(prefill) as raw:
        raw.open_as_decode()
        for _ in range(2):
            raw.send(Ask("x", b"\0" * 4000, b"", 0, [], 0))
        assert raw.is_closed()
    for _ in range(200):
        prefill.step()
    check_idle(prefill.client)


def test_a_prompt_that_was_cancelled_can_be_asked_for_again_at_once(
    pair: tuple[LivePrefill, LiveDecode],
) -> None:
    prefill, _ = pair
    wanted = Ask("x", b"\0" * 4000, b"", 0, [], 0)
    with raw_decode(prefill) as raw:
        raw.open_as_decode()
        raw.send(wanted)
        prefill.receive()
        prefill.client.step()  # it is in flight
        raw.send(Cancel("x"))
        raw.send(wanted)
        for _ in range(2):
            prefill.receive()
        for _ in range(200):
            prefill.step()
    check_idle(prefill.client)


def test_strangers_that_say_nothing_take_a_bounded_number_and_keep_nobody_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 600.0)
    prefill = LivePrefill(FAKE)
    try:
        with ExitStack() as stack:
            strangers = [stack.enter_context(raw_decode(prefill)) for _ in range(MAX_OPENING)]
            with raw_decode(prefill):
                assert strangers[0].is_closed()
                decode = LiveDecode(FAKE, prefill.address)
                try:
                    decode.wait_for(connected=True)
                    assert strangers[1].is_closed()
                finally:
                    decode.close()
    finally:
        prefill.close()


ENTRY = EntryFrame("?", "attention", 0, 64, b"k" * 32, 512, b"d" * 16)
WRONG: dict[str, dict[str, Any]] = {
    "another chain key": {},
    "another size": {"nbytes": 8},
    "too large": {"nbytes": 1 << 39},
    "beyond the prompt": {"end": 1 << 20, "nbytes": 8},
    "nothing": {"end": 0, "nbytes": 0},
    "no component": {"component": "soul"},
    "no such component here": {"component": "window"},
    "memory that was not offered": {"at": 0},
}


@contextmanager
def asked_raw(prompt: list[int]) -> Iterator[tuple[LiveDecode, Any, Raw, Any]]:
    """A decode engine that has asked a hostile end for a prompt: the engine, the reply to come,
    the other end, and what it is asked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        decode = LiveDecode(FAKE, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        try:
            connection, _ = server.accept()
            with connection:
                raw = Raw(connection, peer_facts(Config(model=FAKE), decode.client.loop.backend))
                raw.open_as_prefill()
                decode.wait_for(connected=True)
                reply = decode.client.submit(prompt)
                decode.client.step()
                yield decode, reply, raw, raw.receive(ToPrefill)
        finally:
            decode.close()


def named_right(decode: LiveDecode, id: str) -> dict[str, Any]:
    """The chain key and the size of the first 64 tokens' KV."""
    loop = decode.client.loop
    store = loop.scheduler.traffic.tiers[-1].tier_io.store
    jobs = loop.scheduler.traffic._handovers[0]._jobs
    (asked,) = [job for job in jobs if job.wanted.id == id]
    arrays = loop.backend.payload_arrays
    entry = asked.wanted.entry(store.fingerprint, arrays, Component.ATTENTION, 0, 64)
    return {"chain": entry.key.chain, "nbytes": entry.nbytes}


@cases("wrong", WRONG.values(), ids=WRONG.keys())
def test_entries_that_were_not_asked_for_are_never_used(wrong: dict[str, Any]) -> None:
    prompt = make_prompt(500)
    with asked_raw(prompt) as (decode, reply, raw, wanted):
        frame = msgspec.structs.replace(ENTRY, id=wanted.id, **wrong)
        if "at" in wrong:
            frame = msgspec.structs.replace(frame, **named_right(decode, wanted.id))
        raw.send(frame, b"\0" * min(frame.nbytes, 4096))
        decode.client.run()
        raw.socket.close()
        assert "does not fit" in decode.wait_for_error()
        assert (reply.peer_tokens, reply.tokens) == (0, right(decode, prompt))
        assert decode.handovers["partial"] == 1
        check_idle(decode.client)


def test_a_payload_whose_digest_differs_is_not_used_and_the_connection_goes_on() -> None:
    prompt = make_prompt(500)
    with asked_raw(prompt) as (decode, reply, raw, wanted):
        frame = msgspec.structs.replace(ENTRY, id=wanted.id, **named_right(decode, wanted.id))
        raw.send(frame, b"\0" * frame.nbytes)
        decode.client.run()
        assert raw.receive(ToPrefill).id == wanted.id  # not wanted any more
        assert (reply.peer_tokens, reply.tokens) == (0, right(decode, prompt))
        assert decode.peer["store"]["damaged"] == 1
        assert decode.wait_for(connected=True)


def test_a_prefill_engine_that_dies_while_it_sends_costs_time_alone() -> None:
    prefill = LivePrefill(FAKE, engine=EngineConfig(prefill_tokens=64))
    decode = LiveDecode(FAKE, prefill.address)
    try:
        decode.wait_for(connected=True)
        prompt = make_prompt(2_000)
        reply = decode.client.submit(prompt, max_tokens=10)
        while not decode.handovers["arrived_bytes"]:
            prefill.step()
            decode.client.step()
        prefill.listener.close()
        decode.client.run()
        assert reply.tokens == right(decode, prompt, max_tokens=10)
        assert reply.peer_tokens < 2_000
        assert decode.handovers["partial"] == 1
        check_idle(decode.client)
        decode.wait_for(connected=False)
    finally:
        decode.close()
        prefill.close()


def test_memory_is_mapped_once() -> None:
    prompt = make_prompt(500)
    with asked_raw(prompt) as (decode, reply, raw, _):
        sender = OutgoingMemory(4096)
        offer = Memory(sender.name, sender.nbytes, sender.token)
        raw.send(offer)
        assert raw.receive(ToPrefill) == Mapped(True)
        sender.remove_name()
        raw.send(offer)
        decode.client.run()
        raw.socket.close()
        assert "memory was offered twice" in decode.wait_for_error()
        assert reply.tokens == right(decode, prompt)


def test_what_a_decode_engine_reads_is_bounded_before_it_is_read() -> None:
    """A frame of 4 GB is refused by its length alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        decode = LiveDecode(FAKE, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\xff\xff\xff\xff")
                connection.shutdown(socket.SHUT_WR)  # or who reads on waits ten seconds for more
                error = decode.wait_for_error()
                assert "a frame of 4,294,967,295 bytes, the limit is 8,192" in error
        finally:
            decode.close()


def test_a_thread_that_ends_releases_connections_that_wait_for_their_peers() -> None:
    """One that is left open is a ResourceWarning, and these fail tests."""
    thread, sent = WireThread("test-peers"), Event()

    async def send() -> None:
        connection = Connection(*await asyncio.open_connection(*address))
        connection._writer.write(bytes(64 << 20))  # more than sockets buffer
        sent.set()
        try:
            await asyncio.sleep(600)
        finally:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        thread.start(send())
        accepted, _ = server.accept()
        with accepted:
            assert sent.wait(10)
            thread.close()
            gc.collect()


def test_the_kernel_notices_an_end_that_is_gone() -> None:
    """Within seconds."""

    async def options() -> list[int]:
        connection = Connection(*await asyncio.open_connection(*address))
        connected = connection._writer.get_extra_info("socket")
        names = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            names.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        connection.close()
        return [connected.getsockopt(*name) for name in names]

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        is_probed, *milliseconds = asyncio.run(options())
    assert is_probed
    assert all(0 < each <= 10_000 for each in milliseconds)
