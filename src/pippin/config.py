"""One Config of frozen sections; the command line is generated from these fields.

The string after each field is its help text. `"auto"` is resolved once, at start-up, into a new
Config (see `startup/resolve.py`); nothing later looks at an unresolved value.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from pippin.amounts import parse_bytes, parse_memory
from pippin.errors import ConfigError

BackendName = Literal["mlx", "torch", "fake"]


def _check_at_least(section: Any, **minimums: int) -> None:
    for name, minimum in minimums.items():
        value = getattr(section, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class ModelConfig:
    model: str = "stories-hybrid-20m"
    """Model: a local directory, a Hugging Face id such as Qwen/Qwen3.5-0.8B, or the name of the
    demo model that pippin[demo] installs."""

    _: KW_ONLY

    backend: Literal["auto", "mlx", "torch", "fake"] = "auto"
    """Library that runs the model. `auto`: torch on an NVIDIA GPU if its kernels support the model;
    otherwise mlx if it is installed; otherwise torch. `fake` needs no model and returns meaningless
    text quickly, to test clients."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of weights and activations. `auto`: float32 on CPUs, otherwise the data type of the
    checkpoint."""

    revision: str | None = None
    """Branch, tag or commit to download of a Hugging Face id. Default: the main branch."""

    max_len: int | None = None
    """Maximum length of a prompt and its reply together, in tokens. Default: the context length in
    the checkpoint."""

    def __post_init__(self) -> None:
        _check_at_least(self, max_len=1)


@dataclass(frozen=True)
class EngineConfig:
    max_running: int = 64
    """Maximum number of requests that are decoded in one batch; further requests wait in the
    queue."""

    max_queue: int = 1024
    """Maximum number of requests in the queue; further requests are refused with HTTP 503."""

    max_queue_tokens: int = 4_000_000
    """Maximum number of prompt tokens in the queue, summed over its requests; further requests are
    refused with HTTP 503."""

    prefill_tokens: int | None = None
    """Prompt tokens computed in one step while no other request is running. Default: 512 on CPUs,
    2,048 on Metal, 8,192 on CUDA."""

    max_gap: float = 0.2
    """Longest planned pause between two tokens of a running stream while prompts are computed in
    the same steps, in seconds. A lower value makes streams smoother and prompts slower. The
    smallest piece of a prompt may exceed it."""

    overlap: bool = True
    """Plan and launch the next step before the tokens of the previous step are known."""

    forced_chunks: bool = True
    """Compute several tokens in one step where a grammar allows only one continuation, if that is
    faster."""

    prefix_cache: bool = True
    """Reuse the KV cache and recurrent states of prompt prefixes that requests have in common."""

    memory: str = "auto"
    """Memory budget for weights, KV cache, recurrent states and temporary buffers: an amount
    ("6GB") or a fraction of the device's memory ("0.7"). `auto`: a fraction that depends on the
    device, which `pippin doctor` prints."""

    host_cache: str | None = None
    """Host memory for cached prefixes that were evicted from GPU memory ("32GB"), pinned at start.
    Requires the torch backend and a GPU with its own memory. Default: none."""

    cache_dir: str | None = None
    """Directory of a prefix cache on disk that is kept across restarts. Requires --disk. Only one
    server can use a directory at a time. Default: no cache on disk."""

    disk: str | None = None
    """Maximum size of the prefix cache in --cache-dir ("20GB")."""

    deterministic: bool = False
    """Return bit-identical results whether a prefix was cached or not and whether requests ran
    alone or in a batch: fixed shapes, and float32 products without TF32. Slower."""

    wired: bool = False
    """Keep the weights wired in memory on Metal, so that macOS does not swap them out. Off by
    default because wired memory can cause a macOS kernel panic."""

    buffer_limit: int | None = None
    """Maximum number of operations, and of megabytes, in one command buffer that mlx submits to a
    GPU. Default: mlx's value for the device."""

    canary: Literal["off", "log", "raise"] = "off"
    """Verify entries of the prefix cache when they are used and when the engine is idle; slow.
    `log` logs a fault, `raise` stops the engine."""

    def __post_init__(self) -> None:
        _check_at_least(self, max_running=1, max_queue=1, max_queue_tokens=1, prefill_tokens=1)
        if not self.max_gap > 0.0:
            raise ConfigError(f"max_gap must be more than 0 seconds, got {self.max_gap}")
        _check_at_least(self, buffer_limit=1)
        if self.memory != "auto":
            parse_memory(self.memory)
        if self.canary != "off" and not self.prefix_cache:
            raise ConfigError(
                "canary verifies the prefix cache, which is off: remove --canary or "
                "--no-prefix-cache"
            )
        self._check_tiers()

    def _check_tiers(self) -> None:
        if (self.cache_dir is None) != (self.disk is None):
            given, lacking = (
                ("disk", "cache_dir") if self.cache_dir is None else ("cache_dir", "disk")
            )
            raise ConfigError(
                f"{given} requires {lacking}: give --cache-dir, the directory, and --disk, its size"
            )
        if self.disk is not None:
            parse_bytes("disk", self.disk)
            if not self.prefix_cache:
                raise ConfigError(
                    "cache_dir stores the prefix cache, which is off: remove --cache-dir or "
                    "--no-prefix-cache"
                )
        if self.host_cache is not None:
            parse_bytes("host_cache", self.host_cache)
            if not self.prefix_cache:
                raise ConfigError(
                    "host_cache stores the prefix cache, which is off: remove --host-cache or "
                    "--no-prefix-cache"
                )


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """IP address to listen on; 0.0.0.0 accepts connections from other machines."""

    port: int = 8000
    """TCP port to listen on; 0 chooses a free port."""

    served_name: str | None = None
    """Model name in the API. Default: the last part of the model's path or id."""

    alias: tuple[str, ...] = ()
    """Further model name that requests may use; may be given several times. For clients with a
    fixed model name, such as gpt-4o."""

    tool_parser: str = "auto"
    """Format of the model's tool calls: a name from docs/tools.md, or the name of vLLM's parser.
    `auto`: detected from the chat template. `off`: tool calls are returned as text."""

    reasoning_parser: str = "auto"
    """Format of the model's reasoning: a name from docs/tools.md, or the name of vLLM's parser.
    `auto`: detected from the chat template. `off`: reasoning is returned as text."""

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

    share_prefixes: bool = False
    """Share cached prefixes between requests with different API keys. Off: a prefix cached for one
    key is not used for another, so that `cached_tokens` and response times reveal nothing about
    other keys."""

    allowed_host: tuple[str, ...] = ()
    """Host name accepted in the Host header; may be given several times. IP addresses, localhost
    and the value of --host are always accepted. `*.example.com` accepts all its subdomains, `*` any
    name."""

    cors_origin: tuple[str, ...] = ()
    """Web site whose pages may call this server from a browser, such as https://chat.example.com;
    may be given several times. `*` allows any site."""

    stored_responses: int = 1024
    """Maximum number of responses of /v1/responses that are stored in memory for
    `previous_response_id` and retrieval; 0 stores none. Each API key has an equal share, at least
    one, and its least recently used response is deleted first."""

    stored_bytes: int = 64_000_000
    """Maximum size of all stored responses of /v1/responses, in bytes; each API key has an equal
    share."""

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

    engine_restarts: int = 5
    """Maximum number of engine restarts in a row without a finished request between them. After one
    more failure the server exits with status 1."""

    drain_timeout: int = 20
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C. A second signal stops
    the server at once."""

    def __post_init__(self) -> None:
        _check_at_least(self, engine_timeout=1, heartbeat_timeout=1)
        _check_at_least(self, engine_restarts=0, drain_timeout=0)
        _check_at_least(self, stored_responses=0, stored_bytes=0)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("api_key is empty: give a key, or remove the option")
        if not all(key.strip() for key in self.admin_key):
            raise ConfigError("admin_key is empty: give a key, or remove the option")
        has_admin = self.admin_key or self.admin_key_file is not None
        if has_admin and not (self.api_key or self.api_key_file is not None):
            raise ConfigError(
                "admin_key requires api_key: without an API key every request is accepted; give "
                "--api-key or --api-key-file too"
            )
        for name in self.allowed_host:
            if "*" in name.removeprefix("*.") and name != "*":
                raise ConfigError(
                    f"allowed_host {name!r} is not valid: use a name, *.example.com for its "
                    "subdomains, or * for any name"
                )
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*]+", origin):
                raise ConfigError(
                    f"cors_origin {origin!r} is not valid: use a scheme and a host without a path, "
                    "such as https://chat.example.com, or * for any site"
                )


@dataclass(frozen=True)
class LimitsConfig:
    """Limits for one client. A request above one is refused with a 4xx error that names it."""

    max_body_bytes: int = 32_000_000
    """Maximum size of a request body, in bytes."""

    max_choices: int = 512
    """Maximum number of replies to one request: its number of prompts times `n`."""

    max_tokens: int | None = None
    """Maximum length of one reply, in tokens. Default: the model's context length minus the
    prompt."""

    max_stops: int = 16
    """Maximum number of stop strings in one request."""

    max_logit_bias: int = 1024
    """Maximum number of tokens in the `logit_bias` of one request."""

    max_schema_bytes: int = 262_144
    """Maximum size of a JSON Schema, regular expression or grammar in a request, in bytes."""

    max_connections: int = 1024
    """Maximum number of open connections. At the limit, an idle connection is closed to accept a
    new one; if there is none, the new one gets HTTP 429."""

    header_timeout: float = 10.0
    """Seconds within which the headers of a request must arrive."""

    body_timeout: float = 60.0
    """Seconds within which the body of a request must arrive."""

    idle_timeout: int = 75
    """Seconds after which a connection without requests is closed."""

    send_timeout: float = 60.0
    """Seconds after which a client that reads nothing of its response is disconnected."""

    request_timeout: float | None = None
    """Maximum duration of one request in seconds, including its time in the queue; a request can
    set a lower value with its `timeout` field. Default: no limit."""

    def __post_init__(self) -> None:
        _check_at_least(self, max_body_bytes=1, max_choices=1, max_tokens=1, max_stops=0)
        _check_at_least(self, max_logit_bias=0, max_schema_bytes=1, max_connections=1)
        _check_at_least(self, idle_timeout=1)
        for name in ("header_timeout", "body_timeout", "send_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {seconds}")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
