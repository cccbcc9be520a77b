"""Whoever only looks on can never end the engine. Knows nobody who does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Onlooker(Protocol):
    def give_up(self, error: Exception) -> None:
        """One of its calls raised: hear and tell nothing more. Does not raise itself."""
        ...


_Onlooker = TypeVar("_Onlooker", bound=Onlooker)
_Arguments = ParamSpec("_Arguments")


def never_raises(
    method: Callable[Concatenate[_Onlooker, _Arguments], None],
) -> Callable[Concatenate[_Onlooker, _Arguments], None]:
    """For what the engine calls in the middle of its work."""

    @functools.wraps(method)
    def guarded(self: _Onlooker, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return guarded
