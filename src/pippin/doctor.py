"""`pippin doctor`: what this machine is, how fast it multiplies, and whether it computes right.

Knows the MLX backend; asserts nothing about time. A check that fails makes the exit status 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from pippin import LLM, SamplingParams, __version__
from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.cpu.compiler import compile_available
from pippin.backends.mlx.describe import describe
from pippin.backends.mlx.device import device_info
from pippin.backends.mlx.load import load
from pippin.backends.mlx.recurrent.gated_delta import gated_delta_chunked
from pippin.config import Config, EngineConfig
from pippin.resolve import resolve

LIBRARIES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "torch")
PRODUCT_SIZE = 1024
TOLERANCE = 1e-5
PROMPTS = (
    "Once",
    "The fox and the crow met",
    "A little girl named Lily found a small red box under her bed. She",
    "Tom had a big dog. The dog liked to run and play in the park with " * 4,
)
REPLY_TOKENS = 24


@dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` is None for what is merely said."""

    name: str
    value: str
    ok: bool | None = None
    seconds: float | None = None


def run_doctor(config: Config, *, as_json: bool) -> int:
    """Print the findings as they come; the exit status."""
    findings: list[Finding] = []
    console = Console(stderr=as_json)
    with console.status("") as status:
        for title, look in _examinations(config):
            status.update(title)
            began = time.perf_counter()
            for finding in look():
                seconds = round(time.perf_counter() - began, 2) if finding.ok is not None else None
                findings.append(Finding(finding.name, finding.value, finding.ok, seconds))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console.print(_table(findings))
    return 1 if any(finding.ok is False for finding in findings) else 0


def _examinations(config: Config) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    yield "reading versions", _versions
    yield "looking at the device", _device
    yield "measuring a matrix product", _product
    yield "comparing the fast recurrence with the plain one", _recurrence
    yield "looking at the model", lambda: _model(config)
    yield "comparing a batch with single requests", lambda: _batch_equals_solo(config)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    marks = {None: " ", True: "[green]✓[/]", False: "[red]✗[/]"}
    for finding in findings:
        took = f"[dim]{finding.seconds:.1f} s[/]" if finding.seconds is not None else ""
        table.add_row(marks[finding.ok], finding.name, finding.value, took)
    return table


def _versions() -> Iterator[Finding]:
    yield Finding("pippin", __version__)
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("platform", platform.platform())
    for name in LIBRARIES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed")


def _device() -> Iterator[Finding]:
    device = device_info()
    yield Finding("device", f"{device.kind}: {device.name}")
    yield Finding(
        "memory",
        f"{device.memory_bytes / 2**30:.1f} GiB, of which {device.share:.0%} used by default",
    )
    blas = load_fast_blas()
    threads = f", {blas.threads} threads" if blas.threads else ""
    yield Finding("BLAS", f"{blas.name}{threads}" + (f" ({blas.reason})" if blas.reason else ""))
    compiles = compile_available()
    yield Finding("mx.compile", f"{'on' if compiles.available else 'off'}: {compiles.reason}")


def _product() -> Iterator[Finding]:
    load_fast_blas()
    n = PRODUCT_SIZE
    a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
    mx.eval(a, b, a @ b)
    seconds = min(_seconds_of(lambda: mx.eval(a @ b)) for _ in range(3))
    error = float(np.abs(np.array(a @ b) - np.array(a) @ np.array(b)).max())
    rate = 2 * n**3 / seconds / 1e9
    yield Finding("float32 product", f"{rate:,.0f} GFLOP/s, error {error:.0e}", ok=error < 0.5)


def _seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _recurrence() -> Iterator[Finding]:
    """200 tokens: three whole blocks and a part of one, with gates from shut to open."""
    from mlx_lm.models.gated_delta import gated_delta_ops

    mx.random.seed(0)
    batch, num_tokens, k_heads, v_heads, dim = 2, 200, 2, 4, 64
    q, k = (mx.random.normal((batch, num_tokens, k_heads, dim)) for _ in range(2))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    q = q / mx.linalg.norm(q, axis=-1, keepdims=True)
    v = mx.random.normal((batch, num_tokens, v_heads, dim))
    g, beta = (mx.random.uniform(shape=(batch, num_tokens, v_heads)) for _ in range(2))
    state = mx.random.normal((batch, v_heads, dim, dim))
    fast = gated_delta_chunked(q, k, v, g, beta, state)
    plain = gated_delta_ops(q, k, v, g, beta, state)
    error = max(_relative_error(f, p) for f, p in zip(fast[:2], plain, strict=True))
    yield Finding("fast recurrence = plain", f"error {error:.0e}", ok=error < TOLERANCE)


def _relative_error(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())


def _model(config: Config) -> Iterator[Finding]:
    """In the model's own type: the check that follows uses float32."""
    model = resolve(config).model
    if model.backend == "mlx":
        for name, value in describe(load(Path(model.model), dtype=model.dtype)):
            yield Finding(name, value)


def _batch_equals_solo(config: Config) -> Iterator[Finding]:
    """In float32: in 16 bits a near tie may fall either way with the shape of a batch."""
    params = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True)
    exact = Config(
        model=replace(config.model, dtype="float32"), engine=EngineConfig(prefix_cache=False)
    )
    with LLM(config=exact) as llm:
        batch = [reply.tokens for reply in llm.generate(PROMPTS, params)]
        solo = [llm.generate(prompt, params)[0].tokens for prompt in PROMPTS]
    agree = sum(a == b for a, b in zip(batch, solo, strict=True))
    yield Finding(
        "batched = alone",
        f"{agree} of {len(PROMPTS)} greedy replies of {REPLY_TOKENS} tokens",
        ok=agree == len(PROMPTS),
    )
