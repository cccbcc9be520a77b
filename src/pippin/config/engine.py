"""The model; how the engine batches, caches and uses memory; limits of requests."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from pippin.amounts import parse_bytes, parse_memory, split_amount
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


DEFAULT_ROWS = 64  # of benchmarks, which measure steps of a given size
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

    def without_usual_drafts(self) -> EngineConfig:
        """The same, with drafts only where they are asked for: what is timed is to depend on what
        is given alone."""
        return replace(self, speculate=self.speculate or "off")

    def with_rows(self, num_rows: int) -> EngineConfig:
        """The same, where at least so many requests run at the same time."""
        given = DEFAULT_ROWS if self.max_running == "auto" else self.max_running
        return replace(self, max_running=max(given, num_rows))
