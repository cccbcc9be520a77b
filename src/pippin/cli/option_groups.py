"""Under which heading `--help` lists each option, and which ones only `--help-all` lists.

Knows the names of config fields and nothing of their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import Group
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"

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
    "Logs": ("log_format log_prompts", "show_prompts step_log trace"),
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
