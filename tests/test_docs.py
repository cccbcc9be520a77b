"""The documents say only what is true: paths exist, commands and options are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cyclopts import App

from pippin import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TARGETS = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)

over_documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def code_lines(document: Path) -> list[str]:
    """Lines of fenced blocks, with continuation lines joined, and inline code."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", prose
    )


def options_of(command: App) -> set[str]:
    arguments = command.assemble_argument_collection()
    return {"--help", *(name for argument in arguments for name in argument.names)}


@over_documents
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    named = [
        word
        for line in code_lines(document)
        for word in re.findall(r"(?<![\w./-])(?:src|tests|tools|docs|\.ci)/[\w./-]+", line)
    ]
    missing = [path for path in linked + named if not (ROOT / path).exists()]
    assert not missing


@over_documents
def test_make_targets_exist(document: Path) -> None:
    named = [
        target
        for line in code_lines(document)
        for target in re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", line)
    ]
    assert set(named) <= set(TARGETS)


@over_documents
def test_commands_and_their_options_exist(document: Path) -> None:
    for line in code_lines(document):
        if (called := re.match(r"(?:\$ )?(?:\S*/)?pippin ([a-z][^`#|&>]*)", line.strip())) is None:
            continue
        command, *words = called[1].split()
        assert command in cli.app, f"{document.name}: {line}"
        app = cli.app[command]
        while words and words[0] in app:
            app = app[words.pop(0)]
        unknown = {word.partition("=")[0] for word in words if word[:2] == "--"} - options_of(app)
        assert not unknown, f"{document.name}: {line}"
