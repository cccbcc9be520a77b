"""Lines that agents write for their vendor alone: removed, and all else is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from qwen35_server import MODEL, TEXT

from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.dialects.messages.message_request import parse_message_request
from pippin.api.model_info import RequestRules
from pippin.config import LimitsConfig

RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())
KEPT = replace(RULES, normalises_prompts=False)
USER = {"role": "user", "content": "x-anthropic-billing-header: <total_tokens>1</total_tokens>"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"
LEFT = "<total_tokens>{} tokens left</total_tokens>"


def messages_of(rules: RequestRules, *texts: str, more: tuple[Any, ...] = ()) -> list[Any]:
    """As Claude Code sends them: a block each."""
    system = [{"type": "text", "text": text} for text in texts]
    body = {"model": MODEL.name, "max_tokens": 9, "messages": [USER, *more], "system": system}
    return parse_message_request(body, rules).messages


def chat_of(rules: RequestRules, *texts: str, more: tuple[Any, ...] = ()) -> list[Any]:
    """As a proxy in between translates them."""
    system = {"role": "system", "content": "\n".join(texts)}
    return parse_chat({"model": MODEL.name, "messages": [system, USER, *more]}, rules).messages


DIALECTS = pytest.mark.parametrize("parse", [messages_of, chat_of])


@DIALECTS
def test_turns_that_differ_in_such_lines_alone_are_one_prompt(parse: Any) -> None:
    one, other = (
        parse(RULES, BILLING.format(n, n), f"Be brief.\n{LEFT.format(n)}\nUse tools.")
        for n in (17, 200_000)
    )
    assert one == other == [{"role": "system", "content": "Be brief.\nUse tools."}, USER]


@DIALECTS
def test_the_words_of_users_and_tools_are_left_alone(parse: Any) -> None:
    assert parse(RULES, "Be brief.")[-1] == USER
    (system, _) = parse(RULES, "Read x-anthropic-billing-header: as a header.\n<total_tokens>")
    assert "billing-header: as a header.\n<total_tokens>" in system["content"]


@DIALECTS
def test_a_system_message_of_nothing_else_is_left_out(parse: Any) -> None:
    reminder = {"role": "system", "content": LEFT.format(5)}
    assert parse(RULES, BILLING.format(1, 2), more=(reminder,)) == [USER]


@DIALECTS
def test_a_server_may_keep_them(parse: Any) -> None:
    lines = (BILLING.format(1, 2), LEFT.format(5))
    assert parse(KEPT, *lines)[0]["content"] == "\n".join(lines)


# The end of Claude Code's system prompt, in short, and what it sends before the first reply.
GIT = (
    "gitStatus: This is the git status at the start of the conversation. Note that this status is "
    "a snapshot in time, and will not update during the conversation.\n\nStatus:\n{}\n\n"
    "Recent commits:\n"
)
AGENTS = {"role": "system", "content": "Available agent types for the Agent tool:\n- claude"}
REPLY = {"role": "assistant", "content": "It is done."}
AGAIN = {"role": "user", "content": "Again."}


def prompt_of(messages: list[Any]) -> str:
    assert TEXT.chat is not None
    return TEXT.chat.render(messages)


@DIALECTS
def test_a_resumed_conversation_parts_from_itself_behind_all_that_is_the_same(parse: Any) -> None:
    one, other = (
        prompt_of(parse(RULES, f"Be brief.\n\n{GIT.format(files)}", more=(AGENTS, REPLY, AGAIN)))
        for files in ("(clean)", "?? note")
    )
    shared = one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]
    assert "Be brief." in shared
    assert AGENTS["content"] in shared
    assert USER["content"] in shared
    assert one.count("gitStatus") == 1
    assert other.index("?? note") < other.index(REPLY["content"])


@DIALECTS
def test_a_snapshot_is_a_reminder_that_stays_where_it_is(parse: Any) -> None:
    lines = ("Be brief.", "", GIT.format("?? note"))
    first = parse(RULES, *lines)
    later = parse(RULES, *lines, more=(REPLY, AGAIN))
    assert later[: len(first)] == first
    reminder = f"<system-reminder>\n{GIT.format('?? note').strip()}\n</system-reminder>"
    assert first == [
        {"role": "system", "content": "Be brief."},
        {**USER, "content": f"{USER['content']}\n\n{reminder}"},
    ]


@DIALECTS
def test_a_snapshot_stays_in_the_system_prompt_of_a_server_that_keeps_prompts(parse: Any) -> None:
    text = f"Be brief.\n\n{GIT.format('?? note')}"
    assert parse(KEPT, text) == [{"role": "system", "content": text}, USER]


@DIALECTS
def test_words_about_a_snapshot_are_left_alone(parse: Any) -> None:
    text = "Explain gitStatus: This is the git status at the start of the conversation."
    assert parse(RULES, text) == [{"role": "system", "content": text}, USER]
