"""The package and its documents use plain technical English: no word of this table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    *(f"src/pippin/**/*.{kind}" for kind in ("py", "cpp", "h", "js", "html")),
    *("docs/**/*.md", "README.md", "CONTRIBUTING.md", "SECURITY.md"),
)
# A word, or how it begins (`*`): what to write instead. Also as a part of an identifier.
WORDS = {
    "whoever": "a client, a request, the caller",
    "nobody": "no client, no request",
    "somebody": "a client, a request",
    "mended": "fixed",
    "goodbye": "the last message, disconnect",
    "retract*": "preempt",
    "told": "returned, sent, reported; for an object that is called: listener",
    "courier": "sender, transfer",
    "was begun": "started",
    "took back": "preempted, freed",
    "taken back": "preempted, freed",
    "let in": "admitted, has access",
    "hands over": "sends, passes",
}


def pattern_of(word: str) -> str:
    ending = "[a-z]*" if word.endswith("*") else "(?![a-z])"
    return "(?<![a-z])" + word.removesuffix("*").replace(" ", r"\s+") + ending


PATTERN = re.compile("|".join(f"({pattern_of(word)})" for word in WORDS), re.IGNORECASE)


def faults_in(name: str, text: str) -> list[str]:
    """Where a word of the table stands, and what to write instead."""
    faults = []
    for found in PATTERN.finditer(text):
        assert found.lastindex is not None
        instead = list(WORDS.values())[found.lastindex - 1]
        line = text.count("\n", 0, found.start()) + 1
        faults.append(f"{name}:{line}: {found[0]!r}; write: {instead}")
    return faults


def test_no_word_of_the_table_is_used() -> None:
    names = sorted(
        path.relative_to(ROOT).as_posix() for pattern in FILES for path in ROOT.glob(pattern)
    )
    assert len(names) > 100, names
    faults = [
        fault
        for name in names
        for fault in faults_in(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_a_word_is_found_in_text_and_in_names_and_its_replacement_is_named() -> None:
    text = "the engine\ntold_steps = #told and `Retractions`, was\nbegun; stolen, untold"
    assert faults_in("a.py", text) == [
        f"a.py:2: 'told'; write: {WORDS['told']}",
        f"a.py:2: 'told'; write: {WORDS['told']}",
        f"a.py:2: 'Retractions'; write: {WORDS['retract*']}",
        f"a.py:2: 'was\\nbegun'; write: {WORDS['was begun']}",
    ]
