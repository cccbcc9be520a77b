"""A failure of what only observes the engine never stops it. Knows no observer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Guarded(Protocol):
    def give_up(self, error: Exception) -> None:
        """One of its calls raised: observe and send nothing more. Does not raise itself."""
        ...


_Guarded = TypeVar("_Guarded", bound=Guarded)
_Arguments = ParamSpec("_Arguments")


def never_raises(
    method: Callable[Concatenate[_Guarded, _Arguments], None],
) -> Callable[Concatenate[_Guarded, _Arguments], None]:
    """For methods that the engine calls while it plans and commits."""

    @functools.wraps(method)
    def guarded(self: _Guarded, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return guarded
