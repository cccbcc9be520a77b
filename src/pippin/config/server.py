"""The HTTP server: network, access control, API, logs and restarts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from pippin.config.engine import check_at_least
from pippin.durations import IN_WORDS, parse_duration
from pippin.errors import ConfigError

# A site, or every origin of a scheme that no web site has.
CORS_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*]+|(?!https?:)[a-z][a-z0-9+.-]*://\*")
DEVICE = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9a-zA-Z/-]{1,100}")
MAX_REPLICAS = 64
EVENT_ADDRESS = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s/:*\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """IP address to listen on; 0.0.0.0 accepts connections from other machines."""

    port: int = 8000
    """TCP port to listen on; 0 chooses a free port."""

    served_name: str | None = None
    """Model name in the API. Default: the last part of the model's path or id. Requests may use the
    whole id, too."""

    alias: tuple[str, ...] = ()
    """Further model name that requests may use; may be given several times. For clients with a
    fixed model name, such as gpt-4o. `*` accepts any name."""

    tool_parser: str = "auto"
    """Format of the model's tool calls: a name in docs/api/tools.md, or the name of vLLM's parser.
    `auto`: detected from the chat template. `off`: tool calls are returned as text."""

    reasoning_parser: str = "auto"
    """Format of the model's reasoning: a name in docs/api/tools.md, or the name of vLLM's parser.
    `auto`: detected from the chat template. `off`: reasoning is returned as text."""

    strict_fields: bool = False
    """Refuse fields that cannot change a reply here, and tools that only a vendor's servers run.
    Off: they are ignored, and listed in the response's `x-pippin-ignored` header."""

    images: Literal["omit", "refuse"] = "omit"
    """What is done with images and files in a conversation, since models read text only. `omit`: a
    text such as `[image: PNG omitted]` takes their place. `refuse`: HTTP 400."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """API key that requests must send as a bearer token; may be given several times. Other users of
    this machine can read command lines: prefer --api-key-file, or PIPPIN_API_KEY with keys
    separated by spaces. Default: no key is required."""

    api_key_file: str | None = None
    """File with API keys, one per line."""

    admin_key: tuple[str, ...] = field(default=(), repr=False)
    """Key for routes that affect all clients: flushing the cache, /events, details of /status. It
    is also valid as an API key; may be given several times. Default: the API key if there is
    exactly one; with several, these routes are refused."""

    admin_key_file: str | None = None
    """File with admin keys, one per line."""

    allow_pull: Literal["auto", "on", "off"] = "auto"
    """Let clients download models to this machine (/api/pull), and delete them (/api/delete).
    `auto`: clients with an admin key, or if no key is required, clients on this machine. `on`: if
    no key is required, all clients. `off`: none."""

    share_prefixes: bool = False
    """Share cached prefixes between requests with different API keys. Off: a prefix cached for one
    key is not used for another, so that `cached_tokens` and response times reveal nothing about
    other keys."""

    allowed_host: tuple[str, ...] = ()
    """Host name accepted in the Host header; may be given several times. IP addresses, localhost,
    `*.internal` and the value of --host are always accepted, and any name with a valid API key.
    `*.example.com` accepts all its subdomains, `*` any name."""

    cors_origin: tuple[str, ...] = ()
    """Web site whose pages may call this server from a browser, such as https://chat.example.com;
    may be given several times. `chrome-extension://*`, `app://*` and `tauri://*` allow programs,
    `*` allows any site. Pages from this machine (http://localhost:3000) may generate and list
    models without it."""

    stored_responses: int = 1024
    """Maximum number of responses of /v1/responses that are stored in memory for
    `previous_response_id` and retrieval; 0 stores none. Each API key has an equal share, at least
    one, and its least recently used response is deleted first."""

    stored_bytes: int = 64_000_000
    """Maximum size of all stored responses of /v1/responses, in bytes; each API key has an equal
    share."""

    batch_dir: str | None = None
    """Directory for files of /v1/files and batches of /v1/batches, kept across restarts. Only one
    server can use a directory at a time. Default: a directory for each served model in the user's
    state directory, created when a client sends the first file."""

    batch_bytes: int = 1_000_000_000
    """Maximum size of all files of /v1/files, in bytes, including results of batches; each API key
    has an equal share. 0 switches /v1/files and /v1/batches off."""

    batch_file_bytes: int = 100_000_000
    """Maximum size of one file that is sent to /v1/files, in bytes."""

    batch_running: int | None = None
    """Maximum number of requests of batches in the engine at the same time. They have the lowest
    priority. Default: a quarter of --max-running."""

    prompt_normalisation: bool = True
    """Remove lines from system messages that agents write for their vendor alone and that change
    between conversations or turns, such as Claude Code's billing header: cached prefixes would end
    there. Claude Code's `gitStatus` is moved into the user message that brought it.
    docs/internals/prefix-cache.md lists them."""

    page: bool = True
    """Serve a web page at / with a chat and a live view of the engine."""

    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""

    log_prompts: bool = False
    """Write the text of prompts to the log."""

    show_prompts: Literal["auto", "on", "off"] = "auto"
    """Let admins read the text in the prefix cache, at /events/node. `auto`: on if there is exactly
    one key, or no key and the server listens on a loopback address."""

    engine_timeout: int = 300
    """Seconds after which a step that has not finished counts as hung and the engine process is
    restarted."""

    heartbeat_timeout: int = 30
    """Seconds without a heartbeat after which the engine process counts as frozen and is restarted.
    It sends one every half second, also during a step."""

    step_log: str | None = None
    """File to which one line of JSON per step is written: what the step did, and when."""

    trace: str | None = None
    """File to which a trace of the engine is written in Chrome's trace format, for Perfetto; at
    most 200 MB."""

    kv_events: str | None = None
    """Address at which KV events are published over ZeroMQ, tcp://HOST:PORT: which blocks of tokens
    are cached, for routers. They contain the tokens of prompts, and are not encrypted. Default:
    none."""

    kv_events_replay: str | None = None
    """Address at which subscribers of --kv-events request events that they missed,
    tcp://HOST:PORT."""

    kv_events_form: Literal["vllm", "sglang"] = "vllm"
    """Encoding of KV events: maps, as vLLM publishes them, or arrays, as SGLang does."""

    keep_alive: str | None = None
    """How long a model stays loaded after its last request, where several are served: a duration
    such as 5m, or a negative number for ever. With one model: it is loaded by the first request,
    and unloaded after that time. Default: 5m with several models; one model stays loaded."""

    model_turn: float = 10.0
    """Seconds that a loaded model serves before it has to yield to a model that waits for memory.
    It then accepts no new requests until its replies have ended and the other model had its turn.
    Replies are never cut."""

    replicas: int = 1
    """Number of engine processes that serve the model. Each request is sent to the one that can
    restore the most of its prompt, less its load. --memory, --host-cache and --disk are divided
    between them, and so are CPU threads."""

    devices: str | None = None
    """NVIDIA GPUs for engine processes, one for each: numbers or UUIDs separated by commas, such as
    0,1. A GPU that is given twice is shared by two. Default: all replicas use the same device."""

    engine_restarts: int = 5
    """Maximum number of engine restarts in a row without a finished request between them. After one
    more failure the server exits with status 1."""

    drain_timeout: int = 20
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C. A second signal stops
    the server at once."""

    def __post_init__(self) -> None:
        check_at_least(self, engine_timeout=1, heartbeat_timeout=1)
        check_at_least(self, engine_restarts=0, drain_timeout=0, replicas=1)
        self._check_replicas()
        check_at_least(self, stored_responses=0, stored_bytes=0)
        check_at_least(self, batch_bytes=0, batch_file_bytes=1, batch_running=1)
        if self.keep_alive is not None and parse_duration(self.keep_alive) is None:
            raise ConfigError(f"keep_alive is {self.keep_alive!r}: use {IN_WORDS}")
        if not 0 <= self.model_turn <= 3600:
            raise ConfigError(f"model_turn must be 0 to 3,600 seconds, got {self.model_turn}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for option in ("api_key", "admin_key"):
            if not all(key.strip() for key in getattr(self, option)):
                raise ConfigError(f"{option} is empty: give a key, or remove the option")
        has_admin = self.admin_key or self.admin_key_file is not None
        if has_admin and not (self.api_key or self.api_key_file is not None):
            raise ConfigError(
                "admin_key requires api_key: without an API key every request is accepted; give "
                "--api-key or --api-key-file too"
            )
        for option in ("kv_events", "kv_events_replay"):
            if (address := getattr(self, option)) is not None:
                event_address(option, address)
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ConfigError("kv_events_replay requires --kv-events, the address of the events")
        for name in self.allowed_host:
            if "*" in name.removeprefix("*.") and name != "*":
                raise ConfigError(
                    f"allowed_host {name!r} is not valid: use a name, *.example.com for its "
                    "subdomains, or * for any name"
                )
        for origin in self.cors_origin:
            if origin != "*" and not CORS_ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin {origin!r} is not valid: use a scheme and a host without a path, "
                    "such as https://chat.example.com, app://* for the programs of a scheme, or "
                    "* for any site"
                )

    @property
    def num_replicas(self) -> int:
        return self.replicas if self.devices is None else len(self.device_names)

    @property
    def replicas_per_device(self) -> int:
        """At most: the memory of one device has to hold so many."""
        names = self.device_names
        return self.replicas if self.devices is None else max(map(names.count, names))

    @property
    def device_names(self) -> list[str]:
        return [name.strip() for name in (self.devices or "").split(",")]

    def _check_replicas(self) -> None:
        if self.devices is not None:
            if not all(DEVICE.fullmatch(name) for name in self.device_names):
                raise ConfigError(
                    f"devices is {self.devices!r}: use numbers or UUIDs of GPUs separated by "
                    "commas, such as 0,1"
                )
            if self.replicas not in (1, self.num_replicas):
                raise ConfigError(
                    f"replicas is {self.replicas} and devices names {self.num_replicas}: name a "
                    "device for each replica, or remove --replicas"
                )
        if self.num_replicas > MAX_REPLICAS:
            raise ConfigError(f"replicas must be at most {MAX_REPLICAS}, got {self.num_replicas}")
        for option in ("step_log", "trace"):
            if self.num_replicas > 1 and getattr(self, option) is not None:
                name = option.replace("_", "-")
                raise ConfigError(
                    f"{option} records one engine, and there are {self.num_replicas}: remove "
                    f"--{name}, or use one replica"
                )


def event_address(option: str, text: str) -> tuple[str, int]:
    """Host and port."""
    found = EVENT_ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ConfigError(
            f"{option} is {text!r}: use tcp://HOST:PORT, such as tcp://127.0.0.1:5557, or "
            "tcp://*:5557 for all addresses of this machine"
        )
    return found[1].strip("[]"), int(found[2])
