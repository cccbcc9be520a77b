"""Turns config sections into command-line options. Knows no command and starts nothing.

A field becomes `--its-name`, its docstring becomes the help text, its section the heading, and
`PIPPIN_ITS_NAME` in the environment its default. `ModelConfig.model` is the one positional.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NoReturn, get_type_hints

from cyclopts import Group, Parameter

from pippin.config import Config

POSITIONAL = "model"


def field_help(section: type) -> dict[str, str]:
    """The string literal after each annotated field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts


def takes_config(
    *sections: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `(config, ...)` the options of the named sections in place of `config`.

    `without`: fields that the command decides by itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        every = [option for name in sections for option in _section_options(name)]
        options = [option for option in every if option.name not in without]
        names = {name: [f.name for f in dataclasses.fields(_section(name))] for name in sections}

        @functools.wraps(command)
        def with_config(*args: Any, **kwargs: Any) -> None:
            if args:
                kwargs[POSITIONAL] = args[0]
            _check_environment(option.name for option in options)
            parts = {
                section: {f: kwargs.pop(f) for f in fields if f in kwargs}
                for section, fields in names.items()
            }
            command(_build(parts), **kwargs)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = sorted(options + own, key=lambda p: p.kind)
        with_config.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return with_config

    return decorate


def _check_environment(names: Iterable[str]) -> None:
    """A variable that is set and empty says nothing; of a key it would say "none is needed"."""
    for variable in map(_variable, names):
        if os.environ.get(variable) == "":
            _fail(f"{variable} is set and empty: give it a value, or unset it")


def _variable(name: str) -> str:
    return f"PIPPIN_{name.upper()}"


def _fail(message: str) -> NoReturn:
    print(f"pippin: {message}", file=sys.stderr)
    raise SystemExit(2) from None


def _build(parts: dict[str, dict[str, Any]]) -> Config:
    try:
        return Config(**{name: _section(name)(**values) for name, values in parts.items()})
    except ValueError as error:  # a section names the field and the number
        _fail(str(error))


def _section(name: str) -> type:
    section = get_type_hints(Config)[name]
    assert isinstance(section, type)
    return section


def _section_options(name: str) -> list[inspect.Parameter]:
    section = _section(name)
    texts = field_help(section)
    hints = get_type_hints(section)
    group = Group(name.capitalize(), sort_key=list(get_type_hints(Config)).index(name))
    options = []
    for field in dataclasses.fields(section):
        positional = field.name == POSITIONAL
        parameter = Parameter(
            help=texts[field.name],
            group=Group.create_default_arguments() if positional else group,
            env_var=_variable(field.name),
            show_env_var=False,
            show_default=field.default not in (None, ()),
            negative=None if field.default is True else "",
        )
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD
                if positional
                else inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], parameter],
            )
        )
    return options
