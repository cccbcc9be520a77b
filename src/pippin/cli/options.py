"""Options of the command line out of config sections, and their values that are not on it.

    option  >  PIPPIN_ITS_NAME  >  pippin.toml  >  default

cyclopts reads the dataclasses: a field becomes `--its-name`, the string after it the help text. It
calls `Settings` for every command, after it has read the command line. Only the fields of config
sections are looked up; a command's own options, such as --url, are read from its command line
alone.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import msgspec
from cyclopts import App, Argument, ArgumentCollection, Group, Parameter, Token
from cyclopts.config import Dict, Env
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
from platformdirs import user_config_path

from pippin.config import Config
from pippin.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


HELP_ALL = "--help-all"
T = TypeVar("T")
Flag = Annotated[bool, Parameter(negative="")]
Url = Annotated[
    str | None,
    Parameter(
        help="Address of the server. Default: http://127.0.0.1:8000 if a server is ready there, "
        "otherwise the server that you started last."
    ),
]

# heading: (fields that --help lists, fields that only --help-all lists)
_FIELDS: dict[str, tuple[str, str]] = {
    "Model": ("model backend dtype revision max_len deterministic safe", "fake_step"),
    "Memory": ("memory", "wired buffer_limit"),
    "Prefix cache": (
        "prefix_cache cache_dir disk host_cache",
        "share_prefixes prompt_normalisation canary",
    ),
    "Batching": (
        "max_running max_queue speculate draft_model",
        "max_queue_tokens prefill_tokens max_gap overlap forced_chunks",
    ),
    "API": (
        "served_name alias tool_parser reasoning_parser page",
        "strict_fields images stored_responses stored_bytes",
    ),
    "Several models": ("keep_alive", "model_turn"),
    "Files and batches": ("batch_dir", "batch_bytes batch_file_bytes batch_running"),
    "Network and access control": (
        "host port api_key api_key_file admin_key admin_key_file cors_origin allowed_host "
        "allow_pull",
        "",
    ),
    "Prefill and decode in two engines": (
        "role peer peer_listen peer_secret_file",
        "peer_cert peer_key peer_ca peer_memory",
    ),
    "Logs": ("log_format log_prompts", "show_prompts step_log"),
    "KV events": ("kv_events", "kv_events_replay kv_events_form"),
    "Limits": (
        "max_tokens request_timeout",
        "max_body_bytes max_choices max_stops max_logit_bias max_schema_bytes max_connections "
        "header_timeout body_timeout idle_timeout send_timeout",
    ),
    "Engine process": (
        "replicas devices drain_timeout",
        "engine_timeout heartbeat_timeout engine_restarts",
    ),
}
HEADINGS = {name: Group(name, sort_key=n) for n, name in enumerate(_FIELDS)}
GROUP_OF = {
    field: HEADINGS[name] for name, fields in _FIELDS.items() for field in " ".join(fields).split()
}
EXPERT = {
    *(field for _, expert in _FIELDS.values() for field in expert.split()),
    "enable_auto_tool_choice",  # not a field: it has no effect here
}
# The spellings of vLLM's users, for fields that have the same meaning there.
ALIASES = {"max_len": "--max-model-len", "tool_parser": "--tool-call-parser"}


class HelpPage(DefaultFormatter):
    """cyclopts' help page, which leaves out expert options unless all were asked for."""

    shows_all = False

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not self.shows_all and panel.title in HEADINGS:
            shown = [entry for entry in panel.entries if not _is_expert(entry)]
            if left_out := len(panel.entries) - len(shown):
                more = HelpEntry(description=f"{HELP_ALL} lists {left_out} more.")
                panel = panel.copy(entries=[*shown, more])
        super().__call__(console, options, panel)


def _is_expert(entry: HelpEntry) -> bool:
    return any(name.removeprefix("--").replace("-", "_") in EXPERT for name in entry.names)


SECTIONS: dict[str, type] = get_type_hints(Config)
CONFIG_FILE = "--config"
SERVED_MODEL_NAME = "--served-model-name"
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=CONFIG_FILE,
        group=Group("Settings", sort_key=len(HEADINGS)),
        env_var="PIPPIN_CONFIG",
        show_env_var=False,
        help="File with values for the options above. Default: pippin.toml in the working "
        "directory, or if there is none, in the user's configuration directory (`pippin config` "
        "prints which one was read).",
    ),
]
# Options of vLLM that have no field of their own here; `Settings` moves their values.
VLLM = Parameter(group=HEADINGS["API"], negative="", show_default=False)
ServedModelName = Annotated[
    tuple[str, ...],
    VLLM,
    Parameter(
        consume_multiple=True,
        help="The same as --served-name, as vLLM spells it; further names after the first are "
        "the same as --alias.",
    ),
]
EnableAutoToolChoice = Annotated[
    bool,
    VLLM,
    Parameter(
        help="Accepted because vLLM requires it for tool calls. It has no effect: the model "
        "may always choose a tool.",
    ),
]


def option_name(field: str) -> str:
    return field.replace("_", "-")


def takes_config(
    *sections: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command `(config, ...)` the options of the named sections in place of `config`.

    `without`: fields that the command decides by itself.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        further = [p.name for p in own if p.kind is inspect.Parameter.VAR_POSITIONAL]
        read_by_settings = [_keyword("config_file", ConfigFile, None)]
        if "server" in sections:
            read_by_settings += [
                _keyword("served_model_name", ServedModelName, ()),
                _keyword("enable_auto_tool_choice", EnableAutoToolChoice, False),
            ]
        options = [_section_parameter(name, without) for name in sections]
        signature = inspect.Signature(
            sorted([*options, *own, *read_by_settings], key=lambda p: p.kind)
        )

        @functools.wraps(command)
        def with_config(*args: Any, **kwargs: Any) -> T:
            given = signature.bind(*args, **kwargs).arguments
            for parameter in read_by_settings:
                given.pop(parameter.name, None)
            parts = {
                name: _without_headings(name, given.pop(name)) for name in {*given} & {*sections}
            }
            rest = [value for name in further for value in given.pop(name, ())]
            return command(Config(**parts), *rest, **given)

        with_config.__signature__ = signature  # type: ignore[attr-defined]
        return with_config

    return decorate


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _section_parameter(name: str, without: Iterable[str]) -> inspect.Parameter:
    """The section for cyclopts: the same fields, each with its heading and its vLLM spelling."""
    kind = SECTIONS[name]
    annotations = {
        field: Annotated[hint, Parameter(group=GROUP_OF[field], alias=ALIASES.get(field, ()))]
        for field, hint in get_type_hints(kind).items()
        if field in GROUP_OF
    }
    section = type(kind.__name__, (kind,), {"__annotations__": annotations})
    parameter = Parameter(
        name="*",
        parse=re.compile(rf"^(?!(?:{'|'.join(without)})$)") if without else None,
        negative_iterable=(),
        show_default=lambda value: None if value in (None, ()) else str(value),
    )
    option = _keyword(name, Annotated[section, parameter], section())
    is_positional = name == "model"  # the model's name; its other fields are keywords
    return option.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) if is_positional else option


def _without_headings(name: str, given: Any) -> Any:
    """The section itself: cyclopts, and pydantic where it is imported, make the class above."""
    section = SECTIONS[name]
    return section(**{field.name: getattr(given, field.name) for field in fields(section)})


@takes_config(*SECTIONS)
def _serve_config(config: Config, *models: str) -> Config:
    return config


def parse_serve(words: Sequence[str], values: Any) -> Config:
    """The config that `pippin serve WORDS` would have, or the error that it would report.

    `values`: where cyclopts looks for options that are not given.
    """
    app = App(name="pippin serve", config=values, result_action="return_value")
    app.default(_serve_config)
    config: Config = app(list(words))
    return config


NAME = "pippin.toml"
MODELS = "models"  # the only table: of several models
SECRETS = {"api-key", "admin-key"}  # never printed, nor read from a file that other users can read


@dataclass(frozen=True)
class Setting:
    name: str  # as the option is spelt, without its dashes
    value: Any
    place: str  # file:line
    text: str = ""  # of the file, for a models table

    def place_of(self, model: str, key: str = "") -> str:
        """Of a model's table, or of a key in it."""
        header = rf"""^[ \t]*\[[ \t]*{MODELS}[ \t]*\.[ \t]*["']?{re.escape(model)}["']?[ \t]*\]"""
        found = re.search(header, self.text, re.MULTILINE)
        start = found.start() if found else 0
        before = self.text.count("\n", 0, start)
        line = _line_of(key, self.text[start:]) if key else 1
        return f"{self.place.rpartition(':')[0]}:{before + line}"


def default_paths() -> list[Path]:
    """Candidate files in order; only the first one that exists is read."""
    return [Path(NAME), user_config_path("pippin") / NAME]


def find_config_file(named: str | None) -> Path | None:
    """The file that was named, which must exist, or the first of the default ones that does."""
    if named is None:
        return next((path for path in default_paths() if path.is_file()), None)
    path = Path(named).expanduser()
    if path.is_dir():
        raise ConfigError(f"--config {path} is a directory: give a file such as {path / NAME}")
    return path


def read_config_file(
    path: Path, known: Mapping[str, str], sections: Collection[str] = ()
) -> list[Setting]:
    """Its settings in order; `known` has the option that each key sets, `sections`
    are tables beside [models].

    A key or a line that cannot be read is an error that names its place.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read()
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    settings: dict[str, Setting] = {}
    for key, value in table.items():
        spelt = key.replace("_", "-")
        place = f"{path}:{_line_of(key, text)}"
        if spelt == MODELS and isinstance(value, dict):
            settings[MODELS] = Setting(MODELS, value, place, text)
            continue
        if spelt in sections:
            settings[spelt] = Setting(spelt, value, place)
            continue
        if spelt not in known or isinstance(value, dict):
            raise ConfigError(f"{place}: {_unknown(spelt, value, known, sections)}")
        name = known[spelt]
        if name in settings:
            raise ConfigError(
                f"{place}: {name} is already set at {settings[name].place}: remove one of them"
            )
        if name in SECRETS and mode & 0o077:
            raise ConfigError(
                f"{place}: other users can read the value of {name} in this file (mode {mode:o}): "
                f"run `chmod 600 {path}`, or put the keys into a separate file and set {name}-file"
            )
        settings[name] = Setting(name, value, place)
    return list(settings.values())


def _unknown(name: str, value: Any, known: Iterable[str], sections: Collection[str]) -> str:
    if isinstance(value, dict) and sections:
        there = " and ".join(f"[{section}]" for section in sections)
        return f"section [{name}] is not known: there are {there}"
    if isinstance(value, dict) and difflib.get_close_matches(name, [MODELS]):
        return f"section [{name}] is not known: a model's table is [{MODELS}.NAME]"
    if isinstance(value, dict):
        return f"section [{name}] is not supported: write options at the top level: port = 8000"
    meant = near_name(name, known, "`pippin serve --help-all` lists the options")
    return f"{name} is not an option of `pippin serve`; {meant}"


def near_name(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def _line_of(key: str, text: str) -> int:
    """The line that sets a key first: the parser does not report it."""
    spelt = rf"""(?:{re.escape(key)}|"{re.escape(key)}"|'{re.escape(key)}')"""
    found = re.search(rf"^[ \t]*(?:\[+[ \t]*)?{spelt}[ \t]*[=.\]]", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


PREFIX = "PIPPIN_"
OPTION = "option"
ENVIRONMENT = Env(PREFIX, command=False, show=False)
TYPES = {
    name: hint for section in SECTIONS.values() for name, hint in get_type_hints(section).items()
}
FIELDS = {option_name(f.name) for section in SECTIONS.values() for f in fields(section)}
OTHER_VARIABLES = {"PIPPIN_BLAS", "PIPPIN_CONFIG"}
IS_NEAR = 0.85  # of a variable's name, which begins like all others
# The keys of pippin.toml, and which option each sets.
KEYS = {
    **{name: name for name in FIELDS},
    **{
        alias.removeprefix("--"): option_name(section_field)
        for section_field, alias in ALIASES.items()
    },
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
        given = ArgumentCollection(a for a in arguments if _is_field(a))
        if not given:
            return
        _split_served_model_name(arguments)
        _refuse_empty_variables(given)
        _note_misspelt_variables()
        ENVIRONMENT(app, commands, given)
        self.file = find_config_file(_named_file(arguments))
        for setting in read_config_file(self.file, KEYS) if self.file is not None else ():
            if setting.name == MODELS:
                self.models = setting
                continue
            # What this command does not have is ignored: one file serves all commands.
            if any(f"--{setting.name}" in option.names for option in given):
                source_of(setting)(app, commands, given)
        self.origins = {
            argument.name.removeprefix("--"): _origin(argument.tokens[0])
            for argument in given
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


def _refuse_empty_variables(options: ArgumentCollection) -> None:
    """An empty variable has no value; for a key it would mean that none is required."""
    for option in options:
        variable = _variable(option.name.removeprefix("--"))
        if os.environ.get(variable) == "":
            raise ConfigError(f"{variable} is set and empty: set a value, or unset the variable")


def _note_misspelt_variables() -> None:
    """No error: other programs may set variables, as Kubernetes does for a service `pippin`."""
    known = {_variable(section_field) for section_field in FIELDS} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for near in difflib.get_close_matches(name, sorted(known), 1, IS_NEAR):
                print(f"pippin: {name} is not read; did you mean {near}?", file=sys.stderr)


def _variable(option: str) -> str:
    return PREFIX + option.replace("-", "_").upper()


def source_of(setting: Setting) -> Dict:
    values = {setting.name: setting.value}
    return Dict(values, source=setting.place, use_commands_as_keys=False)


def _origin(token: Token) -> str:
    if token.source == "env":
        return str(token.keyword)
    return OPTION if token.source == "cli" else token.source


SETTINGS = Settings()


@takes_config(*SECTIONS)
def config(config: Config) -> None:
    """Print the values that `pippin serve` would use, in the format of pippin.toml.

    After each value it prints where the value was set: an option, an environment variable, or a
    line of a file. Defaults are commented out. API keys are counted, not printed.
    """
    print("\n".join(describe(config)), flush=True)


def describe(config: Config) -> Iterator[str]:
    looked = " or ".join(map(str, default_paths()))
    found = SETTINGS.file
    yield f"# read from {found}" if found is not None else f"# no file was found at {looked}"
    for section in SECTIONS:
        yield ""
        yield f"# {section}"
        values = getattr(config, section)
        for each in fields(values):
            yield _line(option_name(each.name), getattr(values, each.name))
    if (tables := SETTINGS.models) is None:
        return
    for name, table in tables.value.items():
        yield ""
        yield f"[models.{_toml(name)}]  # {tables.place}"
        for key, value in table.items() if isinstance(table, dict) else ():
            yield f"{key} = {_toml(value)}"


def _line(name: str, value: Any) -> str:
    origin = SETTINGS.origins.get(name)
    if name in SECRETS and value:
        return f"# {name} = ({len(value)} set, not printed)  # {origin}"
    if origin is None:
        return f"# {name} =" if value in (None, ()) else f"# {name} = {_toml(value)}"
    return f"{name} = {_toml(value)}  # {origin}"


def _toml(value: Any) -> str:
    """Strings, numbers, booleans and lists of strings are in TOML what they are in JSON."""
    return json.dumps(value, ensure_ascii=False)


OF_ONE_MODEL = (  # what its table may set
    *("model", "backend", "dtype", "revision", "max_len"),
    *("memory", "max_running", "speculate", "draft_model"),
    *("alias", "tool_parser", "reasoning_parser", "keep_alive"),
)


def configs_of(config: Config, named: Sequence[str], table: Setting | None) -> list[Config]:
    """One for each model that was named, or without a name for each in the table.

    Empty: the config itself is that of the only model.
    """
    models: Mapping[str, Any] = {} if table is None else table.value
    names = list(named) or list(models)
    for name in names:
        _check_known(name, models, table)
    if len(names) < 2 and not any(name in models for name in names):
        return []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"model {name!r} is given twice: give it once")
    return [
        _config_of(config, name, models.get(name), table, is_first=number == 0)
        for number, name in enumerate(names)
    ]


def _check_known(name: str, models: Mapping[str, Any], table: Setting | None) -> None:
    """A name that is nearly one of the table's is a mistake, unless it names a model itself."""
    near = difflib.get_close_matches(name, list(models), n=1)
    if table is None or name in models or not near or "/" in name or Path(name).exists():
        return
    from pippin.startup.checkpoint import bundled_models

    if name in bundled_models():
        return
    raise ConfigError(
        f"no model {name!r} is in the table at {table.place}, which has {', '.join(models)}; did "
        f"you mean {near[0]}?"
    )


def _config_of(
    config: Config, name: str, given: Any, table: Setting | None, *, is_first: bool
) -> Config:
    # The budget at the top level is for all: a model's own is in its table.
    values: dict[str, Any] = {"model": name, "memory": "auto"}
    if not is_first:
        values["alias"] = ()
    if given is not None:
        assert table is not None, "it has an entry"
        values |= {"served_name": name, **_checked(name, given, table)}
    try:
        return replace(
            config,
            **{
                section: replace(
                    getattr(config, section),
                    **{f.name: values[f.name] for f in fields(kind) if f.name in values},
                )
                for section, kind in SECTIONS.items()
            },
        )
    except ConfigError as error:
        if table is None:
            raise
        raise ConfigError(f"{table.place_of(name)}: models.{name}: {error.message}") from error


def _checked(name: str, given: Any, table: Setting) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(
            f"{table.place}: models.{name} must be a table such as [models.{name}] with "
            'model = "Qwen/Qwen3.5-0.8B"'
        )
    known = {key: option.replace("-", "_") for key, option in KEYS.items()}
    known = {key: field for key, field in known.items() if field in OF_ONE_MODEL}
    values: dict[str, Any] = {}
    for key, value in given.items():
        place = f"{table.place_of(name, key)}: models.{name}.{key}"
        field = known.get(spelt := key.replace("_", "-"))
        if field is None:
            meant = near_name(spelt, known, f"known are {', '.join(sorted(known))}")
            raise ConfigError(f"{place} is not an option of one model; {meant}")
        try:
            values[field] = msgspec.convert(value, TYPES[field])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: {error}") from error
    return values
