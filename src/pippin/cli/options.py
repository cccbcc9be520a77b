"""Turns config sections into command-line options.

cyclopts reads the dataclasses: a field becomes `--its-name`, the string after it the help text.
Values that are not on the command line are in `settings.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel

from pippin.config import Config

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
# Options of vLLM that have no field of their own here; `settings.py` moves their values.
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
