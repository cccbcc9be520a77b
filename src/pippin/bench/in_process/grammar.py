"""`pippin bench grammar`: what constrained replies cost, and what forced tokens save.

One loaded model in one process. Free and constrained streams run in turn, and so does a reply of
which most is forced, with chunks and one token at a time. Knows only the offline API.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pippin import LLM, SamplingParams
from pippin.bench.errors import BenchError
from pippin.bench.in_process.steps import prompts_for
from pippin.bench.results.pairs import Compared, Pairs, in_turn, pairs_table
from pippin.bench.results.report import Report, busy_note, say
from pippin.config import Config

PROMPT_TOKENS = 24
LOWEST_SHARE = 0.97  # of the throughput of free streams, with half of them constrained
LOWEST_GAIN = 1.2
# A reply that never ends, and of which next to nothing is forced: every step makes every mask.
ENDLESS = {"type": "string", "minLength": 1_000_000}
ANSWERS = {"enum": ["yes", "no", "maybe"]}
QUESTIONS = (
    *("is_the_customer_satisfied", "has_the_order_been_delivered", "was_the_invoice_correct"),
    *("is_a_refund_requested", "should_support_follow_up", "would_they_recommend_us"),
)
# A form: the model answers, all else is forced.
FORM = {
    "type": "object",
    "properties": dict.fromkeys(QUESTIONS, ANSWERS),
    "required": list(QUESTIONS),
    "additionalProperties": False,
}


@dataclass(frozen=True)
class GrammarOutcome:
    num_streams: int
    num_tokens: int
    constrained: Pairs  # tokens a second, half of the streams constrained over none
    forced: Pairs  # forms a second, forced tokens in chunks over one by one
    form_tokens: int
    forced_tokens: int  # of these


def grammar(config: Config, *, num_streams: int, num_tokens: int, num_pairs: int) -> Report:
    if not config.engine.forced_chunks:
        raise BenchError("forced chunks are measured with and without: remove --no-forced-chunks")
    if num_streams < 2:
        raise BenchError(f"streams must be at least 2, got {num_streams}")
    notes = busy_note()
    with LLM(config=config) as llm:
        constrained = _constrained(llm, num_streams, num_tokens, num_pairs)
        forced, form_tokens, forced_tokens = _forms(llm, num_pairs)
    outcome = GrammarOutcome(
        num_streams, num_tokens, constrained, forced, form_tokens, forced_tokens
    )
    return summarize(outcome, notes)


def _constrained(llm: LLM, num_streams: int, num_tokens: int, num_pairs: int) -> Pairs:
    free = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    half = [free if number % 2 else replace(free, json_schema=ENDLESS) for number in
            range(num_streams)]  # fmt: skip

    def turn(params: Sequence[SamplingParams], name: str) -> float:
        texts = prompts_for(llm, f"grammar {name}")
        prompts = [texts.text(PROMPT_TOKENS) for _ in range(num_streams)]
        return num_streams * num_tokens / _seconds(llm, prompts, params)

    say(f"{num_streams} streams, half of them constrained and none")
    return Pairs(
        *in_turn(
            num_pairs, lambda name: turn(half, name), lambda name: turn([free] * num_streams, name)
        )
    )


def _forms(llm: LLM, num_pairs: int) -> tuple[Pairs, int, int]:
    params = SamplingParams(max_tokens=512, temperature=0.0, json_schema=FORM)
    at_once, one_by_one = llm.beside(), llm.beside(forced_chunks=False)

    def turn(engine: LLM, name: str) -> float:
        text = prompts_for(llm, f"form {name}").text(PROMPT_TOKENS)
        return 1 / _seconds(engine, [text], [params])

    say("a form, forced tokens in chunks and one by one")
    pairs = Pairs(
        *in_turn(num_pairs, lambda name: turn(at_once, name), lambda name: turn(one_by_one, name))
    )
    forms = at_once.metrics.requests_finished
    metrics = at_once.metrics
    return pairs, metrics.generated_tokens // forms, metrics.forced_tokens // forms


def _seconds(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def summarize(outcome: GrammarOutcome, notes: list[str]) -> Report:
    title = (
        f"{outcome.num_streams // 2} of {outcome.num_streams} streams constrained against none; "
        f"forms of {outcome.form_tokens} tokens, {outcome.forced_tokens} of them forced, in chunks "
        "against one by one"
    )
    rows = [
        Compared("all streams, tok/s", outcome.constrained, at_least=LOWEST_SHARE),
        Compared("forms a second, alone", outcome.forced, at_least=LOWEST_GAIN),
    ]
    data = {
        **asdict(outcome),
        "constrained": outcome.constrained.as_dict(),
        "forced": outcome.forced.as_dict(),
    }
    return Report("grammar", [pairs_table(title, "tried", "base", rows)], data, notes)
