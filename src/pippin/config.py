"""One Config of frozen sections; the command line is generated from these fields.

The string after each field is its help text. `"auto"` is resolved once, at start-up, into a new
Config (see `startup/resolve.py`); nothing later looks at an unresolved value.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from pippin.amounts import IN_WORDS, parse_bytes, parse_duration, parse_memory, split_amount
from pippin.errors import ConfigError


def check_at_least(section: Any, **minimums: int) -> None:
    for name, minimum in minimums.items():
        value = getattr(section, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")


def check_seconds(section: Any, *names: str) -> None:
    for name in names:
        seconds = getattr(section, name)
        if seconds is not None and not seconds > 0.0:
            raise ConfigError(f"{name} must be more than 0 seconds, got {seconds}")


MAX_FAKE_STEP = 60.0
BackendName = Literal["mlx", "torch", "fake"]


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

    fake_step: float = 0.0
    """Seconds that each step of `--backend fake` takes at least, to stream at the pace of a real
    model: 0.02 for 50 tokens per second and stream."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of weights and activations. `auto`: float32 on CPUs, otherwise the data type of the
    checkpoint."""

    revision: str | None = None
    """Branch, tag or commit to download of a Hugging Face id. Default: the main branch."""

    max_len: int | None = None
    """Maximum length of a prompt and its reply together, in tokens. Default: the context length in
    the checkpoint; more only as far as its config.json scales positions."""

    def __post_init__(self) -> None:
        check_at_least(self, max_len=1)
        if not 0.0 <= self.fake_step <= MAX_FAKE_STEP:
            raise ConfigError(
                f"fake_step must be from 0 to {MAX_FAKE_STEP:g} seconds, got {self.fake_step}"
            )
        if self.fake_step and self.backend != "fake":
            raise ConfigError(
                f"fake_step requires the fake backend, and backend is {self.backend}: remove "
                "--fake-step or add --backend fake"
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
    new one, or the oldest without a request of an address that has more than an eighth of all; if
    there is none, the new one gets HTTP 429."""

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
        check_at_least(self, max_body_bytes=1, max_choices=1, max_tokens=1, max_stops=0)
        check_at_least(self, max_logit_bias=0, max_schema_bytes=1, max_connections=1)
        check_at_least(self, idle_timeout=1)
        check_seconds(self, "header_timeout", "body_timeout", "send_timeout", "request_timeout")


Speculate = Literal["auto", "off", "suffix", "mtp", "draft"]


@dataclass(frozen=True)
class EngineConfig:
    max_running: int | Literal["auto"] = "auto"
    """Maximum number of requests that are decoded in one batch; further requests wait in the
    queue. `auto`: 256 on NVIDIA GPUs, 64 elsewhere and 32 with a draft model, or fewer if no more
    fit into the memory budget; `pippin doctor` and /status show the number."""

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

    speculate: Speculate | None = None
    """Verify several guessed tokens of a reply in one step; the reply is the same. `suffix` guesses
    what followed the last tokens earlier, in the request itself, in the prefix cache or in other
    requests with the same salt: faster for replies that repeat text, such as edits. `mtp` guesses
    with the MTP head of the checkpoint, and is refused where there is none. `draft` guesses with
    --draft-model. `auto`: `suffix`, and the draft model or else the MTP head if there is one. Only
    as far as it is measured to pay while serving; tools/bench/speculate.py measures it. Default:
    `auto` if `pippin doctor --save` measured that it pays for this model on this machine, otherwise
    `off`."""

    draft_model: str | None = None
    """Smaller model with the same tokenizer that guesses tokens of replies: a directory, or a
    Hugging Face id. Turns --speculate draft on, unless --speculate auto or off is given. Its
    weights, and the keys and values that it keeps of each running request, count towards --memory.
    Default: none."""

    prefix_cache: bool = True
    """Reuse the KV cache and recurrent states of prompt prefixes that requests have in common."""

    memory: str = "auto"
    """Memory budget for weights, KV cache, recurrent states and temporary buffers: an amount
    ("6GB") or a fraction of the device's memory ("0.7"). `auto`: a fraction that depends on the
    device, which `pippin doctor` prints. A number after a slash divides it: auto/2 is half of that,
    for two servers on one device."""

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
    alone or in a batch: fixed shapes, and float32 products without TF32. Slower, and without
    --speculate."""

    safe: bool = False
    """Compute with plain operations of mlx or torch alone: none of Pippin's own CPU operations and
    GPU kernels, no compiled decode steps, no captured graphs. Slower; for machines where
    `pippin doctor` finds that one of them computes wrong results."""

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
        if self.max_running != "auto":
            check_at_least(self, max_running=1)
        check_at_least(self, max_queue=1, max_queue_tokens=1, prefill_tokens=1)
        check_seconds(self, "max_gap")
        check_at_least(self, buffer_limit=1)
        if self.deterministic and self.speculate not in (None, "off"):
            raise ConfigError(
                "speculate and deterministic exclude each other: a token's numbers depend on how "
                "many are verified beside it; remove --speculate or --deterministic"
            )
        if self.safe and self.speculate not in (None, "off"):
            raise ConfigError(
                "speculate and safe exclude each other: drafts are verified by operations of "
                "Pippin's own; remove --speculate or --safe"
            )
        if (amount := split_amount(self.memory)[0]) != "auto":
            parse_memory(amount)
        if (self.cache_dir is None) != (self.disk is None):
            raise ConfigError(
                "cache_dir and disk require each other: give --cache-dir, the directory, and "
                "--disk, its size"
            )
        for name in ("disk", "host_cache"):
            if (amount := getattr(self, name)) is not None:
                parse_bytes(name, amount)
        stores = {
            "canary": self.canary != "off",
            "cache_dir": self.cache_dir is not None,
            "host_cache": self.host_cache is not None,
        }
        for name, given in stores.items():
            if given and not self.prefix_cache:
                raise ConfigError(
                    f"{name} requires the prefix cache, which is off: remove "
                    f"--{name.replace('_', '-')} or --no-prefix-cache"
                )


ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class PeerAddress:
    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, option: str, text: str) -> PeerAddress:
        found = ADDRESS.fullmatch(text)
        if found is None or int(found[3]) > 65535:
            raise ConfigError(
                f"{option} is {text!r}: use tcp://127.0.0.1:PORT on this machine, or "
                "tls://HOST:PORT"
            )
        address = cls(found[2].strip("[]"), int(found[3]), found[1] == "tls")
        if not address.is_tls and not address.is_loopback:
            raise ConfigError(
                f"{option} is {text!r}: connections to other machines have to be encrypted; use "
                f"tls://{found[2]}:{found[3]}, which requires --peer-secret-file and certificates"
            )
        return address

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.is_tls else 'tcp'}://{host}:{self.port}"


@dataclass(frozen=True)
class PeersConfig:
    role: Literal["alone", "prefill", "decode", "both"] = "alone"
    """Whose prompts this engine computes. `prefill`: also those of decode engines, which connect to
    --peer-listen. `decode`: its own, but it asks the engines at --peer for long ones first, and
    computes them if they do not arrive. `both`: both. `alone`: its own."""

    peer: tuple[str, ...] = ()
    """Address of a prefill engine, its --peer-listen; may be given several times.
    tcp://127.0.0.1:PORT on this machine, tls://HOST:PORT on another one."""

    peer_listen: str | None = None
    """Address at which decode engines connect: tcp://127.0.0.1:PORT for this machine alone, or
    tls://HOST:PORT."""

    peer_secret_file: str | None = None
    """File with a secret that both ends prove to know. Required by tls:// addresses."""

    peer_cert: str | None = None
    """File with the TLS certificate for --peer-listen tls://…, in PEM format."""

    peer_key: str | None = None
    """File with the private key of --peer-cert, in PEM format."""

    peer_ca: str | None = None
    """File with the certificates that --peer tls://… is checked against, in PEM format. Default:
    those of the system."""

    peer_memory: str = "1GB"
    """Host memory for prompts that arrive from prefill engines, until they are loaded."""

    def __post_init__(self) -> None:
        parse_bytes("peer_memory", self.peer_memory)
        if self.listens != (self.peer_listen is not None):
            raise ConfigError(
                f"the role is {self.role}, and there is no address at which decode engines "
                "connect: add --peer-listen tcp://127.0.0.1:7000"
                if self.listens
                else f"peer_listen is {self.peer_listen}, and the role is {self.role}, which "
                "computes no prompts for others: add --role prefill, or remove --peer-listen"
            )
        if self.asks != bool(self.peer):
            raise ConfigError(
                f"the role is {self.role}, and no prefill engine is named: add --peer with its "
                "address, such as tcp://127.0.0.1:7000"
                if self.asks
                else f"peer is {', '.join(self.peer)}, and the role is {self.role}, which computes "
                "its prompts alone: add --role decode, or remove --peer"
            )
        if (self.peer_cert is None) != (self.peer_key is None):
            raise ConfigError("peer_cert and peer_key require each other: give both files")
        uses_tls = any(one.is_tls for one in (*self.addresses, *self.listen_addresses))
        if uses_tls and self.peer_secret_file is None:
            raise ConfigError("tls:// addresses require a secret: give --peer-secret-file")
        if any(one.is_tls for one in self.listen_addresses) and self.peer_cert is None:
            raise ConfigError(f"peer_listen is {self.peer_listen}: give --peer-cert and --peer-key")

    @property
    def listens(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def asks(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """Of prefill engines."""
        return tuple(PeerAddress.parse("peer", text) for text in self.peer)

    @property
    def listen_addresses(self) -> tuple[PeerAddress, ...]:
        """One or none."""
        if self.peer_listen is None:
            return ()
        return (PeerAddress.parse("peer_listen", self.peer_listen),)


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
        if self.num_replicas > 1 and self.step_log is not None:
            raise ConfigError(
                f"step_log records one engine, and there are {self.num_replicas}: remove "
                "--step-log, or use one replica"
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


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
