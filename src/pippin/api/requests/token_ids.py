"""Token ids in a request, of which there may be millions. Knows no tokenizer."""

from __future__ import annotations

from typing import Any

MAX_ID_DIGITS = 18  # far more than any vocabulary needs; Python refuses to read thousands


def are_token_ids(value: Any, vocab_size: int) -> bool:
    if not isinstance(value, list | tuple):
        return False
    # No line of Python for each.
    return set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < vocab_size)
    )


def token_ids_in_words(vocab_size: int) -> str:
    return f"token ids from 0 to {vocab_size - 1:,}"
