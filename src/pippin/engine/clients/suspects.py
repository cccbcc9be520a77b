"""Which requests an engine may have died of, as far as the server can know. Knows no engine.

What an engine sent last may be lost with it. So a request is submitted to the next engine only if
what arrived shows that the lost one was not compiling its grammar, and that it was not alone in a
step; and at most once. A request that is in flight at two deaths is not served again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pippin.engine.clients.delta_queue import DeltaQueue
from pippin.errors import PoisonRequest
from pippin.messages import Submit

MAX_ENGINES = 2  # that one request is submitted to
MAX_DEATHS = 2  # at which one request was in flight; then it is refused
REMEMBERED_SUSPECTS = 4096


@dataclass(eq=False)
class OpenRequest:
    submit: Submit
    deltas: DeltaQueue = field(default_factory=DeltaQueue)
    started: bool = False  # an engine reported it, or sent some of the reply
    compiled: bool = False  # likewise; a request without a grammar has nothing to compile
    num_engines: int = 0  # it was sent to
    sent: bool = False  # to the present engine, which ran then

    @property
    def waits_for_grammar(self) -> bool:
        return self.submit.params.grammar is not None and not (self.compiled or self.started)

    def returned(self) -> None:
        """No engine has it now."""
        self.sent = self.compiled = False


def to_resubmit(requests: Iterable[OpenRequest], *, knows_all: bool) -> list[OpenRequest]:
    """Those that cannot be what a lost engine died of, in their order.

    `knows_all`: the engine stopped by itself, and everything that it sent has arrived.
    """
    requests = list(requests)
    # Beside a request that was running, another one was not alone in its step.
    others_ran = any(request.started for request in requests)
    return [
        request
        for request in requests
        if not request.sent
        or (
            not request.started
            and request.num_engines < MAX_ENGINES
            and (knows_all or (others_ran and not request.waits_for_grammar))
        )
    ]


class Suspects:
    """Requests that were in flight when an engine was lost, by a digest of what they ask for."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def check(self, submit: Submit) -> None:
        """Raises if it is not to be served."""
        if self._deaths and self._deaths.get(_digest(submit), 0) >= MAX_DEATHS:
            raise PoisonRequest(
                f"the engine was lost {MAX_DEATHS} times while this same request was in flight; it "
                "is refused until the server is restarted"
            )

    def engine_lost(self, in_flight: Iterable[Submit]) -> None:
        for digest in {_digest(submit) for submit in in_flight}:
            self._deaths[digest] = self._deaths.get(digest, 0) + 1
            self._deaths.move_to_end(digest)
            if len(self._deaths) > REMEMBERED_SUSPECTS:
                self._deaths.popitem(last=False)

    def finished(self, submit: Submit) -> None:
        """It was served in between: then it is not what the engine dies of."""
        if self._deaths:
            self._deaths.pop(_digest(submit), None)


def _digest(submit: Submit) -> bytes:
    """Of all but the id and the salt, which change nothing that an engine computes."""
    body = msgspec.structs.replace(submit, id="", salt=b"")
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=16).digest()
