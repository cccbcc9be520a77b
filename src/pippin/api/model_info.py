"""The served model and the limits of requests, as clients know them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pippin.api.requests.body import MAX_BYTES_PER_TOKEN, MAX_COUNTED_BYTES, Body, Leniency, shown
from pippin.api.response_store import ResponseStore, ResponseStores
from pippin.config import LimitsConfig
from pippin.errors import ModelNotFound
from pippin.text.bundle import SamplingDefaults

MAX_QUESTIONS = 1_024  # that are known, of all conversations
MAX_CHARS = 8_192  # of the snapshots of one conversation: then the last one alone is shown
_MAX_SAME = 2  # conversations that begin alike, such as with one word

Shown = tuple[tuple[int, str], ...]  # a question's number, and the snapshot behind it; in order


class SnapshotHistory:
    """Threads may share it."""

    def __init__(self, max_questions: int = MAX_QUESTIONS) -> None:
        self._max_questions = max_questions
        self._shown: OrderedDict[bytes, tuple[Shown, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shown)

    def place(self, questions: Sequence[bytes], snapshot: str) -> Shown:
        """All snapshots of the conversation with these questions, of which this is the last."""
        with self._lock:
            seen = self._find(questions, snapshot)
            if sum(len(text) for _, text in seen) > MAX_CHARS:
                seen = ((len(questions) - 1, snapshot),)
            if len(snapshot) <= MAX_CHARS:
                self._keep(questions[-1], seen)
            return seen

    def _find(self, questions: Sequence[bytes], snapshot: str) -> Shown:
        last = len(questions) - 1
        for number in range(last, -1, -1):
            known = self._shown.get(questions[number], ())
            for seen in known:
                if seen[-1][1] == snapshot:
                    return seen
            if known and number < last:
                if len(known) > 1:
                    break
                return (*known[0], (last, snapshot))
        return ((0, snapshot),)

    def _keep(self, question: bytes, seen: Shown) -> None:
        others = (each for each in self._shown.pop(question, ()) if each != seen)
        self._shown[question] = (seen, *others)[:_MAX_SAME]
        while len(self._shown) > self._max_questions:
            self._shown.popitem(last=False)


@dataclass(frozen=True)
class CheckpointInfo:
    family: str = "unknown"
    quantization: str = ""
    nbytes: int = 0  # of its weights, on disk
    digest: str = "0" * 64  # hexadecimal
    unserved: tuple[str, ...] = ()  # kinds of input that it was trained for, besides text


ANY_NAME = "*"


@dataclass(frozen=True)
class ModelInfo:
    name: str
    max_len: int  # tokens, prompt and reply together
    vocab_size: int
    created_s: int  # unix time
    aliases: tuple[str, ...] = ()  # other names that requests may use; `*` is any
    checkpoint_names: tuple[str, ...] = ()  # its id and the last part of it: accepted, not listed
    checkpoint: CheckpointInfo = CheckpointInfo()
    takes_predictions: bool = False  # drafts are taken from a reply that a client expects
    other_names: tuple[str, ...] = ()  # of the server's other models
    on_demand: bool = False  # loaded by requests, and unloaded when none arrives for a while

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_len * MAX_BYTES_PER_TOKEN

    @property
    def max_counted_bytes(self) -> int:
        """Where the tokens of a text are only counted: it may be longer than a prompt."""
        return max(self.max_prompt_bytes, MAX_COUNTED_BYTES)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are listed."""
        return tuple(name for name in dict.fromkeys((self.name, *self.aliases)) if name != ANY_NAME)

    @property
    def accepted_names(self) -> tuple[str, ...] | None:
        """None: every name is."""
        if ANY_NAME in self.aliases:
            return None
        return tuple(dict.fromkeys((*self.names, *self.checkpoint_names)))

    def check_name(self, given: str) -> None:
        accepted = self.accepted_names
        if accepted is not None and given not in accepted:
            raise self.not_found(given)

    def not_found(self, given: str) -> ModelNotFound:
        serves = ", ".join(shown(name) for name in (*self.names, *self.other_names))
        return ModelNotFound(
            f"the model {shown(given)} does not exist; this server serves {serves}", param="model"
        )


@dataclass(frozen=True)
class RequestRules:
    """What requests are read by."""

    model: ModelInfo
    defaults: SamplingDefaults
    limits: LimitsConfig
    strict_fields: bool = False
    refuses_images: bool = False
    normalises_prompts: bool = True  # see `requests/messages.py`
    snapshots: SnapshotHistory = field(default_factory=SnapshotHistory)
    # Of the request's owner:
    owner: bytes = b""
    stores: ResponseStores = field(default_factory=lambda: ResponseStores(0, 0))

    @property
    def stored(self) -> ResponseStore:
        return self.stores.of(self.owner)

    def body(self, fields: Any) -> Body:
        """A request's JSON, to be read as leniently as this server reads."""
        leniency = Leniency(strict_fields=self.strict_fields, refuses_images=self.refuses_images)
        return Body(spread(fields), leniency=leniency)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def spread(fields: Any) -> Any:
    """With the members of `extra_body` as fields: OpenAI's client sends them so, others do not."""
    if not isinstance(fields, dict) or not isinstance(extra := fields.get("extra_body"), dict):
        return fields
    return {name: value for name, value in fields.items() if name != "extra_body"} | extra
