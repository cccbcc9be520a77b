"""The page's chat in a real browser, on an engine that says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from browser import Visit, needs_browser, open_browser, visiting
from qwen35_server import CALL, THOUGHT, WEATHER, prompt_text, says, serving_qwen
from scripted_engine import (
    TOKENIZER,
    ScriptedEngine,
    fail,
    hang,
    say,
    serving,
    serving_each,
    waiting,
)

from pippin.config import ServerConfig
from pippin.messages import Submit
from processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser

MARKDOWN = """# Foxes

Some **bold** text, `code`, a [link](https://example.com/) and ![a picture](https://example.com/x.png).

- one
- two
  1. nested

| name | tokens |
|:---|---:|
| fox | 3 |

```python
print("fox")
```
<img src=x onerror=alert(1)> [bad](javascript:alert(1))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def ask(visit: Visit, text: str) -> None:
    visit.page.locator("button[aria-label=Send]:enabled").wait_for()
    visit.page.get_by_label("Message", exact=True).fill(text)
    visit.page.keyboard.press("Enter")


def last_reply(visit: Visit) -> Any:
    return visit.page.locator(".message.assistant").last


def wait_for_reply(visit: Visit, number: int = 1) -> Any:
    """The page's last reply, once so many are complete."""
    visit.page.locator(".message.assistant:not(.running)").nth(number - 1).wait_for()
    return last_reply(visit)


def prompt_of(submit: Submit) -> str:
    return b"".join(map(TOKENIZER.token_bytes, submit.token_ids)).decode()


def test_a_reply_streams_as_markdown_and_says_its_numbers(browser: Browser) -> None:
    engine = ScriptedEngine(say(MARKDOWN))
    with serving(engine) as url, visiting(browser, url) as visit:
        ask(visit, "Tell me about foxes.")
        reply = wait_for_reply(visit)
        assert reply.locator("h3:not(.who)").inner_text() == "Foxes"
        assert reply.locator("strong").inner_text() == "bold"
        assert reply.locator("ul > li").count() == 2
        assert reply.locator("ul ol > li").inner_text() == "nested"
        assert reply.locator("td.right").inner_text() == "3"
        assert reply.locator("pre code").inner_text() == 'print("fox")'
        reuse = reply.locator(".reuse")
        assert reuse.get_attribute("data-cached") == "3"  # as the script says
        assert reuse.get_attribute("data-prompt") == str(engine.submits[0].prompt_len)
        num_tokens = len(TOKENIZER.encode(MARKDOWN)) + 1
        assert f"{num_tokens} tokens" in reply.locator(".stats").inner_text()
        assert "TTFT" in reply.locator(".stats").inner_text()


def test_what_a_model_says_is_never_markup(browser: Browser) -> None:
    with serving(ScriptedEngine(say(MARKDOWN))) as url, visiting(browser, url) as visit:
        ask(visit, "<b>Hi</b>")
        reply = wait_for_reply(visit)
        assert reply.locator("img, script").count() == 0
        assert "<img src=x onerror=alert(1)>" in reply.inner_text()
        links = reply.locator("a").evaluate_all("all => all.map(link => link.href)")
        assert links == ["https://example.com/", "https://example.com/x.png"]
        assert visit.page.locator(".message.user .said").inner_text() == "<b>Hi</b>"


def test_a_reply_that_is_stopped_is_stopped_on_the_server_too(browser: Browser) -> None:
    engine = ScriptedEngine(hang(after="Once upon a time"))
    with serving(engine) as url, visiting(browser, url) as visit:
        ask(visit, "A story.")
        last_reply(visit).get_by_text("Once upon a time").wait_for()  # though it is not over
        assert engine.aborted == []
        visit.page.get_by_role("button", name="Stop").click()
        wait_until(lambda: engine.aborted == [engine.submits[0].id])
        assert "stopped" in wait_for_reply(visit).locator(".stats").inner_text()
        visit.page.get_by_role("button", name="Send").wait_for()
        ask(visit, "Another.")
        last_reply(visit).get_by_text("Once upon a time").wait_for()
        visit.page.keyboard.press("Escape")
        wait_until(lambda: len(engine.aborted) == 2)


def test_a_conversation_keeps_the_model_that_was_picked(browser: Browser) -> None:
    one, two = ScriptedEngine(say("I am one.")), ScriptedEngine(say("I am two."))
    with serving_each(one=one, two=two) as url, visiting(browser, url) as visit:
        picker = visit.page.get_by_label("Model", exact=True)
        picker.wait_for()
        assert picker.locator("option").all_inner_texts() == ["one", "two"]
        ask(visit, "Who?")
        wait_for_reply(visit).get_by_text("I am one.").wait_for()
        picker.select_option("two")
        ask(visit, "And now?")
        reply = wait_for_reply(visit, 2)
        reply.get_by_text("I am two.").wait_for()
        assert reply.locator(".who").inner_text() == "two"
        assert visit.page.locator(".message.assistant .who").first.inner_text() == "one"
        visit.page.reload()
        visit.page.locator(".message").first.wait_for()
        assert picker.input_value() == "two"
    with serving(one) as url, visiting(browser, url) as visit:
        visit.page.locator("button[aria-label=Send]:enabled").wait_for()
        assert not visit.page.get_by_label("Model", exact=True).is_visible()


def test_versions_of_a_message_are_kept_side_by_side(browser: Browser) -> None:
    engine = ScriptedEngine(say("first"), say("second"), say("third"))
    with serving(engine) as url, visiting(browser, url) as visit:
        ask(visit, "Question?")
        wait_for_reply(visit).get_by_role("button", name="Regenerate").click()
        last_reply(visit).get_by_text("second").wait_for()
        assert last_reply(visit).locator(".which").inner_text() == "2/2"
        assert engine.submits[0].token_ids == engine.submits[1].token_ids
        last_reply(visit).get_by_role("button", name="Previous version").click()
        last_reply(visit).get_by_text("first").wait_for()

        visit.page.get_by_role("button", name="Edit").click()
        visit.page.get_by_label("Edit your message").fill("Another question?")
        visit.page.keyboard.press("Enter")
        last_reply(visit).get_by_text("third").wait_for()
        assert "Another question?" in prompt_of(engine.submits[2])
        assert " Question?" not in prompt_of(engine.submits[2])
        user = visit.page.locator(".message.user")
        assert user.locator(".which").inner_text() == "2/2"
        user.get_by_role("button", name="Previous version").click()
        last_reply(visit).get_by_text("first").wait_for()


def test_a_conversation_goes_on_from_what_is_shown(browser: Browser) -> None:
    engine = ScriptedEngine(say("A fox."), say("A crow."))
    with serving(engine) as url, visiting(browser, url) as visit:
        visit.page.get_by_role("button", name="Settings", exact=True).click()
        visit.page.get_by_label("System prompt").fill("Be brief.")
        visit.page.get_by_label("Temperature").fill("0.5")
        visit.page.get_by_label("Max tokens").fill("7")
        ask(visit, "Who?")
        wait_for_reply(visit)
        ask(visit, "And who else?")
        wait_for_reply(visit, 2)
        first, second = (prompt_of(submit) for submit in engine.submits)
        assert "Be brief." in first
        assert second.startswith(first)
        assert "A fox." in second.removeprefix(first)
        params = engine.submits[1].params
        assert (params.temperature, params.max_tokens) == (0.5, 7)


def test_a_setting_that_cannot_be_is_told_and_not_sent(browser: Browser) -> None:
    engine = ScriptedEngine(say("Hi."))
    with serving(engine) as url, visiting(browser, url) as visit:
        visit.page.get_by_role("button", name="Settings", exact=True).click()
        visit.page.get_by_label("Temperature").fill("3")
        visit.page.get_by_label("Tools").fill("[")
        ask(visit, "Hi.")
        wait_for_reply(visit)
        assert engine.submits[0].params.temperature != 3
        told = visit.page.locator(".settings .wrong:visible").all_inner_texts()
        assert len(told) == 2
        assert "Not JSON" in told[1]


def test_conversations_are_kept_in_the_browser_and_can_be_deleted(browser: Browser) -> None:
    with serving(ScriptedEngine(say("Kept."))) as url, visiting(browser, url) as visit:
        ask(visit, "First one")
        wait_for_reply(visit)
        visit.page.get_by_role("button", name="New chat").click()
        ask(visit, "Second one")
        wait_for_reply(visit)
        visit.page.reload()
        titles = visit.page.locator(".conversations .open")
        titles.first.wait_for()
        assert titles.all_inner_texts() == ["Second one", "First one"]
        titles.last.click()
        assert wait_for_reply(visit).locator(".said").inner_text() == "Kept."

        visit.page.on("dialog", lambda dialog: dialog.accept())
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name="Export").click()
        exported = json.loads(download.value.path().read_text())
        assert len(exported) == 2
        visit.page.get_by_role("button", name="Delete “First one”").click()
        assert titles.all_inner_texts() == ["Second one"]
        visit.page.get_by_role("button", name="Delete all").click()
        visit.page.reload()
        visit.page.get_by_text("Tell me a story about a fox.").wait_for()
        assert titles.count() == 0
        assert visit.page.evaluate("localStorage.length") <= 1  # the settings


def test_the_browser_keeps_a_bounded_number_of_conversations(browser: Browser) -> None:
    with serving(ScriptedEngine(say("Hi."))) as url, visiting(browser, url) as visit:
        left, dropped = visit.page.evaluate(
            """async () => {
                const store = await import("/page/chat/conversation.js");
                const chat = await import("/page/chat/conversation.js");
                const dropped = [];
                for (let i = 0; i < store.MAX_CONVERSATIONS + 2; i += 1) {
                    const conversation = chat.newConversation();
                    chat.add(conversation, null, { role: "user", content: `number ${i}` });
                    conversation.updated = i;
                    dropped.push(...store.save(conversation).map(chat.titleOf));
                }
                return [store.loadAll().length, dropped];
            }"""
        )
        assert (left, dropped) == (60, ["number 0", "number 1"])


def test_reasoning_is_folded_and_calls_are_answered(browser: Browser) -> None:
    said = says(f"{THOUGHT}I look.\n\n{CALL}"), says(f"{THOUGHT}It rains.")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    with serving_qwen(*said) as (url, engine), visiting(browser, url) as visit:
        visit.page.get_by_role("button", name="Settings", exact=True).click()
        visit.page.get_by_label("Tools").fill(json.dumps([tool]))
        ask(visit, "What is the weather?")
        reply = wait_for_reply(visit)
        assert reply.locator(".said").inner_text() == "I look."
        assert not reply.get_by_text("Let me think.").is_visible()
        reply.get_by_text("Reasoning").click()
        assert reply.get_by_text("Let me think.").is_visible()
        call = reply.get_by_role("region", name="Tool call get_weather")
        assert json.loads(call.locator("pre").inner_text()) == {"city": "Tokyo", "days": 3}
        call.get_by_label("Result of get_weather").fill("rain at noon")
        call.get_by_role("button", name="Send result").click()
        wait_for_reply(visit, 2)
        assert last_reply(visit).locator(".said").inner_text() == "It rains."
        assert "rain at noon" in prompt_text(engine)


def test_a_request_is_copied_as_a_command(browser: Browser) -> None:
    config = ServerConfig(api_key=("secret",))
    with serving(ScriptedEngine(say("It's."))) as url, visiting(browser, url) as visit:
        visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(visit, "What's 'that'?")
        reply = wait_for_reply(visit)
        reply.get_by_role("button", name="Copy as curl").click()
        reply.get_by_text("Copied").wait_for()
        curl = visit.page.evaluate("navigator.clipboard.readText()")
    assert f"curl -N {url}/v1/chat/completions" in curl
    assert r"What'\''s '\''that'\''?" in curl
    assert config.api_key[0] not in curl


@pytest.mark.parametrize(
    ("script", "title", "message"),
    [
        (fail("512 requests wait already"), "The queue is full", "512 requests wait already"),
        (
            fail("killed by signal 9", after="Once", code="engine_dead"),
            "The engine was lost",
            "killed by signal 9",
        ),
    ],
    ids=["at once", "in the middle"],
)
def test_errors_are_told_plainly(browser: Browser, script: Any, title: str, message: str) -> None:
    with serving(ScriptedEngine(script)) as url, visiting(browser, url) as visit:
        ask(visit, "Hi.")
        told = wait_for_reply(visit).get_by_role("alert")
        assert told.locator("strong").inner_text() == title
        assert message in told.inner_text()


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(browser: Browser) -> None:
    with serving(ScriptedEngine(say("Hi."))) as url, visiting(browser, url) as visit:
        ask(visit, "fox " * 9000)
        told = wait_for_reply(visit).get_by_role("alert").inner_text()
        assert "Too long for this model" in told
        assert "8192" in told.replace(",", "")


def test_a_server_that_loads_its_model_is_waited_for(browser: Browser) -> None:
    with waiting("the model is being loaded") as url, visiting(browser, url) as visit:
        visit.page.get_by_text("the model is being loaded").wait_for()
        with serving(ScriptedEngine(say("Hi."))):
            visit.page.get_by_role("heading", name="stories").wait_for()
            ask(visit, "Hi.")
            wait_for_reply(visit)


def test_the_key_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    config = ServerConfig(api_key=("open sesame",))
    with (
        serving(ScriptedEngine(say("Hi.")), config) as url,
        visiting(browser, url) as visit,
    ):
        dialog = visit.page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Continue").click()
        dialog.get_by_text("That key was refused.").wait_for()
        assert visit.serious_findings() == []
        dialog.get_by_label("API key").fill("open sesame")
        visit.page.keyboard.press("Enter")
        visit.page.get_by_role("heading", name="stories").wait_for()
        assert visit.page.get_by_role("dialog").count() == 0
        ask(visit, "Hi.")
        wait_for_reply(visit)
        visit.page.reload()
        visit.page.get_by_text("stories").first.wait_for()
        assert visit.page.get_by_role("dialog").count() == 0
        kept = visit.page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
        assert "sesame" not in kept


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nobody_is_shut_out_of_the_chat(browser: Browser, scheme: Any, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    with (
        serving(ScriptedEngine(say(MARKDOWN))) as url,
        visiting(browser, url, **options) as visit,
    ):
        assert visit.serious_findings() == []
        ask(visit, "Tell me about foxes.")
        wait_for_reply(visit).get_by_role("button", name="Regenerate").click()
        last_reply(visit).locator(".which").wait_for()
        wait_for_reply(visit)
        visit.page.get_by_role("button", name="Settings", exact=True).click()
        assert visit.serious_findings() == []
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert visit.page.evaluate(overflow) == 0


def test_the_theme_is_switched_and_remembered(browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with serving(ScriptedEngine(say("Hi."))) as url, visiting(browser, url) as visit:
        light = visit.page.evaluate(background)
        theme = visit.page.locator("#theme")
        theme.click()
        theme.click()
        dark = visit.page.evaluate(background)
        assert dark != light
        visit.page.reload()
        assert visit.page.evaluate(background) == dark
