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
    """A local directory, a Hugging Face id, or the name of the model that pippin[demo] brings."""

    _: KW_ONLY

    backend: Literal["auto", "mlx", "torch", "fake"] = "auto"
    """What runs the model. `auto`: torch on an NVIDIA GPU, where its kernels take the model; else
    mlx, where it is installed; else torch. `fake` is a toy for testing clients: it emits nonsense,
    fast."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Arithmetic type. `auto`: float32 on CPUs, otherwise the checkpoint's own."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""

    max_len: int | None = None
    """Longest prompt and reply together, in tokens. Default: what the checkpoint holds."""

    def __post_init__(self) -> None:
        _check_at_least(self, max_len=1)


@dataclass(frozen=True)
class EngineConfig:
    max_running: int = 64
    """Requests that decode at the same time; more wait in the queue."""

    max_queue: int = 1024
    """Requests that may wait; more are refused with 503."""

    max_queue_tokens: int = 4_000_000
    """Prompt tokens that may wait, of all requests together; more are refused with 503."""

    prefill_tokens: int | None = None
    """Prompt tokens computed in one step when nothing else is running. Default: 512 on CPUs, 2,048
    on Metal, 8,192 on CUDA."""

    max_gap: float = 0.2
    """Seconds that running streams wait for their next token, at most, while prompts are computed
    beside them. It bounds what steps are planned to take, except for the smallest piece of a
    prompt. Less is smoother; prompts take longer."""

    overlap: bool = True
    """Plan and launch the next step before the last one's tokens are known."""

    forced_chunks: bool = True
    """Run several tokens at once where a grammar leaves no choice, if that is faster."""

    prefix_cache: bool = True
    """Reuse the KV and recurrent states of shared prefixes."""

    memory: str = "auto"
    """Byte budget for weights, KV, states and work space: bytes ("6GB") or a fraction ("0.7")."""

    host_cache: str | None = None
    """Bytes of the host's memory for cached prefixes that the device has no room for ("32GB").
    Pinned at start. For GPUs with a memory of their own, by torch."""

    cache_dir: str | None = None
    """Directory of a prefix cache that outlives the process; needs `disk`. One server each."""

    disk: str | None = None
    """Bytes that may be written there ("20GB"); needs `cache_dir`."""

    deterministic: bool = False
    """Fixed shapes: cold equals warm and solo equals batched, bit for bit; float32 products without
    TF32. Slower."""

    wired: bool = False
    """Keep the weights wired on Metal, so that macOS never swaps them out. Off: servers that wire
    memory have panicked it."""

    buffer_limit: int | None = None
    """Operations, and megabytes, that mlx hands a GPU at a time. Default: its own choice for the
    device."""

    canary: Literal["off", "log", "raise"] = "off"
    """Verify cached entries when used and when idle. `raise` stops the engine at a fault; slow."""

    def __post_init__(self) -> None:
        _check_at_least(self, max_running=1, max_queue=1, max_queue_tokens=1, prefill_tokens=1)
        if not self.max_gap > 0.0:
            raise ConfigError(f"max_gap must be more than 0 seconds, got {self.max_gap}")
        _check_at_least(self, buffer_limit=1)
        if self.memory != "auto":
            parse_memory(self.memory)
        if self.canary != "off" and not self.prefix_cache:
            raise ConfigError("canary checks the prefix cache, which is switched off")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if (self.cache_dir is None) != (self.disk is None):
            given, lacking = (
                ("disk", "cache_dir") if self.cache_dir is None else ("cache_dir", "disk")
            )
            raise ConfigError(f"{given} goes with {lacking}: where to keep the cache, and how much")
        if self.disk is not None:
            parse_bytes("disk", self.disk)
            if not self.prefix_cache:
                raise ConfigError("cache_dir keeps the prefix cache, which is switched off")
        if self.host_cache is not None:
            parse_bytes("host_cache", self.host_cache)
            if not self.prefix_cache:
                raise ConfigError("host_cache keeps the prefix cache, which is switched off")


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    served_name: str | None = None
    """Model name in the API. Default: the last part of the model's path or id."""

    alias: tuple[str, ...] = ()
    """Another name that the model answers to; may be given several times. Tools that ask for a
    model of their own, such as gpt-4o, then get this one."""

    tool_parser: str = "auto"
    """The format of the model's tool calls, or `off`. `auto`: by its chat template."""

    reasoning_parser: str = "auto"
    """The format of its reasoning, or `off`. `auto`: by its chat template."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """A key that requests must carry as a bearer token; may be given several times. Others can read
    a command line: better from a file, or from the environment (separated by spaces)."""

    api_key_file: str | None = None
    """A file of such keys, one a line."""

    admin_key: tuple[str, ...] = field(default=(), repr=False)
    """A key for what concerns every client: flushing the cache, /events, details of /status. May be
    given several times, and does what an API key does besides. Default: the API key, if there is
    one; with several, these routes are refused."""

    admin_key_file: str | None = None
    """A file of such keys, one a line."""

    share_prefixes: bool = False
    """Let requests with different API keys share cached prefixes. Off: with more than one key, what
    is cached for one key is neither used for another nor seen in its `cached_tokens` and times."""

    allowed_host: tuple[str, ...] = ()
    """A name in the Host header that is answered to; may be given several times. Addresses,
    localhost and --host always are. `*.example.com` stands for all names under it, `*` for any."""

    cors_origin: tuple[str, ...] = ()
    """A site whose pages may use this server from a browser, such as https://chat.example.com; may
    be given several times. `*` is any site."""

    stored_responses: int = 1024
    """Responses of /v1/responses that are kept in memory, to be continued and read again; 0 stores
    none. Each key has an equal part of them, one at least, and drops its own that were not asked
    for longest."""

    stored_bytes: int = 64_000_000
    """Bytes that they may take together; each key has an equal part."""

    page: bool = True
    """Serve a page at / that chats with the model and shows what the engine does."""

    log_format: Literal["text", "json"] = "text"
    """How log lines look."""

    log_prompts: bool = False
    """Write prompts into the log, too."""

    show_prompts: Literal["auto", "on", "off"] = "auto"
    """Whether an admin can read what is in the prefix cache, at /events/node. `auto`: if there is
    one key, or none and the server listens on this machine alone."""

    engine_timeout: int = 300
    """Seconds that one step may take before the engine counts as hung and is replaced."""

    heartbeat_timeout: int = 30
    """Seconds without a sign of life before the engine counts as frozen and is replaced. Signs
    come every half second, steps or not."""

    step_log: str | None = None
    """Write what each step did, and when, to this file: a line of JSON each."""

    trace: str | None = None
    """Write what the engine does to this file in Chrome's trace format, which Perfetto opens;
    200 MB at most."""

    engine_restarts: int = 5
    """Engines in a row that may die, without one finished request between them, and be replaced.
    One more ends the server with status 1."""

    drain_timeout: int = 20
    """Seconds that requests may take to finish after SIGTERM or Ctrl-C. A second one stops at
    once."""

    def __post_init__(self) -> None:
        _check_at_least(self, engine_timeout=1, heartbeat_timeout=1)
        _check_at_least(self, engine_restarts=0, drain_timeout=0)
        _check_at_least(self, stored_responses=0, stored_bytes=0)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("api_key is empty: give a key, or leave the option out")
        if not all(key.strip() for key in self.admin_key):
            raise ConfigError("admin_key is empty: give a key, or leave the option out")
        has_admin = self.admin_key or self.admin_key_file is not None
        if has_admin and not (self.api_key or self.api_key_file is not None):
            raise ConfigError("admin_key goes with api_key: without one every request is admitted")
        for name in self.allowed_host:
            if "*" in name.removeprefix("*.") and name != "*":
                raise ConfigError(f"allowed_host {name!r}: * stands alone or as in *.example.com")
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*]+", origin):
                raise ConfigError(f"cors_origin {origin!r} is not like https://chat.example.com")


@dataclass(frozen=True)
class LimitsConfig:
    """What one client may ask of the server. Whoever asks for more gets a 4xx that names it."""

    max_body_bytes: int = 32_000_000
    """Bytes of a request's body."""

    max_choices: int = 512
    """Replies of one request: its prompts times n."""

    max_tokens: int | None = None
    """Tokens of one reply. Default: what the model holds beside the prompt."""

    max_stops: int = 16
    """Stop strings of a request."""

    max_logit_bias: int = 1024
    """Tokens that a request's logit_bias names."""

    max_schema_bytes: int = 262_144
    """Bytes of a JSON Schema or an expression that a reply must obey."""

    max_connections: int = 1024
    """Open connections; more get a 429, once there is no idle one to close."""

    header_timeout: float = 10.0
    """Seconds that the head of a request may take to come."""

    body_timeout: float = 60.0
    """Seconds that its body may take to come."""

    idle_timeout: int = 75
    """Seconds that a connection is kept open between two requests."""

    send_timeout: float = 60.0
    """Seconds for which a client may take nothing of what is sent to it; then it is cut off."""

    request_timeout: float | None = None
    """Seconds that a request may take, waiting included; the field `timeout` can ask for less.
    Default: as long as it takes."""

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
