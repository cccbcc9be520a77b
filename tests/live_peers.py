"""Two engines in this process with a real connection between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders import Client, Reply
from pippin.config import Config, EngineConfig, ModelConfig, PeersConfig
from pippin.engine.build_loop import build_loop, listen
from pippin.engine.peers.peer_listener import PeerListener
from pippin.messages import Abort, Submit
from processes import PATIENCE_SECONDS

MAX_STEPS = 100_000
PAUSE_SECONDS = 0.01


class LivePrefill:
    """A prefill engine at a free port, whose steps the test runs."""

    def __init__(self, model: ModelConfig, **peers: Any) -> None:
        address = peers.pop("listen", "tcp://127.0.0.1:0")
        engine = peers.pop("engine", EngineConfig())
        backend = peers.pop("backend", None)
        role = "both" if "peer" in peers else "prefill"
        config = Config(
            model=model, engine=engine, peers=PeersConfig(role, peer_listen=address, **peers)
        )
        self.client = Client(build_loop(config, lambda stage: None, backend=backend))
        self._inbox: queue.SimpleQueue[Submit | Abort] = queue.SimpleQueue()
        listener = listen(config, self.client.loop, self._inbox.put)
        assert listener is not None
        self.listener: PeerListener = listener

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.listener.port}"

    @property
    def pushes(self) -> dict[str, Any]:
        return dict(self.client.loop.counters()["pushes"])

    def receive(self) -> None:
        """The next message of a decode engine."""
        message = self._inbox.get(timeout=PATIENCE_SECONDS)
        if isinstance(message, Abort):
            self.client.loop.abort(message.id)
        else:
            self.client.replies[message.id] = Reply(message.id)
            self.client.loop.submit(message)

    def step(self) -> None:
        while not self._inbox.empty():
            self.receive()
        if not self.client.loop.idle:
            self.client.step()

    def close(self) -> None:
        self.listener.close()
        self.client.loop.close()


class LiveDecode:
    """Its model is slow: whatever arrives is worth a load."""

    def __init__(self, model: ModelConfig, *addresses: str, **peers: Any) -> None:
        engine = peers.pop("engine", EngineConfig())
        backend = peers.pop("backend", None)
        config = Config(
            model=model,
            engine=engine,
            peers=PeersConfig("decode", addresses, **({"peer_memory": "64MB"} | peers)),
        )
        self.client = Client(build_loop(config, lambda stage: None, backend=backend))
        self.client.loop.scheduler.pace.compute_seconds = lambda n: 1.0 * n  # type: ignore[method-assign]

    @property
    def peer(self) -> dict[str, Any]:
        return dict(self.client.loop.counters()["peer"])

    @property
    def handovers(self) -> dict[str, Any]:
        return dict(self.peer["handovers"])

    def wait_for_error(self) -> str:
        """Why the first prefill engine is not connected."""
        while (found := self.wait_for(connected=False))["error"] is None:
            threading.Event().wait(PAUSE_SECONDS)
        return str(found["error"])

    def wait_for_refusal(self) -> str:
        """Why the first prefill engine is never connected; it is an error at once if it is."""
        for _ in range(int(PATIENCE_SECONDS / PAUSE_SECONDS)):
            (first, *_) = self.peer["peers"]
            assert not first["connected"]
            if first["error"] is not None:
                return str(first["error"])
            threading.Event().wait(PAUSE_SECONDS)
        raise AssertionError("neither connected nor refused")

    def wait_for(self, **state: Any) -> dict[str, Any]:
        """Until the first prefill engine is in this state."""
        for _ in range(int(PATIENCE_SECONDS / PAUSE_SECONDS)):
            (first, *_) = self.peer["peers"]
            if all(first[name] == value for name, value in state.items()):
                return dict(first)
            threading.Event().wait(PAUSE_SECONDS)  # the thread of the connections runs
        raise AssertionError(f"not {state}: {self.peer['peers']}")

    def close(self) -> None:
        self.client.loop.close()


def ask(
    prefill: LivePrefill | None, decode: LiveDecode, prompt: Sequence[int], **kwargs: Any
) -> Reply:
    return ask_all(prefill, decode, [prompt], **kwargs)[0]


def ask_all(
    prefill: LivePrefill | None,
    decode: LiveDecode,
    prompts: Sequence[Sequence[int]],
    **kwargs: Any,
) -> list[Reply]:
    replies = [decode.client.submit(prompt, **kwargs) for prompt in prompts]
    loop = decode.client.loop
    run_until(lambda: loop.idle and all(reply.finish for reply in replies), prefill, decode)
    return replies


def run_until(holds: Callable[[], bool], prefill: LivePrefill | None, decode: LiveDecode) -> None:
    for _ in range(MAX_STEPS):
        if prefill is not None:
            prefill.step()
        if holds():
            return
        decode.client.step()
    raise AssertionError("it never holds")


@contextmanager
def pair_of(
    model: ModelConfig,
    *,
    decode_model: ModelConfig | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> Iterator[tuple[LivePrefill, LiveDecode]]:
    """Connected."""
    first = LivePrefill(model, **(prefill or {}))
    try:
        second = LiveDecode(decode_model or model, first.address, **(decode or {}))
        try:
            second.wait_for(connected=True)
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


FAKE = ModelConfig("fake", backend="fake")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
