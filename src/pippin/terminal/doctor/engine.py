"""The engine that `pippin doctor` looks at, loaded as `pippin serve` loads it, and what it does."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import monotonic, perf_counter, strftime
from types import ModuleType
from typing import Any

from pippin import LLM, SamplingParams
from pippin.amounts import show_bytes
from pippin.backends.base import DeviceInfo
from pippin.backends.fallbacks import logger as fallbacks_log
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.offline.llm import Completion
from pippin.startup.resolve import LEAST_GAIN, Gain, keep_gain, served_by
from pippin.terminal.doctor import ISSUE, Finding, checked
from pippin.types import TokenLogprobs

ROWS, CONTEXTS = (1, 4, 16), (64, 512, 2048)
NUM_STEPS = 16


def steps(engine: Engine) -> Iterator[Finding]:
    """From the least work to the most; what would exceed the time limit is left out."""
    llm = engine.llm
    contexts = [n for n in CONTEXTS if n + 8 * NUM_STEPS < llm.max_len]
    rows = [n for n in ROWS if n <= llm.loop.scheduler.slots.num_slots]
    taken: dict[tuple[int, int], float | None] = {}
    per_token = 0.0
    for num_rows, context in sorted(itertools.product(rows, contexts), key=lambda c: c[0] * c[1]):
        if per_token * num_rows * context > engine.seconds_left / 2:  # half is for the last section
            break
        started = monotonic()
        taken[num_rows, context] = step_seconds(llm, num_rows, context)
        per_token = max(per_token, (monotonic() - started) / (num_rows * context + NUM_STEPS))
    for num_rows in rows:
        found = {context: taken.get((num_rows, context)) for context in contexts}
        yield Finding(
            f"{num_rows} row" + ("" if num_rows == 1 else "s"),
            ", ".join(f"{_shown(s)} at {context:,} tokens" for context, s in found.items()),
            numbers={str(context): 1e3 * s for context, s in found.items() if s is not None},
        )


def _shown(seconds: float | None) -> str:
    return "not timed" if seconds is None else f"{1e3 * seconds:.1f} ms"


def step_seconds(llm: LLM, num_rows: int, context: int) -> float | None:
    """The median of steps that decode all the rows and do nothing else; None if there were none."""
    first = llm.metrics.records[-1].step + 1 if llm.metrics.records else 0
    vocab_size = llm.loop.backend.spec.vocab_size
    prompts = [
        [1 + (row * 7919 + place * 31) % (vocab_size - 1) for place in range(context)]
        for row in range(num_rows)
    ]
    # Early rows decode while late ones are still read.
    num_tokens = NUM_STEPS + min(num_rows * context // 64, 6 * NUM_STEPS)
    llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    seconds = [
        after.device_done - before.device_done
        for before, after in itertools.pairwise(llm.metrics.records)
        if before.step >= first and not after.after_pause
        if all(r.prefill_tokens == 0 and r.decode_rows == num_rows for r in (before, after))
    ]
    return median(seconds) if seconds else None


ROUND_TRIPS = 50
CHAIN = 500  # operations, each of which needs the one before
PRODUCT_SIZE = 1024

Work = Callable[[], None]


def chain(x: Any) -> Any:
    for _ in range(CHAIN):
        x = x + 1
    return x


def launch_findings(
    one: Work, chained: Work, product: Work, error: Callable[[], float]
) -> Iterator[Finding]:
    """`one`: the smallest operation; `chained`: CHAIN of them; `product`: of two square matrices;
    `error`: its largest against numpy's."""
    for work in (one, chained, product):
        work()  # kernels are built, memory is there
    trip = median(_seconds(one) for _ in range(ROUND_TRIPS))
    yield Finding(
        "round trip", f"{1e6 * trip:,.0f} µs for one empty operation", numbers={"seconds": trip}
    )
    each = min(_seconds(chained) for _ in range(3)) / CHAIN
    yield Finding(
        "launches",
        f"{1 / each:,.0f} a second, {1e6 * each:.1f} µs each",
        numbers={"seconds": each, "per_second": 1 / each},
    )
    rate = 2 * PRODUCT_SIZE**3 / min(_seconds(product) for _ in range(3)) / 1e9
    yield Finding("float32 product", f"{rate:,.0f} GFLOP/s", numbers={"gflops": rate})
    off = error()
    yield checked(
        "product = numpy's",
        f"error {off:.0e}",
        {"error": off},
        ok=off < 0.5,
        means="a plain matrix product of the library is wrong: no result can be trusted",
        remedy="install the library again; if that does not help, report it to mlx or torch",
    )


def memory_finding(found: DeviceInfo) -> Finding:
    return Finding(
        "memory",
        f"{show_bytes(found.memory_bytes)}; --memory auto uses {found.share:.0%} of it",
        numbers={"memory_bytes": found.memory_bytes, "share": found.share},
    )


def type_finding(llm: LLM, dtype: str, *, on_cpu: bool) -> Finding:
    why = "CPUs compute it fastest" if on_cpu else "as the checkpoint is stored"
    return Finding("type", f"{dtype}: {why if llm.config.model.dtype == 'auto' else '--dtype'}")


def _seconds(work: Work) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


PROMPTS = (
    "Once",
    "The fox and the crow met",
    "A little girl named Lily found a small red box under her bed. She",
    "Tom had a big dog. The dog liked to run and play in the park with " * 4,
)
REPLY_TOKENS = 24
PARAMS = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True, logprobs=4)


def batch(engine: Engine) -> Iterator[Finding]:
    llm = engine.llm
    together = llm.generate(PROMPTS, PARAMS)
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
    means = "replies depend on which other requests run: results are wrong"
    yield compared("batched = alone", together, alone, engine.margin, means)


def plain(engine: Engine) -> Iterator[Finding]:
    """All that `pippin serve` would use of Pippin's own on this model, against --safe."""
    name = "as served = --safe"
    if engine.is_plain:
        yield Finding(name, "the same: plain operations already")
        return
    margin, usual = engine.margin, engine.llm.generate(PROMPTS, PARAMS)
    with engine.safe() as safe:
        expected = safe.generate(PROMPTS, PARAMS)
    means = "an operation or a kernel of Pippin's computes wrong results on this machine"
    yield compared(name, usual, expected, margin, means)


def compared(
    name: str,
    first: Sequence[Completion],
    second: Sequence[Completion],
    margin: float,
    means: str,
) -> Finding:
    same = [_num_same(a, b) for a, b in zip(first, second, strict=True)]
    leads = [
        _lead(a.logprobs[n], a.tokens[n], b.tokens[n])
        for a, b, n in zip(first, second, same, strict=True)
        if n < len(a.tokens) and a.logprobs
    ]
    moved = max(_moved(a, b, max(n, 1)) for a, b, n in zip(first, second, same, strict=True))
    total = len(PROMPTS) * REPLY_TOKENS
    value = f"{sum(same)} of {total} greedy tokens are equal, log probabilities within {moved:.1g}"
    if leads:
        value += (
            f"; {len(leads)} replies differ, first at tokens whose log probabilities differ by at "
            f"most {max(leads):.2g}"
        )
    is_level = max(leads, default=0.0) <= margin and moved <= max(margin, 1e-6)
    return checked(
        name,
        f"{value} (limit {margin:g})",
        {"equal_tokens": sum(same), "tokens": total, "logprob_difference": moved},
        ok=2 * sum(same) >= total and is_level,
        means=means,
    )


def _num_same(a: Completion, b: Completion) -> int:
    pairs = zip(a.tokens, b.tokens, strict=True)
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(a.tokens))


def _moved(a: Completion, b: Completion, num_tokens: int) -> float:
    """The largest difference of log probabilities among the first tokens."""
    pairs = zip((a.logprobs or [])[:num_tokens], (b.logprobs or [])[:num_tokens], strict=True)
    return max(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs)


def _lead(scored: TokenLogprobs, first: int, second: int) -> float:
    """How far apart two tokens are; infinitely if one is not among the likeliest."""
    known = dict(zip(scored.top_ids, scored.top_logprobs, strict=True))
    return abs(known.get(first, math.inf) - known.get(second, -math.inf))


NAME, DEFAULT = "--speculate auto", "default of --speculate"
PROMPT = "A little girl named Lily found a small red box under her bed. She"
DRAFT_PARAMS = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
NUM_PAIRS = 3


def drafts(engine: Engine, *, saves: bool = False) -> Iterator[Finding]:
    """Greedy replies with drafts and without, in turn, by one engine."""
    if engine.seconds_left <= 0.0:
        yield Finding(NAME, "not timed: no time was left")
        return
    with engine.drafting() as llm:
        if llm.loop.backend.max_depth == 0:
            yield Finding(NAME, "has no effect: this backend verifies no drafts for this model")
            return
        timed_reply(llm, speculate=True)  # what drafts are worth is learnt from them
        pairs = [
            (timed_reply(llm, speculate=False), timed_reply(llm, speculate=True))
            for _ in range(NUM_PAIRS)
        ]
        rounds = engine.margin > MARGINS["float32"]  # and then decides between nearly equal tokens
    ratio = median(plain[0] / drafted[0] for plain, drafted in pairs)
    by = "with the draft model, " if engine.has_draft_model else ""
    advice = "worth it for few requests" if ratio >= LEAST_GAIN else "not worth it here"
    same_reply = rounds or all(plain[1] == drafted[1] for plain, drafted in pairs)
    yield checked(
        NAME,
        f"{ratio:.2f} times as fast, {by}one request at a time, greedy: {advice}",
        {"ratio": ratio},
        ok=same_reply,
        means="replies with drafts differ from those without",
    )
    if not engine.has_draft_model:  # which is on where it is given
        gain = Gain(served_by(engine.model), ratio, same_reply, strftime("%Y-%m-%d"))
        measured = "auto" if gain.pays else "off"
        not_saved = f"not changed: by this it would be {measured}, with --save it is"
        yield kept(gain) if saves else Finding(DEFAULT, not_saved)


def kept(gain: Gain) -> Finding:
    """What `pippin serve` and `LLM` do from now on."""
    try:
        keep_gain(gain)
    except OSError as error:
        return Finding(
            DEFAULT,
            f"not kept: {error}",
            "warning",
            means="`pippin serve` does not know that drafts were measured here",
            remedy="make the directory writable and repeat this with --save, or give --speculate",
        )
    if gain.pays:
        return Finding(DEFAULT, "`pippin serve` uses --speculate auto for this model from now on")
    return Finding(DEFAULT, "off: `pippin serve` has no drafts of this model without --speculate")


def timed_reply(llm: LLM, *, speculate: bool) -> tuple[float, list[int]]:
    started = monotonic()
    (reply,) = llm.generate(PROMPT, replace(DRAFT_PARAMS, speculate=speculate))
    return monotonic() - started, list(reply.tokens)


# How far apart, in log probability, two tokens may be whose order depends on the shape of a batch.
MARGINS = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
TF32_MARGIN = MARGINS["float16"]  # the same ten bits


def library_of(config: Config) -> ModuleType | None:
    """What is looked at in a backend's own way."""
    match config.model.backend:
        case "mlx":
            from pippin.terminal.doctor import on_mlx

            return on_mlx
        case "torch":
            from pippin.terminal.doctor import on_torch

            return on_torch
    return None


class Engine:
    def __init__(self, config: Config, deadline: float = math.inf) -> None:
        """`deadline`: when, on time.monotonic(), no further times are measured."""
        engine = replace(config.engine, prefix_cache=False, cache_dir=None, disk=None)
        engine = replace(engine, host_cache=None, canary="off")
        self._config = replace(config, engine=engine)
        self._deadline = deadline
        self._llm: LLM | None = None

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.0)

    @property
    def is_loaded(self) -> bool:
        return self._llm is not None

    @property
    def llm(self) -> LLM:
        assert self._llm is not None, "`load` runs first"
        return self._llm

    def load(self) -> Iterator[Finding]:
        """One load, as a server would: in the model's own type, within the budget."""
        with _warnings() as warned:
            self._llm = LLM(config=self._config)
        backend = self._llm.loop.backend
        used, room = backend.memory_used(), self._llm.loop.scheduler.budget.capacity
        yield Finding(
            "budget",
            f"{show_bytes(used)} used by the model, {show_bytes(room)} for requests",
            numbers={"model_bytes": used, "request_bytes": room},
        )
        limits = self._llm.loop.scheduler.limits
        yield Finding(
            "running",
            f"{limits.max_running} requests at the same time ({limits.max_running_reason})",
            numbers={"max_running": limits.max_running},
        )
        for name, messages, does in (
            ("fallback", map(str, backend.fallbacks), "does the same"),
            ("load warned", warned, "does without it"),
        ):
            means = f"`pippin serve` {does}: replies are right and may be slower"
            for message in messages:
                yield Finding(name, message, "warning", means, ISSUE)

    def choices(self) -> Iterator[Finding]:
        if (library := library_of(self._config)) is not None:
            yield from library.choices(self.llm)

    def safe(self) -> LLM:
        """The same model with --safe."""
        return self._instead(
            replace(self._config.engine, safe=True, speculate="off", draft_model=None)
        )

    def drafting(self) -> LLM:
        return self._instead(replace(self._config.engine, speculate="auto"))

    @property
    def model(self) -> ModelConfig:
        """As it was resolved: what is loaded."""
        return self.llm.config.model

    @property
    def has_draft_model(self) -> bool:
        return self._config.engine.draft_model is not None

    def _instead(self, options: EngineConfig) -> LLM:
        """In place of the engine that was loaded: both may not fit."""
        if self._llm is not None:
            self._llm.close()
        self._llm = None
        gc.collect()
        self._llm = LLM(config=replace(self._config, engine=options))
        return self._llm

    @property
    def is_plain(self) -> bool:
        """Whether --safe would change nothing."""
        library = library_of(self._config)
        return library is not None and bool(library.is_plain(self.llm))

    @property
    def margin(self) -> float:
        """Of log probabilities that rounding may move."""
        if (library := library_of(self._config)) is None:
            return 0.0
        margin = MARGINS[library.dtype_of(self.llm)]
        return max(margin, TF32_MARGIN) if library.rounds_products(self.llm) else margin


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged inside: a kernel that is not used, a file that cannot be written."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name != fallbacks_log.name:  # the backend lists them
                found.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logger = logging.getLogger("pippin")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
