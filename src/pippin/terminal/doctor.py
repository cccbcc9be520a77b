"""`pippin doctor`: this machine's hardware, matrix speed, and whether results are correct.

It checks what `pippin serve` runs with the same options: the same environment, and the same steps.
Knows the MLX backend; asserts nothing about time. A check that fails makes the exit status 1.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from pippin import LLM, SamplingParams, __version__
from pippin.backends.host import num_threads
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.cpu.operations.library import OperationsReport, find_library
from pippin.backends.mlx.describe import describe
from pippin.backends.mlx.device import device_info, max_buffers, on_cpu
from pippin.backends.mlx.environment import TF32, prepare, products_are_exact
from pippin.backends.mlx.recurrent.gated_delta import gated_delta_chunked
from pippin.config import Config
from pippin.offline.offline_requests import Completion
from pippin.types import TokenLogprobs

LIBRARIES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "torch")
PRODUCT_SIZE = 1024
# Relative error of the fast recurrence: in float32, and with the ten bits of TF32.
TOLERANCE, TF32_TOLERANCE = 1e-5, 1e-2
PROMPTS = (
    "Once",
    "The fox and the crow met",
    "A little girl named Lily found a small red box under her bed. She",
    "Tom had a big dog. The dog liked to run and play in the park with " * 4,
)
REPLY_TOKENS = 24
ALTERNATIVES = 4
# How far apart, in log probability, two tokens may be whose order depends on the shape of a batch.
MARGINS = {mx.float32: 2e-3, mx.float16: 0.1, mx.bfloat16: 0.5}
TF32_MARGIN = MARGINS[mx.float16]  # the same ten bits


@dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` is None for information that is not checked."""

    name: str
    value: str
    ok: bool | None = None
    seconds: float | None = None


def run_doctor(config: Config, *, as_json: bool) -> int:
    """Print the findings; the exit status."""
    engine = config.engine
    prepare(deterministic=engine.deterministic, buffer_limit=engine.buffer_limit)
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
    yield "querying the device", _device
    yield "measuring a matrix product", _product
    yield "comparing the fast recurrence with the plain one", _recurrence
    yield "loading the model, comparing a batch with single requests", lambda: _model(config)


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
        f"{device.memory_bytes / 2**30:.1f} GiB; --memory auto uses {device.share:.0%} of it",
    )
    buffers = max_buffers()
    if buffers is not None:
        yield Finding("live buffers", f"at most {buffers:,} for prompts and the prefix cache")
    if not on_cpu():
        yield Finding("TF32", _tf32())
    blas = load_fast_blas()
    threads = f", {blas.threads} threads" if blas.threads else ""
    yield Finding("BLAS", f"{blas.name}{threads}" + (f" ({blas.reason})" if blas.reason else ""))
    if on_cpu():
        yield from _operations(find_library())


def _operations(found: OperationsReport) -> Iterator[Finding]:
    if found.path is None:
        yield Finding("operations", f"mlx's own: {found.reason}")
        return
    yield Finding("operations", f"Pippin's, in C++, with {num_threads()} threads")
    for name, why in found.left_out.items():
        yield Finding(
            f"operation {name}", f"mlx's own, because Pippin's does not work on this machine: {why}"
        )


def _tf32() -> str:
    """In these checks and in `pippin serve`."""
    value = os.environ.get(TF32)
    if value is None:
        return "on, the default of mlx, here and in pippin serve; --deterministic turns it off"
    return f"{'off' if products_are_exact() else 'on'}: {TF32}={value}, here and in pippin serve"


def _is_exact() -> bool:
    return on_cpu() or products_are_exact()


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
    most = TOLERANCE if _is_exact() else TF32_TOLERANCE
    yield Finding(
        "fast recurrence = plain", f"error {error:.0e}, limit {most:.0e}", ok=error < most
    )


def _relative_error(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())


def _model(config: Config) -> Iterator[Finding]:
    """One load, as a server would: in the model's own type, within the budget."""
    config = replace(config, engine=replace(config.engine, prefix_cache=False))
    with LLM(config=config) as llm:
        backend = llm.loop.backend
        room = llm.loop.scheduler.budget.capacity
        yield Finding(
            "budget",
            f"{_size(backend.memory_used())} used by the model, {_size(room)} for requests",
        )
        margin = 0.0
        if isinstance(backend, MLXBackend):
            margin = MARGINS[backend.loaded.dtype]
            if not _is_exact():
                margin = max(margin, TF32_MARGIN)
            for name, value in describe(backend.loaded):
                yield Finding(name, value)
            yield Finding("decode steps", _steps(config, compiled=backend.steps_are_compiled))
        yield _batch_equals_solo(llm, margin)


def _steps(config: Config, *, compiled: bool) -> str:
    if compiled:
        return "compiled, as in pippin serve"
    if config.engine.deterministic:
        return "not compiled: --deterministic"
    return "not compiled, as in pippin serve: mlx cannot be asked to compile without a C++ compiler"


def _batch_equals_solo(llm: LLM, margin: float) -> Finding:
    """Greedy replies are equal up to two tokens of nearly equal probability: rounding decides."""
    params = SamplingParams(
        max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True, logprobs=ALTERNATIVES
    )
    batch = llm.generate(PROMPTS, params)
    solo = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    same = [_num_same(a, b) for a, b in zip(batch, solo, strict=True)]
    leads = [
        _lead(a.logprobs[n], a.tokens[n], b.tokens[n])
        for a, b, n in zip(batch, solo, same, strict=True)
        if n < len(a.tokens) and a.logprobs
    ]
    said = f"{sum(same)} of {len(PROMPTS) * REPLY_TOKENS} greedy tokens are equal"
    if leads:
        said += (
            f"; {len(leads)} replies differ, first at tokens whose log probabilities differ by at "
            f"most {max(leads):.2g} (limit {margin:g})"
        )
    enough = 2 * sum(same) >= len(PROMPTS) * REPLY_TOKENS
    return Finding("batched = alone", said, ok=enough and max(leads, default=0.0) <= margin)


def _num_same(a: Completion, b: Completion) -> int:
    pairs = zip(a.tokens, b.tokens, strict=True)
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(a.tokens))


def _lead(scored: TokenLogprobs, first: int, second: int) -> float:
    """How far apart two tokens are; infinitely if one is not among the likeliest."""
    known = dict(zip(scored.top_ids, scored.top_logprobs, strict=True))
    return abs(known.get(first, math.inf) - known.get(second, -math.inf))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
