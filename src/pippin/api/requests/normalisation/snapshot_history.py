"""Where the snapshots of a conversation were shown, so that they stay there. Knows no message.

A client that resumes a conversation sends a new snapshot in place of the old one. Its prompt would
part from the cached one where the old snapshot was, and all behind it would be computed again:

    turn 1       question + A   reply
    turn 2       question + A   reply   question + B   reply          B: where it was sent first
    not          question + B   reply   question       reply

A conversation is known by digests, one of all that precedes and is the end of each question. What
is not known any more, or not only one conversation can be, is shown as if it were new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

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
            shown = self._find(questions, snapshot)
            if sum(len(text) for _, text in shown) > MAX_CHARS:
                shown = ((len(questions) - 1, snapshot),)
            if len(snapshot) <= MAX_CHARS:
                self._keep(questions[-1], shown)
            return shown

    def _find(self, questions: Sequence[bytes], snapshot: str) -> Shown:
        last = len(questions) - 1
        for number in range(last, -1, -1):
            known = self._shown.get(questions[number], ())
            for shown in known:
                if shown[-1][1] == snapshot:
                    return shown
            if known and number < last:
                if len(known) > 1:
                    break
                return (*known[0], (last, snapshot))
        return ((0, snapshot),)

    def _keep(self, question: bytes, shown: Shown) -> None:
        others = (each for each in self._shown.pop(question, ()) if each != shown)
        self._shown[question] = (shown, *others)[:_MAX_SAME]
        while len(self._shown) > self._max_questions:
            self._shown.popitem(last=False)
