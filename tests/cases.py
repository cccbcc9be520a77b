"""A table of cases inside one test, where each of them as a test of its own would be thousands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def cases(
    names: str | Sequence[str], values: Iterable[Any], ids: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test, which names the case that failed.

    Fixtures are shared by the cases. `ids` may be strings or a function of a value.
    """
    arguments = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    rows = [
        row.values if hasattr(row, "values") and hasattr(row, "marks") else row for row in values
    ]
    is_single = isinstance(names, str) and len(arguments) == 1
    named = ids if isinstance(ids, Sequence) else [None] * len(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped = 0
            for row, name in zip(rows, named, strict=True):
                case = {arguments[0]: row} if is_single else dict(zip(arguments, row, strict=True))
                try:
                    test(**fixtures, **case)
                except pytest.skip.Exception:
                    skipped += 1
                    if skipped == len(rows):
                        raise
                except BaseException as error:
                    error.add_note(f"in the case {name or case!r}"[:1000])
                    raise

        parameters = inspect.signature(test).parameters.values()
        kept = [one for one in parameters if one.name not in arguments]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run

    return decorate
