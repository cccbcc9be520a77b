"""The offline API on the toy model: any number of prompts, streams side by side, clear refusals."""

from __future__ import annotations

import io
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cases import cases
from pippin import LLM, SamplingParams
from pippin.backends.base import PendingStep, StepPlan, WarmUpShape
from pippin.backends.fake import FakeBackend
from pippin.backends.warm_up import WarmUp
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ContextOverflow, EngineDead, OutOfMemory, PippinError, RequestError
from pippin.messages import Submit
from pippin.offline import llm as llm_module
from pippin.offline.llm import progress_bar
from pippin.scheduler.loop import Loop
from shared import engine_beside

TOY = ModelConfig(backend="fake")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
CROW = [{"role": "user", "content": "What did the crow say?"}]


def make_llm(**engine: Any) -> LLM:
    return LLM(config=Config(model=TOY, engine=EngineConfig(**engine)))


def test_more_prompts_than_the_queue_holds_are_all_completed() -> None:
    prompts = [[n, n + 1, n + 2] for n in range(40)]
    with make_llm() as llm:
        expected = [llm.generate(prompt, GREEDY)[0].tokens for prompt in prompts]
    with make_llm(max_running=2, max_queue=3) as llm:
        assert [c.tokens for c in llm.generate(prompts, GREEDY)] == expected
        assert llm.metrics.requests_failed == 0
        assert llm.loop.idle


def test_those_with_a_higher_priority_start_first_however_many_wait() -> None:
    started: list[int] = []
    with make_llm(max_running=1, max_queue=1, prefix_cache=False) as llm:
        launch = llm.loop.backend.launch

        def note(plan: StepPlan) -> PendingStep:
            started.extend(int(row.tokens[0]) for row in plan.prefill)
            return launch(plan)

        llm.loop.backend.launch = note  # type: ignore[method-assign]
        prompts = [[n, 90] for n in range(6)]
        llm.generate(prompts, GREEDY, priority=[0, -1, 0, 5, 9, 5])
    assert started == [4, 3, 5, 0, 2, 1]


def test_prompts_go_first_where_nobody_reads_replies_as_they_come() -> None:
    """Streams are let go on beside prompts; a batch is done sooner if it decodes together."""
    prompts = [[n] * 300 for n in range(1, 7)]
    with make_llm(prefix_cache=False, prefill_tokens=512) as llm:
        llm.generate(prompts, GREEDY)
        steps = [record.prefill_tokens for record in llm.metrics.records]
    assert all(steps[:4])
    assert not any(steps[4:])  # 1,800 tokens: four steps, none of them wasted on few replies


def test_streams_run_side_by_side_and_each_says_what_it_says_alone() -> None:
    with make_llm() as llm:
        alone = ["".join(llm.stream_chat(chat, GREEDY)) for chat in (FOX, CROW)]
        streams = [llm.stream_chat(chat, GREEDY) for chat in (FOX, CROW)]
        together = ["", ""]
        for _ in range(3):
            for i, stream in enumerate(streams):
                together[i] += next(stream)
        for i, stream in enumerate(streams):
            together[i] += "".join(stream)
        assert together == alone
        assert llm.metrics.requests_aborted == 0
        assert llm.loop.idle


def test_closing_a_stream_stops_its_reply_and_no_other() -> None:
    long = replace(GREEDY, max_tokens=200)
    with make_llm() as llm:
        expected = "".join(llm.stream_chat(CROW, long))
        fox, crow = llm.stream_chat(FOX, long), llm.stream_chat(CROW, long)
        said = next(fox) and next(crow)
        fox.close()  # type: ignore[attr-defined]
        assert said + "".join(crow) == expected
        assert llm.metrics.requests_aborted == 1
        assert llm.loop.idle
        only = llm.stream_chat(FOX, long)
        next(only)
        only.close()  # type: ignore[attr-defined]
        assert llm.loop.idle
        assert llm.loop.scheduler.slots.num_free == llm.loop.scheduler.slots.num_slots


def test_a_stop_string_is_one_string_and_finishes_the_reply() -> None:
    with make_llm() as llm:
        whole = llm.generate([5, 6, 7], GREEDY)[0].text
        stop = whole[4:7]
        params = replace(GREEDY, stop=stop)  # type: ignore[arg-type]
        (completion,) = llm.generate([5, 6, 7], params)
        assert (completion.text, completion.finish_reason) == (whole[: whole.index(stop)], "stop")
        told = "".join(llm.stream_chat(FOX, GREEDY))
        params = replace(GREEDY, stop=(told[4:7],))
        assert "".join(llm.stream_chat(FOX, params)) == told[: told.index(told[4:7])]
        assert llm.metrics.requests_aborted == 0
        assert llm.loop.idle


def test_a_stop_token_is_among_the_tokens_but_not_in_the_text() -> None:
    with make_llm() as llm:
        (whole,) = llm.generate([5, 6, 7], replace(GREEDY, logprobs=2))
        assert whole.logprobs is not None
        assert len(whole.logprobs) == len(whole.tokens) == 12
        stop = whole.tokens[4]
        end = whole.tokens.index(stop) + 1
        (cut,) = llm.generate([5, 6, 7], replace(GREEDY, logprobs=2, stop_token_ids=(stop,)))
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[:end], "stop")
        assert cut.logprobs == whole.logprobs[:end]
        assert cut.text == llm.text.tokenizer.decode(whole.tokens[: end - 1])


def test_choices_of_a_prompt_differ_and_repeat() -> None:
    params = SamplingParams(max_tokens=8, seed=7, n=3, ignore_eos=True)
    with make_llm() as llm:
        first, again = (llm.generate([[1, 2], [3, 4]], params) for _ in range(2))
        assert [c.tokens for c in first] == [c.tokens for c in again]
        assert [c.prompt_tokens for c in first] == [[1, 2]] * 3 + [[3, 4]] * 3
        assert len({tuple(c.tokens) for c in first}) == 6
        (third,) = llm.generate([1, 2], replace(params, n=1, seed=9))
        assert third.tokens == first[2].tokens


def test_a_prompt_can_be_scored_without_a_reply() -> None:
    with make_llm() as llm:
        (scored,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert scored.prompt_logprobs is not None
        assert len(scored.prompt_logprobs) == 2
        assert (scored.tokens, scored.text, scored.finish_reason) == ([], "", "length")


@cases(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("min_tokens", 13, "from 0 to 12"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", float("nan"), "from 0 to 2"),
        ("temperature", "hot", "a number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", float("inf"), "above 0"),
        ("presence_penalty", 3.0, "from -2 to 2"),
        ("frequency_penalty", -3.0, "from -2 to 2"),
        ("logit_bias", {97: 1.0}, "token ids from 0 to 96"),
        ("seed", 2**64, "an integer"),
        ("n", 0, "from 1 to 128"),
        ("stop", ("",), "each of 1 to 1,024"),
        ("stop", 3, "a string or a list"),
        ("stop_token_ids", (97,), "token ids from 0 to 96"),
        ("ignore_eos", 1, "true or false"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", -1, "from 0 to 20"),
    ],
)
def test_parameters_keep_the_rules_of_the_api(field: str, value: Any, allowed: str) -> None:
    with make_llm() as llm, pytest.raises(RequestError, match=f"{field}.*{allowed}") as info:
        llm.generate("Once", [replace(GREEDY, **{field: value})])
    assert info.value.param == field


def test_numbers_may_be_numpys() -> None:
    given = replace(GREEDY, temperature=np.float32(0.5), max_tokens=np.int64(3), seed=1)  # type: ignore[arg-type]
    with make_llm() as llm:
        (completion,) = llm.generate([np.array([1, 2, 3])], given)  # type: ignore[list-item]
        assert len(completion.tokens) == 3


def test_what_cannot_be_parameters_is_named() -> None:
    with make_llm() as llm:
        with pytest.raises(RequestError, match="params"):
            llm.generate("Once", replace(GREEDY, temperature=object()))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="params has 2 values for 1 prompts"):
            llm.generate(["Once"], [GREEDY, GREEDY])
        with pytest.raises(RequestError, match="a stream is one reply"):
            next(llm.stream_chat(FOX, replace(GREEDY, n=2)))


def test_each_prompt_is_submitted_with_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm() as llm:
        seen: list[int] = []
        submit = llm.loop.submit

        def note(given: Submit) -> None:
            seen.append(given.priority)
            submit(given)

        monkeypatch.setattr(llm.loop, "submit", note)
        llm.generate([[1, 2], [3, 4]], GREEDY, priority=[5, -5])
        llm.chat([FOX, CROW], replace(GREEDY, n=2), priority=7)
        assert "".join(llm.stream_chat(FOX, GREEDY, priority=np.int64(9)))  # type: ignore[arg-type]
        assert seen == [5, -5, 7, 7, 7, 7, 9]
        llm.generate("Once", GREEDY)
        assert seen[-1] == 0
        for priority in (1001, 0.5):
            with pytest.raises(RequestError, match=r"priority is .*from -1,000 to 1,000") as info:
                llm.generate("Once", GREEDY, priority=priority)  # type: ignore[arg-type]
            assert info.value.param == "priority"
        with pytest.raises(RequestError, match="priority has 1 values for 2 prompts"):
            llm.generate(["Once", "Twice"], GREEDY, priority=[1])


def test_calls_with_different_salts_share_no_prefix() -> None:
    prompt = [token % 97 for token in range(199)]
    with make_llm() as llm:
        (first,) = llm.generate([prompt], GREEDY, cache_salt="mine")
        for salt, cached in (("yours", 0), (None, 0), ("mine", 199)):
            (reply,) = llm.generate([prompt], GREEDY, cache_salt=salt)
            assert (reply.tokens, reply.cached_tokens) == (first.tokens, cached)
        assert "".join(llm.stream_generate(prompt, GREEDY, cache_salt="mine")) == first.text
        llm.embed([prompt], cache_salt="mine")
        for salt in ("", "x" * 1_025, 7):
            with pytest.raises(RequestError, match="cache_salt"):
                llm.chat(FOX, GREEDY, cache_salt=salt)  # type: ignore[arg-type]


def test_prompts_that_the_model_cannot_read_are_refused() -> None:
    with make_llm() as llm:
        with pytest.raises(RequestError, match="token ids from 0 to 96"):
            llm.generate([5, 97], GREEDY)
        with pytest.raises(ContextOverflow, match="maximum context length is 8192 tokens"):
            llm.generate([5] * 8192, GREEDY)
        (last,) = llm.generate([5] * 8190, GREEDY)
        assert (len(last.tokens), last.finish_reason) == (2, "length")


def test_a_request_that_fails_raises_its_own_error_and_leaves_others_alone() -> None:
    with make_llm(memory="256KB", prefix_cache=False) as llm:
        expected = "".join(llm.stream_chat(FOX, GREEDY))
        (solo,) = llm.generate([5, 6, 7], GREEDY)
        stream = llm.stream_chat(FOX, GREEDY)
        said = next(stream)
        assert llm.generate([5, 6, 7], GREEDY)[0].tokens == solo.tokens
        with pytest.raises(OutOfMemory, match="the budget holds"):
            llm.generate([[1, 2], [5] * 8000, [3, 4]], GREEDY)
        assert said + "".join(stream) == expected
        assert llm.loop.idle
        assert len(llm.generate([[1, 2], [3, 4]], GREEDY)) == 2


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """As in a terminal: a job in the background of a shell is started to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_is_heard_after_the_step_and_the_model_can_go_on() -> None:
    with make_llm() as llm:
        expected = llm.generate([5, 6, 7], GREEDY)[0].tokens
        launch = llm.loop.backend.launch

        def interrupted(plan: StepPlan) -> PendingStep:
            signal.raise_signal(signal.SIGINT)
            return launch(plan)

        llm.loop.backend.launch = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(llm.stream_chat(FOX, GREEDY))
        llm.loop.backend.launch = launch  # type: ignore[method-assign]
        assert llm.generate([5, 6, 7], GREEDY)[0].tokens == expected
        assert llm.loop.idle


def test_a_device_that_is_gone_is_said_at_once() -> None:
    with make_llm() as llm:
        llm.loop.failure = PippinError("the device failed 5 steps in a row")
        for ask in (lambda: llm.generate([5, 6], GREEDY), lambda: next(llm.stream_chat(FOX))):
            with pytest.raises(PippinError, match="5 steps in a row"):
                ask()


@pytest.mark.usefixtures("hears_interrupts")
def test_a_second_interrupt_is_heard_in_the_middle_of_a_step() -> None:
    with make_llm() as llm:

        def never_ends(plan: StepPlan) -> PendingStep:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one was held back")

        llm.loop.backend.launch = never_ends  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5, 6, 7], GREEDY)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_model_says_so() -> None:
    with make_llm() as llm:
        open_stream, other = llm.stream_chat(FOX, GREEDY), llm.stream_chat(CROW, GREEDY)
        assert next(open_stream)
        assert next(other)
    open_stream.close()  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="closed"):
        list(other)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([5, 6, 7], GREEDY)


def test_after_a_bug_in_a_step_nothing_pretends_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm() as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.loop.scheduler, "plan", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([5, 6, 7], GREEDY)
        with pytest.raises(EngineDead, match="in the middle of a step"):
            llm.generate([5, 6, 7], GREEDY)


def test_what_cannot_be_warmed_up_later_is_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs nothing is captured while requests run, and here no request leaves it the time."""
    build = llm_module.build_loop

    def build_captured(*args: Any, **options: Any) -> Loop:
        loop = build(*args, **options)
        backend = loop.backend
        assert isinstance(backend, FakeBackend)
        backend.shapes_to_warm_up, backend.warm_up_seconds = [WarmUpShape(1, 16)], math.inf
        loop.warm_up = WarmUp(backend, lambda _: True)
        return loop

    monkeypatch.setattr(llm_module, "build_loop", build_captured)
    with make_llm() as llm:
        assert llm.loop.warm_up.done
        other = engine_beside(llm, prefix_cache=False)
        assert other.loop.warm_up.done
        assert other.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].tokens


def drawn(*, shown: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100)
    with progress_bar(3, shown=shown, console=console) as advance:
        for _ in range(2):
            advance(700, False)
            advance(1, True)
    return out.getvalue()


def test_it_counts_prompts_that_are_done_and_tokens() -> None:
    assert "2/3" in drawn(shown=True)
    assert "1,402 tokens" in drawn(shown=True)


def test_nothing_is_shown_unless_it_is_asked_for() -> None:
    assert drawn(shown=False) == ""
