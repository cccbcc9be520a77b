"""The bar that `LLM` shows while many prompts are worked on."""

from __future__ import annotations

import io

from rich.console import Console

from pippin.offline.offline_requests import progress_bar


def drawn(*, shown: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100)
    with progress_bar(3, shown=shown, console=console) as advance:
        for _ in range(2):
            advance(700, False)
            advance(1, True)
    return out.getvalue()


def test_it_counts_prompts_that_are_done_and_tokens() -> None:
    assert "2/3" in drawn(shown=True)
    assert "1,402 tokens" in drawn(shown=True)


def test_nothing_is_shown_unless_it_is_asked_for() -> None:
    assert drawn(shown=False) == ""
