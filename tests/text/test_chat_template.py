"""Chat templates against transformers, on the bundled template and on Qwen3.5's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bundled import BUNDLED_PATH
from cases import cases
from pippin.errors import LoadError, RequestError
from pippin.text import chat_template
from pippin.text.bundle import TextBundle
from pippin.text.chat_template import ChatTemplate
from qwen35 import FIXTURE, load_qwen35, unpack

SYSTEM = {"role": "system", "content": "You tell stories. <b>&amp;</b>"}
USER = {"role": "user", "content": "  Tell me about a 😀 dog.  "}
ASSISTANT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOnce upon a time."}
MORE = {"role": "user", "content": "What happened next?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": [1, "ü"]}}}],
}
RESULT = {"role": "tool", "content": "42"}
CHATS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, MORE],
    [SYSTEM, USER, ASSISTANT, MORE],
    [SYSTEM, USER, CALL, RESULT],
    [SYSTEM, USER, CALL, RESULT, ASSISTANT, MORE],
]


@pytest.fixture(scope="module", params=["bundled", "qwen3.5"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bundled":
        return BUNDLED_PATH
    return unpack(tmp_path_factory.mktemp("qwen"))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Ümlaut <b>",
            "parameters": {"type": "object", "properties": {"é": {"type": "array"}}},
        },
    }
]


@pytest.fixture(scope="module")
def text(model_dir: Path) -> TextBundle:
    return TextBundle.load(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    tokenizer.chat_template = (model_dir / "chat_template.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_tokens_equal_those_of_transformers(
    text: TextBundle, reference: Any, chat: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    assert text.chat is not None
    ours = text.chat.encode(text.tokenizer, chat, variables=variables)
    theirs = reference.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, **variables
    )
    assert ours.tokens == theirs
    assert ours.text == reference.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **variables
    )


@pytest.mark.parametrize("chat", CHATS)
def test_tools_are_rendered_as_transformers_does(
    text: TextBundle, reference: Any, chat: list[dict[str, Any]]
) -> None:
    assert text.chat is not None
    theirs = reference.apply_chat_template(
        chat, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert text.chat.render(chat, tools=TOOLS) == theirs


@pytest.mark.parametrize("chat", CHATS)
def test_each_turn_ends_at_a_boundary(text: TextBundle, chat: list[dict[str, Any]]) -> None:
    assert text.chat is not None
    rendered = text.chat.encode(text.tokenizer, chat)
    [im_start, *_] = text.tokenizer.encode("<|im_start|>")
    starts = [i for i, token in enumerate(rendered.tokens) if token == im_start]
    assert rendered.boundaries == starts[1:]  # where one ends the next one starts


def test_a_shared_system_prompt_ends_at_a_shared_boundary(text: TextBundle) -> None:
    assert text.chat is not None
    one, other = (text.chat.encode(text.tokenizer, [SYSTEM, m]) for m in (USER, MORE))
    end = one.boundaries[0]
    assert end == other.boundaries[0]
    assert one.tokens[:end] == other.tokens[:end]


def test_long_chats_have_a_bounded_number_of_boundaries(text: TextBundle) -> None:
    assert text.chat is not None
    rendered = text.chat.encode(text.tokenizer, [SYSTEM] + [USER, ASSISTANT] * 30 + [MORE])
    assert len(rendered.boundaries) == 10


def test_a_template_that_refuses_the_messages_says_so() -> None:
    template = ChatTemplate((FIXTURE / "chat_template.jinja").read_text())
    with pytest.raises(RequestError, match="No user query found"):
        template.render([SYSTEM])
    with pytest.raises(RequestError, match="Unexpected message role"):
        template.render([USER, {"role": "narrator", "content": ""}])


def test_a_template_that_trips_over_the_messages_is_the_requests_fault() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="chat template"):
        template.render([USER])


def test_a_template_cannot_reach_into_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="unsafe"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
    ],
)
def test_a_template_that_goes_on_and_on_is_stopped(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"ran for more than 0\.05 s"):
        ChatTemplate(source).render([USER])


TOO_LONG, TOO_MANY = "value of more than 10,000 characters", "list of more than 1,000,000 items"
# 2 ** 30 lists, in 30 that hold each other
SHARED = (
    "{% set ns = namespace(x=[]) %}"
    "{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}",
            "makes more than 10,000",
        ),
        ("{% for i in range(9999) %}{{ messages }}{% endfor %}", "makes more than 10,000"),
        ("{{ 'a' * 10001 }}", TOO_LONG),
        ("{{ 10001 * 'a' }}", TOO_LONG),
        ("{{ [1] * 2000000 }}", TOO_MANY),
        ("{{ 9 ** 99999 }}", "number"),
        ("{{ ((9 ** 9999) * (9 ** 9999)) * (9 ** 9999) }}", "number"),
        ("{{ '%99999999d' % 1 }}", "formats something"),
        ("{{ '%*d' % (99999999, 1) }}", "formats something"),
        ("{{ '%99999999d' | format(1) }}", "formats something"),
        ("{{ '{:>99999999}'.format('a') }}", "formats something"),
        ("{{ '{:{}}'.format('a', 99999999) }}", "formats something"),
        ("{{ ('%s' * 99) % ((big,) * 99) }}", TOO_LONG),
        ("{{ ('{0}' * 99).format(big) }}", TOO_LONG),
        ("{{ big + big + big }}", TOO_LONG),
        ("{{ big ~ big ~ big }}", TOO_LONG),
        ("{{ '' ~ (big ~ (big ~ big)) }}", TOO_LONG),
        (
            "{% set ns = namespace(x=[1]) %}"
            "{% for i in range(30) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            TOO_LONG,
        ),
        ("{{ 'a' | center(9999) }}", "width"),
        ("{{ 'a'.ljust(width=9999) if false else 'a'.ljust(9999) }}", "width"),
        ("{{ ['a'] | map('center', 9999) | list }}", "width"),
        ("{{ ('a\n' * 4000) | indent(60) }}", TOO_LONG),
        ("{{ big | replace('a', 'b' * 99) }}", TOO_LONG),
        ("{{ big.replace('a', 'b' * 99) }}", TOO_LONG),
        ("{{ big | replace('', 'b' * 99) }}", TOO_LONG),
        ("{{ big.translate({97: big}) }}", TOO_LONG),
        ("{{ ([big] * 3) | join }}", TOO_LONG),
        ("{{ range(99) | join('b' * 999) }}", TOO_LONG),
        ("{{ ('b' * 999).join(['a'] * 99) }}", TOO_LONG),
        ("{{ 'abc' | batch(99999999, 'x') | list | length }}", "width"),
        ("{{ messages | tojson(indent=99999999) }}", "width"),
        (SHARED + "{{ ns.x }}", TOO_LONG),
        (SHARED + "{{ ns }}", TOO_LONG),
        (SHARED + "{{ ns.x | string }}", TOO_LONG),
        (SHARED + "{{ ns.x | tojson }}", TOO_LONG),
        (SHARED + "{{ ns.x ~ '' }}", TOO_LONG),
        (SHARED + "{{ '%s' % ns.x }}", TOO_LONG),
        ("{% set x %}{% for i in range(9) %}{{ big }}{% endfor %}{% endset %}", TOO_LONG),
        ("{% macro f() %}{{ big }}{{ big }}{{ big }}{% endmacro %}{{ f() }}", TOO_LONG),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
            "{% set ns.x = ns.x + [big ~ i] %}{% endfor %}",
            "characters in all",
        ),
        ("{{ lipsum(n=99999) }}", "undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_makes_too_much_is_stopped(
    monkeypatch: pytest.MonkeyPatch, source: str, match: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 10_000)
    with pytest.raises(RequestError, match=match):
        ChatTemplate(source).render([USER], variables={"big": "a" * 4_000})


def test_what_honest_templates_do_with_numbers_and_loops_still_works() -> None:
    source = (
        "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%02d' % 5 }}{{ 'a' ~ 1 ~ 2.5 ~ none }}"
        "{{ 'a, b'.split(', ') | join('+') }}{{ '{:>3}'.format(7) }}{{ [1] + [2] }}"
        "{{ 'x' | center(3) }}|{{ 'a\nb' | indent(2) }}|{{ nothing | join(',') }}"
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% endfor %}{% for n in nothing %}{% endfor %}"
    )
    assert ChatTemplate(source).render([USER, MORE]) == (
        "---1024305a12.5Nonea+b  7[1, 2] x |a\n  b|1/2,2/2"
    )


def test_values_nested_too_deep_are_the_requests_fault() -> None:
    deep: Any = []
    for _ in range(100_000):  # too deep for any version of Python
        deep = [deep]
    with pytest.raises(RequestError, match="recursion"):
        ChatTemplate("{{ x | tojson }}").render([USER], variables={"x": deep})


def test_a_broken_template_is_an_error_at_load() -> None:
    with pytest.raises(LoadError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_loop_controls_generation_blocks_and_the_date_work_as_in_transformers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    year = ChatTemplate(source).render([MORE, USER]).removeprefix(MORE["content"])
    assert year.isdigit()


# ---- tools, calls and their results --------------------------------------------------------

TWO_CALLS = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Both.",
    "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": f'{{"é": [{id}]}}'}}
        for id in ("1", "2")
    ],
}


def boundaries_in_text(chat: list[dict[str, Any]], tools: Any) -> tuple[str, list[str]]:
    """The rendered prompt, and what stands before each of its boundaries."""
    text = load_qwen35()
    assert text.chat is not None
    rendered = text.chat.encode(text.tokenizer, chat, tools=tools)
    return rendered.text, [
        text.tokenizer._backend.decode(rendered.tokens[:end], skip_special_tokens=False)
        for end in rendered.boundaries
    ]


def test_tools_end_at_a_boundary_that_every_chat_with_them_shares() -> None:
    _, one = boundaries_in_text([SYSTEM, USER], TOOLS)
    _, other = boundaries_in_text([SYSTEM, MORE, ASSISTANT, USER], TOOLS)
    system_and_tools = [end for end in one if end in other][-1]
    assert system_and_tools.endswith("<b>&amp;</b><|im_end|>\n")
    assert "</tools>" in system_and_tools
    _, without_system = boundaries_in_text([USER], TOOLS)
    assert "</tools>" in without_system[0]
    assert "dog" not in without_system[0]


def test_boundaries_of_an_agents_turns_are_where_messages_end() -> None:
    chat = [SYSTEM, USER, TWO_CALLS, RESULT, {"role": "tool", "content": "43"}]
    prompt, ends = boundaries_in_text(chat, TOOLS)
    assert all(prompt.startswith(end) for end in ends)
    assert [end[-30:] for end in ends[-3:]] == [
        "</function>\n</tool_call><|im_end|>\n"[-30:],
        "<tool_response>\n42\n</tool_response>"[-30:],
        "<tool_response>\n43\n</tool_response><|im_end|>\n"[-30:],
    ]


def test_the_next_turn_begins_with_the_last_one_as_far_as_that_is_the_same() -> None:
    chat = [SYSTEM, USER, TWO_CALLS, RESULT]
    prompt, _ = boundaries_in_text(chat, TOOLS)
    answer = {"role": "assistant", "content": "42.", "reasoning_content": "So."}
    _, later_ends = boundaries_in_text([*chat, answer, RESULT], TOOLS)
    shared = prompt.removesuffix("<|im_start|>assistant\n<think>\n")
    assert shared in later_ends


TEXT_OR_MAPPING = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}"
    "{% endfor %}{% endfor %}"
)
TEXT_ONLY = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
MAPPING_ONLY = TEXT_ONLY.replace("'' + c.function.arguments", "c.function.arguments|tojson")


@cases(
    ("source", "given", "rendered"),
    [
        (TEXT_OR_MAPPING, '{"a":1}', '{"a":1}'),  # as the model wrote it
        (TEXT_OR_MAPPING, {"a": "ü"}, '{"a": "ü"}'),
        (TEXT_ONLY, {"a": 1}, '{"a": 1}'),
        (TEXT_ONLY, '{"a":1}', '{"a":1}'),
        (MAPPING_ONLY, '{"a":1}', '{"a": 1}'),
        (MAPPING_ONLY, {"a": 1}, '{"a": 1}'),
        (MAPPING_ONLY, "", "{}"),
        (MAPPING_ONLY, f'{{"a":{2**70}}}', f'{{"a": {2**70}}}'),
        (MAPPING_ONLY, "no json", '"no json"'),
    ],
)
def test_arguments_have_the_type_that_the_template_wants(
    source: str, given: Any, rendered: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTemplate(source).render([USER, message]) == rendered


def test_reasoning_is_handed_to_templates_under_every_name() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert template.render([{"role": "assistant", "content": "", name: "Hm."}]) == "Hm. Hm."


def test_reasoning_and_content_beside_a_call_are_one_where_a_template_refuses_both() -> None:
    refuse = "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    source = "{% for m in messages %}REFUSE[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
    message = {**CALL, "content": "I look.", "reasoning_content": "Hm."}
    strict = ChatTemplate(source.replace("REFUSE", refuse))
    assert strict.render([message]) == "[Hm.\n\nI look.|]"
    assert ChatTemplate(source.replace("REFUSE", "")).render([message]) == "[Hm.|I look.]"


SHOWN = "[{{ m.role }}: {{ m.content }}]"
FIRST_ONLY = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
DROPPED = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
IN_TURN = (
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('no') }}{% endif %}"
)


MIXED = "system system user system assistant system"


@pytest.mark.parametrize(
    ("rules", "roles", "shown"),
    [
        ("", MIXED, "[system: a][system: b][user: c][system: d][assistant: e][system: f]"),
        (FIRST_ONLY, MIXED, "[system: a\n\nb\n\nd][user: c][assistant: e][user: f]"),
        (DROPPED, MIXED, "[system: a\n\nb\n\nd][user: c][assistant: e][user: f]"),
        (FIRST_ONLY + IN_TURN, MIXED, "[system: a\n\nb\n\nd][user: c][assistant: e][user: f]"),
        # Two messages that become users are one where turns alternate.
        (
            FIRST_ONLY + IN_TURN,
            "user assistant user system",
            "[user: a][assistant: b][user: c\n\nd]",
        ),
    ],
)
def test_reminders_in_mid_conversation_are_shown_by_every_template(
    rules: str, roles: str, shown: str
) -> None:
    messages = [
        {"role": role, "content": text} for role, text in zip(roles.split(), "abcdef", strict=False)
    ]
    template = ChatTemplate("{% for m in messages %}" + rules + SHOWN + "{% endfor %}")
    assert template.render(messages) == shown


TURN = [
    {"role": "user", "content": "ask"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "because",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "seen"},
]
NOTE = {"role": "system", "content": "Be brief.\n"}
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
REASONS = "{% if m.thinking and loop.index0 > ns.last %}({{ m.thinking }}){% endif %}"


def test_a_note_behind_a_result_keeps_the_reasoning_of_the_turn() -> None:
    template = ChatTemplate(
        LAST_QUESTION + "{% for m in messages %}" + FIRST_ONLY + SHOWN + REASONS + "{% endfor %}"
    )
    before = template.render(TURN)
    shown = template.render([*TURN, NOTE])
    assert "(because)" in before
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert shown == before.replace("seen]", f"seen\n\n{reminder}]")


def test_a_note_behind_a_result_is_the_users_where_reasoning_stays_anyway() -> None:
    always = REASONS.replace(" and loop.index0 > ns.last", "")
    template = ChatTemplate(
        "{% for m in messages %}" + FIRST_ONLY + SHOWN + always + "{% endfor %}"
    )
    assert template.render([*TURN, NOTE]) == template.render(TURN) + "[user: Be brief.\n]"


def test_a_system_message_behind_the_question_leaves_a_boundary_at_the_system_prompts_end() -> None:
    later = {"role": "system", "content": "There are agents."}
    _, one = boundaries_in_text([SYSTEM, USER, later], TOOLS)
    _, other = boundaries_in_text([SYSTEM, MORE, later], TOOLS)
    shared = [end for end in one if end in other][-1]
    assert shared.endswith("There are agents.<|im_end|>\n")


def test_templates_are_found_by_name_and_one_for_tools_is_used_where_there_are_tools(
    tmp_path: Path,
) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    named = [
        {"name": "default", "template": "plain{{ bos_token }}"},
        {"name": "tool_use", "template": "<tool_call>{{ tools|length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, {"bos_token": "<s>"})
    assert template is not None
    assert template.render([USER]) == "plain<s>"
    assert template.render([USER], tools=TOOLS) == "<tool_call>1"
    assert template.tool_source.startswith("<tool_call>")
