"""Chat templates against transformers, on the bundled template and on Qwen3.5's own."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bundled import BUNDLED_PATH
from pippin.errors import LoadError, RequestError
from pippin.text import template_sandbox
from pippin.text.bundle import TextBundle
from pippin.text.chat_template import ChatTemplate

TESTS = Path(__file__).parents[1]
QWEN = TESTS / "fixtures/qwen3.5"

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
    path = tmp_path_factory.mktemp("qwen")
    (path / "tokenizer.json").write_bytes(
        lzma.decompress((QWEN / "tokenizer.json.xz").read_bytes())
    )
    (path / "chat_template.jinja").write_text((QWEN / "chat_template.jinja").read_text())
    return path


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
    template = ChatTemplate((QWEN / "chat_template.jinja").read_text())
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
    monkeypatch.setattr(template_sandbox, "MAX_CPU_SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"ran for more than 0\.05 s"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{% for i in range(9999) %}{{ messages }}{% endfor %}", "makes more than 10,000"),
        ("{{ 'a' * 10001 }}", "repeats something"),
        ("{{ 10001 * 'a' }}", "repeats something"),
        ("{{ [1] * 10001 }}", "repeats something"),
        ("{{ 9 ** 99 }}", "power"),
        ("{{ '%99999999d' % 1 }}", "formats something"),
        ("{{ '%*d' % (99999999, 1) }}", "formats something"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_makes_too_much_is_stopped(
    monkeypatch: pytest.MonkeyPatch, source: str, match: str
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 10_000)
    with pytest.raises(RequestError, match=match):
        ChatTemplate(source).render([USER])


def test_what_honest_templates_do_with_numbers_and_loops_still_works() -> None:
    source = (
        "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%02d' % 5 }}"
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% endfor %}{% for n in nothing %}{% endfor %}"
    )
    assert ChatTemplate(source).render([USER, MORE]) == "---10243051/2,2/2"


def test_values_nested_too_deep_are_the_requests_fault() -> None:
    deep: Any = []
    for _ in range(5000):
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


def test_templates_are_found_wherever_checkpoints_keep_them(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, {"bos_token": "<s>"})
    assert template is not None
    assert template.render([USER]) == "<s>"
