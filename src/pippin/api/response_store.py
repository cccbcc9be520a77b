"""Responses that are kept to be continued and read again, while there is room.

response  r3 ───> turn 3 ─┐             a turn: its input and output
response  r2 ───────────> turn 2 ─┐     kept, and counted once, while a response
(r1 was dropped)                turn 1  leads to it

The least recently read response is evicted first. Responses that continue it stay whole.
Every owner has a store of its own: no request finds, breaks or evicts what another owner stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pippin.errors import NotFound, RequestError, cut

Item = dict[str, Any]
Owner = bytes  # the digest of an API key; b"": there are no keys


class ResponseNotFound(NotFound):
    code = "response_not_found"


class PreviousResponseNotFound(RequestError):
    code = "previous_response_not_found"


@dataclass(eq=False)
class StoredTurn:
    """One request's items and its reply's, as JSON, behind those of the turns before."""

    input: bytes
    output: bytes
    ids: tuple[str, ...]  # of its items
    previous: StoredTurn | None
    num_holders: int = 0  # responses that are found and turns that are kept, which lead to it

    @classmethod
    def of(cls, input: list[Item], output: list[Item], previous: StoredTurn | None) -> StoredTurn:
        ids = tuple(item["id"] for item in (*input, *output))
        encode = msgspec.json.encode
        return cls(encode(input), encode(output), ids, previous)

    @property
    def nbytes(self) -> int:
        return len(self.input) + len(self.output)

    def chain(self) -> Iterator[StoredTurn]:
        turn: StoredTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def input_items(self) -> list[Item]:
        """All that the model was shown in this turn."""
        before = [] if self.previous is None else self.previous.items()
        return [*before, *msgspec.json.decode(self.input)]

    def items(self) -> list[Item]:
        """The conversation up to the end of this turn."""
        turns = reversed(list(self.chain()))
        parts = (part for turn in turns for part in (turn.input, turn.output))
        return [item for part in parts for item in msgspec.json.decode(part)]

    def items_by_id(self) -> dict[str, Item]:
        """Its own; of two with one id, the first."""
        items = [*msgspec.json.decode(self.input), *msgspec.json.decode(self.output)]
        return {item["id"]: item for item in reversed(items)}


@dataclass(frozen=True)
class StoredResponse:
    rest: bytes  # the response but for its output, as JSON
    turn: StoredTurn

    def response(self) -> dict[str, Any]:
        rest: dict[str, Any] = msgspec.json.decode(self.rest)
        return rest | {"output": msgspec.json.decode(self.turn.output)}


@dataclass
class ResponseStore:
    """Of one owner. Bounded in number and in bytes of JSON. Threads may share it."""

    max_responses: int
    max_bytes: int
    nbytes: int = 0
    _responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _turns: dict[str, StoredTurn] = field(default_factory=dict)  # by the ids of their items
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def enabled(self) -> bool:
        return self.max_responses > 0 and self.max_bytes > 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: dict[str, Any], turn: StoredTurn) -> bool:
        """Whether it is kept: one that is too large by itself is not."""
        rest = msgspec.json.encode(response | {"output": []})
        if not self.enabled or self._bytes_alone(rest, turn) > self.max_bytes:
            return False
        with self._lock:
            self._responses[response["id"]] = StoredResponse(rest, turn)
            self.nbytes += len(rest)
            self._hold(turn)
            while len(self._responses) > self.max_responses or self.nbytes > self.max_bytes:
                self._drop(next(iter(self._responses)))
        return True

    def get(self, id: str) -> StoredResponse:
        with self._lock:
            stored = self._find(id)
            self._responses.move_to_end(id)
            return stored

    def previous(self, id: str) -> StoredTurn:
        try:
            return self.get(id).turn
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(
                f"Previous response with id '{cut(id)}' not found.", param="previous_response_id"
            ) from error

    def items(self, ids: Iterable[str]) -> dict[str, Item]:
        """Those of any turns that are kept, by id. A turn is decoded once, however many it has."""
        with self._lock:
            turns = {id: turn for id in ids if (turn := self._turns.get(id)) is not None}
        decoded = {turn: turn.items_by_id() for turn in dict.fromkeys(turns.values())}
        return {id: decoded[turn][id] for id, turn in turns.items()}

    def delete(self, id: str) -> None:
        with self._lock:
            self._find(id)
            self._drop(id)

    def _find(self, id: str) -> StoredResponse:
        stored = self._responses.get(id)
        if stored is None:
            raise ResponseNotFound(f"Response with id '{cut(id)}' not found.")
        return stored

    def _bytes_alone(self, rest: bytes, turn: StoredTurn) -> int:
        return len(rest) + sum(each.nbytes for each in turn.chain())

    def _drop(self, id: str) -> None:
        stored = self._responses.pop(id)
        self.nbytes -= len(stored.rest)
        self._release(stored.turn)

    def _hold(self, last: StoredTurn) -> None:
        for turn in last.chain():
            turn.num_holders += 1
            if turn.num_holders > 1:
                return
            self.nbytes += turn.nbytes
            self._turns.update(dict.fromkeys(turn.ids, turn))

    def _release(self, last: StoredTurn) -> None:
        for turn in last.chain():
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self.nbytes -= turn.nbytes
            for id in turn.ids:
                if self._turns.get(id) is turn:  # a client may send an item twice
                    del self._turns[id]


class ResponseStores:
    """A store for each owner, with an equal part of the room. Owners have keys: they are few."""

    def __init__(self, max_responses: int, max_bytes: int, num_owners: int = 1) -> None:
        """`num_owners`: how many there can be. Each may keep one response, if any are kept."""
        self._max_responses = max_responses and max(1, max_responses // num_owners)
        self._max_bytes = max_bytes // num_owners
        self._stores: dict[Owner, ResponseStore] = {}
        self._lock = threading.Lock()

    def of(self, owner: Owner) -> ResponseStore:
        with self._lock:
            if owner not in self._stores:
                self._stores[owner] = ResponseStore(self._max_responses, self._max_bytes)
            return self._stores[owner]
