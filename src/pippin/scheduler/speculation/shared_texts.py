"""What requests said that have ended, for those of the same salt alone. Knows no drafts."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pippin.scheduler.speculation.text_index import SEPARATOR, TextIndex

MAX_SALTS = 16  # used last
MAX_TOKENS = 1 << 16  # of a salt; then the older half is dropped
MAX_TEXT = MAX_TOKENS // 4  # of a request: its end


class SharedTexts:
    def __init__(self) -> None:
        self._by_salt: OrderedDict[bytes, TextIndex] = OrderedDict()

    def add(self, salt: bytes, tokens: np.ndarray) -> None:
        tokens = tokens[-MAX_TEXT:]
        text = self._by_salt.setdefault(salt, TextIndex(MAX_TOKENS // 8))
        self._by_salt.move_to_end(salt)
        if len(text) + len(tokens) + 1 > MAX_TOKENS:
            kept = text.last(MAX_TOKENS // 2)
            text = self._by_salt[salt] = TextIndex(MAX_TOKENS)
            text.extend(kept)
        text.extend(tokens)
        text.extend([SEPARATOR])
        if len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)

    def of(self, salt: bytes) -> TextIndex | None:
        text = self._by_salt.get(salt)
        if text is not None:
            self._by_salt.move_to_end(salt)
        return text

    def clear(self) -> None:
        self._by_salt.clear()
