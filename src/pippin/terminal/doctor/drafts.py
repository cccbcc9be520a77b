"""What --speculate would gain here for one request at a time. Knows no backend.

With --save it is kept: by it `pippin serve` decides whether drafts are on by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import monotonic, strftime

from pippin import LLM, SamplingParams
from pippin.startup.drafts.measured_gain import LEAST_GAIN, Gain, keep_gain, served_by
from pippin.terminal.doctor.engine import MARGINS, Engine
from pippin.terminal.doctor.findings import SAFE, Finding, TimeLimit, checked

NAME, DEFAULT = "--speculate auto", "default of --speculate"
PROMPT = "A little girl named Lily found a small red box under her bed. She"
PARAMS = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
NUM_PAIRS = 3


def drafts(engine: Engine, limit: TimeLimit, *, saves: bool = False) -> Iterator[Finding]:
    """Greedy replies with drafts and without, in turn, by one engine."""
    if limit.left() <= 0.0:
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
        ok=same_reply,
        means="replies with drafts differ from those without",
        remedy=SAFE,
        numbers={"ratio": ratio},
    )
    if not engine.has_draft_model:  # which is on where it is given
        gain = Gain(served_by(engine.model), ratio, same_reply, strftime("%Y-%m-%d"))
        yield kept(gain) if saves else not_saved(gain)


def not_saved(gain: Gain) -> Finding:
    measured = "auto" if gain.pays else "off"
    return Finding(DEFAULT, f"not changed: by this it would be {measured}, with --save it is")


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
    (reply,) = llm.generate(PROMPT, replace(PARAMS, speculate=speculate))
    return monotonic() - started, list(reply.tokens)
