"""A bar in the terminal while many prompts are worked on. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, bool], None]  # of new tokens, and whether they end a sequence


@contextmanager
def progress_bar(total: int, *, shown: bool, console: Console | None = None) -> Iterator[Advance]:
    """On standard error; where that is no terminal, one line at the end."""
    if not shown:
        yield lambda num_tokens, ended: None
        return
    num_generated = 0
    with Progress(
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    ) as bar:
        task = bar.add_task("prompts", total=total, tokens=0)

        def advance(num_tokens: int, ended: bool) -> None:
            nonlocal num_generated
            num_generated += num_tokens
            bar.update(task, advance=int(ended), tokens=num_generated)

        yield advance
