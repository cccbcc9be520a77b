"""Values of options that are not on the command line: the environment, then `pippin.toml`.

    option  >  PIPPIN_ITS_NAME  >  pippin.toml  >  default

cyclopts calls `Settings` for every command, after it has read the command line. Only the fields of
config sections are looked up; a command's own options, such as --url, are read from its command
line alone. Runs nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from pathlib import Path

from cyclopts import App, Argument, ArgumentCollection, Token
from cyclopts.config import Dict, Env

from pippin.cli.config_file import MODELS, Setting, find_config_file, read_config_file
from pippin.cli.option_groups import ALIASES
from pippin.cli.options import CONFIG_FILE, SECTIONS, SERVED_MODEL_NAME, option_name
from pippin.errors import ConfigError

PREFIX = "PIPPIN_"
OPTION = "option"
ENVIRONMENT = Env(PREFIX, command=False, show=False)
FIELDS = {option_name(f.name) for section in SECTIONS.values() for f in dataclasses.fields(section)}
OTHER_VARIABLES = {"PIPPIN_BLAS", "PIPPIN_CONFIG"}
IS_NEAR = 0.85  # of a variable's name, which begins like all others
# The keys of pippin.toml, and which option each sets.
KEYS = {
    **{name: name for name in FIELDS},
    **{alias.removeprefix("--"): option_name(field) for field, alias in ALIASES.items()},
    SERVED_MODEL_NAME.removeprefix("--"): "served-name",
}


class Settings:
    """Sets options that are not on the command line, and records the origin of each value."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.origins: dict[str, str] = {}  # by option, of those that are not defaults
        self.models: Setting | None = None  # the table of several models

    def place_of(self, option: str) -> str | None:
        """The variable, or the file and line, that set an option which the command line did not."""
        origin = self.origins.get(option)
        return None if origin == OPTION else origin

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        self.file, self.origins, self.models = None, {}, None
        fields = ArgumentCollection(a for a in arguments if _is_field(a))
        if not fields:
            return
        _split_served_model_name(arguments)
        _refuse_empty_variables(fields)
        _note_misspelt_variables()
        ENVIRONMENT(app, commands, fields)
        self.file = find_config_file(_named_file(arguments))
        for setting in read_config_file(self.file, KEYS) if self.file is not None else ():
            if setting.name == MODELS:
                self.models = setting
                continue
            _add(setting, app, commands, fields)
        self.origins = {
            argument.name.removeprefix("--"): _origin(argument.tokens[0])
            for argument in fields
            if argument.tokens
        }


def _is_field(argument: Argument) -> bool:
    """Not a command's own option of the same name: those are no fields of a section."""
    return len(argument.keys) == 1 and argument.name.removeprefix("--") in FIELDS


def _split_served_model_name(arguments: ArgumentCollection) -> None:
    """`--served-model-name a b`, as vLLM has it, is `--served-name a --alias b`."""
    by_name = {argument.name: argument for argument in arguments}
    given = by_name.get(SERVED_MODEL_NAME)
    if given is None or not given.tokens:
        return
    if by_name["--served-name"].tokens:
        raise ConfigError(
            f"served_name was given twice, as --served-name and as {SERVED_MODEL_NAME}: give one"
        )
    first, *others = given.tokens
    given.tokens.clear()
    by_name["--served-name"].append(first.evolve(index=0))
    for token in others:
        by_name["--alias"].append(token.evolve(index=len(by_name["--alias"].tokens)))


def _named_file(arguments: ArgumentCollection) -> str | None:
    for argument in arguments:
        if CONFIG_FILE in argument.names and argument.tokens:
            return argument.tokens[0].value
    return None


def _refuse_empty_variables(fields: ArgumentCollection) -> None:
    """An empty variable has no value; for a key it would mean that none is required."""
    for field in fields:
        variable = _variable(field.name.removeprefix("--"))
        if os.environ.get(variable) == "":
            raise ConfigError(f"{variable} is set and empty: set a value, or unset the variable")


def _note_misspelt_variables() -> None:
    """No error: other programs may set variables, as Kubernetes does for a service `pippin`."""
    known = {_variable(field) for field in FIELDS} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for near in difflib.get_close_matches(name, sorted(known), 1, IS_NEAR):
                print(f"pippin: {name} is not read; did you mean {near}?", file=sys.stderr)


def _variable(option: str) -> str:
    return PREFIX + option.replace("-", "_").upper()


def _add(setting: Setting, app: App, commands: tuple[str, ...], fields: ArgumentCollection) -> None:
    """A setting that this command does not have is ignored: one file serves all commands."""
    if f"--{setting.name}" in (name for field in fields for name in field.names):
        source = Dict(
            {setting.name: setting.value}, source=setting.place, use_commands_as_keys=False
        )
        source(app, commands, fields)


def _origin(token: Token) -> str:
    if token.source == "env":
        return str(token.keyword)
    return OPTION if token.source == "cli" else token.source


SETTINGS = Settings()
