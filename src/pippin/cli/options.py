"""Turns config sections into command-line options. Knows no command and starts nothing.

cyclopts reads the dataclasses: a field becomes `--its-name`, the string after it the help text, its
section the heading. Where values come from beside the command line is told in `settings.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from pippin.config import Config

SECTIONS: dict[str, type] = get_type_hints(Config)
GROUPS = {name: Group(name.capitalize(), sort_key=n) for n, name in enumerate(SECTIONS)}
CONFIG_FILE = "--config"
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=CONFIG_FILE,
        group=Group("Settings", sort_key=len(GROUPS)),
        env_var="PIPPIN_CONFIG",
        show_env_var=False,
        help="A file of the options above. Default: pippin.toml in the working directory, or else "
        "in the user's configuration directory (`pippin config` shows which).",
    ),
]


def option_name(field: str) -> str:
    return field.replace("_", "-")


def takes_config(
    *sections: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `(config, ...)` the options of the named sections in place of `config`.

    `without`: fields that the command decides by itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        options = [_section_parameter(name, without) for name in sections]
        file = inspect.Parameter(
            "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile
        )
        signature = inspect.Signature(sorted([*options, *own, file], key=lambda p: p.kind))

        @functools.wraps(command)
        def with_config(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            given.pop("config_file", None)  # it has been read by now
            parts = {name: given.pop(name) for name in sections if name in given}
            command(Config(**parts), **given)

        with_config.__signature__ = signature  # type: ignore[attr-defined]
        return with_config

    return decorate


def _section_parameter(name: str, without: Iterable[str]) -> inspect.Parameter:
    section = SECTIONS[name]
    parameter = Parameter(
        name="*",
        group=GROUPS[name],
        parse=re.compile(rf"^(?!(?:{'|'.join(without)})$)") if without else None,
        negative_iterable=(),
        show_default=_shown_default,
    )
    is_positional = name == "model"  # the model's name; its other fields are keywords
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD
        if is_positional
        else inspect.Parameter.KEYWORD_ONLY,
        default=section(),
        annotation=Annotated[section, parameter],
    )


def _shown_default(value: Any) -> str | None:
    return None if value in (None, ()) else str(value)
