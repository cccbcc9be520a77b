"""Lines that agents write for their vendor alone: removed, and all else is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from qwen35_server import MODEL, TEXT

from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.dialects.messages import parse_message_request
from pippin.api.model_info import RequestRules, SnapshotHistory
from pippin.config import LimitsConfig

RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())
KEPT = replace(RULES, normalises_prompts=False)
USER = {"role": "user", "content": "x-anthropic-billing-header: <total_tokens>1</total_tokens>"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"
LEFT = "<total_tokens>{} tokens left</total_tokens>"


def fresh() -> RequestRules:
    """Of a server that has seen no conversation."""
    return replace(RULES, snapshots=SnapshotHistory())


def messages_of(
    rules: RequestRules, *texts: str, more: tuple[Any, ...] = (), **fields: Any
) -> list[Any]:
    """As Claude Code sends them: a block each."""
    system = [{"type": "text", "text": text} for text in texts]
    body = {"model": MODEL.name, "max_tokens": 9, "messages": [USER, *more], "system": system}
    return parse_message_request({**body, **fields}, rules).messages


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
        prompt_of(parse(fresh(), f"Be brief.\n\n{GIT.format(files)}", more=(AGENTS, REPLY, AGAIN)))
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
    rules = fresh()
    first = parse(rules, *lines)
    later = parse(rules, *lines, more=(REPLY, AGAIN))
    assert later[: len(first)] == first
    reminder = f"<system-reminder>\n{GIT.format('?? note').strip()}\n</system-reminder>"
    assert first == [
        {"role": "system", "content": "Be brief."},
        {**USER, "content": f"{USER['content']}\n\n{reminder}"},
    ]


def resumed(parse: Any, rules: RequestRules, snapshot: str, *more: Any, **fields: Any) -> list[Any]:
    return parse(rules, f"Be brief.\n\n{GIT.format(snapshot)}", more=more, **fields)


def texts_of(messages: list[Any], *words: str) -> list[list[str]]:
    """The words that each user's message has, of these."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    return [[word for word in words if word in text] for text in users]


NEVER = {"role": "assistant", "content": "Never."}


@DIALECTS
def test_snapshots_of_a_conversation_stay_with_the_questions_that_brought_them(parse: Any) -> None:
    rules, turns = fresh(), [AGENTS]
    before: list[Any] = []
    for turn in range(20):
        status = f"?? note-{turn // 2}."
        messages = resumed(parse, rules, status, *turns)
        assert messages[: len(before)] == before, turn
        before = messages
        calls = [{"role": "assistant", "content": f"Reply {turn}."}]
        assert resumed(parse, rules, status, *turns, *calls)[: len(before)] == before
        turns += [*calls, AGAIN]
    shown = texts_of(before, *(f"?? note-{n}." for n in range(10)))
    assert shown == [[f"?? note-{n // 2}."] if n % 2 == 0 else [] for n in range(20)]


@DIALECTS
def test_another_conversation_with_the_same_first_words_has_its_own_snapshot(parse: Any) -> None:
    rules = fresh()
    for status in ("?? one", "?? other"):
        assert texts_of(resumed(parse, rules, status), "?? one", "?? other") == [[status]]
    # Both go on, and each is known by its own snapshot; a third could be a resumed one of either.
    for reply, status in ((REPLY, "?? one"), (NEVER, "?? other"), (REPLY, "?? third")):
        messages = resumed(parse, rules, status, reply, AGAIN)
        assert texts_of(messages, "?? one", "?? other", "?? third") == [[status], []]


def test_no_owner_and_no_salt_is_shown_the_snapshot_of_another() -> None:
    rules = fresh()
    resumed(messages_of, rules, "?? secret")
    for each, fields in (
        (replace(rules, owner=b"other"), {}),
        (rules, {"cache_salt": "other"}),
    ):
        messages = resumed(messages_of, each, "?? mine", REPLY, AGAIN, **fields)
        assert texts_of(messages, "?? secret", "?? mine") == [["?? mine"], []]
    messages = resumed(messages_of, rules, "?? mine", REPLY, AGAIN)
    assert texts_of(messages, "?? secret", "?? mine") == [["?? secret"], ["?? mine"]]


def test_old_snapshots_are_left_out_when_a_conversation_has_too_many() -> None:
    rules, turns = fresh(), list[Any]()
    for turn in range(8):
        messages = resumed(messages_of, rules, f"?? note-{turn}." + "x" * 1_500, *turns)
        turns += [REPLY, AGAIN]
    assert [bool(words) for words in texts_of(messages, "?? note-")] == [*[False] * 4, *[True] * 4]
    assert sum(map(len, (str(message) for message in messages))) < 10_000


def test_few_conversations_are_known_at_a_time() -> None:
    history = SnapshotHistory(max_questions=2)
    for name in (b"a", b"b", b"c"):
        history.place([name], "?? old")
    assert len(history) == 2
    assert history.place([b"a", b"a2"], "?? new") == ((0, "?? new"),)
    assert history.place([b"c", b"c2"], "?? new") == ((0, "?? old"), (1, "?? new"))
    huge = "x" * 10_000
    assert history.place([b"d"], huge) == ((0, huge),)
    assert history.place([b"d", b"d2"], "?? new") == ((0, "?? new"),)


@DIALECTS
def test_a_snapshot_stays_in_the_system_prompt_of_a_server_that_keeps_prompts(parse: Any) -> None:
    text = f"Be brief.\n\n{GIT.format('?? note')}"
    assert parse(KEPT, text) == [{"role": "system", "content": text}, USER]


@DIALECTS
def test_words_about_a_snapshot_are_left_alone(parse: Any) -> None:
    text = "Explain gitStatus: This is the git status at the start of the conversation."
    assert parse(RULES, text) == [{"role": "system", "content": text}, USER]
