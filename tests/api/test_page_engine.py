"""The page's engine view in a real browser, on a real server: it shows what the test itself asked.

By counts, not by pixels: what a screen reader is told of steps and nodes is what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from browser import Visit, another_site, needs_browser, open_browser, visiting

from processes import PATIENCE_SECONDS
from test_serve import serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser

KEY = {"authorization": "Bearer sesame"}
STORY = "Once upon a time there was a fox who lived beside a river and counted apples. " * 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a key, so that whatever the page asks for must carry it."""
    with serve("--api-key", "sesame", "--max-running", "4") as served:
        yield served.url


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Visit]:
    httpx.post(f"{url}/flush_cache", headers=KEY).raise_for_status()
    with visiting(browser, url, "/#engine") as visit:
        visit.page.get_by_label("API key").fill("sesame")
        visit.page.keyboard.press("Enter")
        visit.page.locator(".numbers .running b", has_text=" of 4").wait_for()
        yield visit


def ask(url: str, text: str, max_tokens: int = 12) -> dict[str, Any]:
    """One whole reply's usage."""
    body = {
        "model": "stories-hybrid-20m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=KEY, timeout=60)
    usage: dict[str, Any] = reply.raise_for_status().json()["usage"]
    return usage


def wait_for(visit: Visit, ready: Callable[[], object]) -> None:
    for _ in range(int(10 * PATIENCE_SECONDS)):
        if ready():
            return
        visit.page.wait_for_timeout(100)
    raise AssertionError("it never happened")


def number_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1].replace(",", "")) if found else 0


def finished_requests(visit: Visit) -> int:
    return visit.page.locator(".requests tr.phase-ended").count()


def told_steps(visit: Visit) -> list[str]:
    """What every step is said to be, going through them by keyboard."""
    slider = visit.page.get_by_role("slider", name="Steps")
    slider.focus()
    visit.page.keyboard.press("Home")
    told = []
    while True:
        told.append(slider.get_attribute("aria-valuetext") or "")
        if slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax"):
            return told
        visit.page.keyboard.press("ArrowRight")


def test_the_timeline_shows_the_steps_of_a_request(visit: Visit, url: str) -> None:
    usage = ask(url, STORY)
    wait_for(visit, lambda: finished_requests(visit) == 1)
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert computed > 100

    def counts() -> tuple[int, int]:
        told = told_steps(visit)
        visit.page.get_by_role("button", name="Resume").click()  # a look holds it still
        prompt_tokens = sum(number_in(r"([\d,]+) prompt tokens?", step) for step in told)
        return prompt_tokens, sum(number_in(r"([\d,]+) decode rows?", step) for step in told)

    # The first token is sampled behind the prompt; the last one's row is for the cache alone, and
    # that step is told after the request's end.
    wait_for(visit, lambda: counts() == (computed, usage["completion_tokens"]))


def test_a_step_can_be_opened_and_read(visit: Visit, url: str) -> None:
    usage = ask(url, "Tell me a story about a crow.")
    wait_for(visit, lambda: finished_requests(visit) == 1)
    visit.page.get_by_role("slider", name="Steps").focus()
    visit.page.keyboard.press("Home")
    details = visit.page.get_by_role("complementary", name="Details")
    assert "Step" in details.locator("h3").inner_text()
    assert f"{usage['prompt_tokens']} tokens in 1 chunk" in details.inner_text()
    assert details.locator("tbody tr").count() == 1
    assert visit.page.get_by_role("button", name="Resume").is_visible()  # a look holds it still


def test_the_tree_shows_a_prompt_and_its_reply(visit: Visit, url: str) -> None:
    usage = ask(url, STORY)
    total = usage["total_tokens"]
    note = visit.page.locator(".tree-card .card-head .note")
    note.get_by_text(f"{total} tokens in").wait_for()
    tree = visit.page.get_by_role("tree", name="Prefix cache")
    labels = tree.get_by_role("treeitem").evaluate_all(
        "nodes => nodes.map((node) => node.ariaLabel)"
    )
    widths = {
        number_in(r"from ([\d,]+)", label): number_in(r"^([\d,]+) tokens?", label)
        for label in labels
    }
    at = 0
    while at in widths:  # one path: each node begins where the one before it ends
        at += widths.pop(at)
    assert (at, widths) == (total, {})


def test_a_second_prompt_branches_off_where_the_two_part(visit: Visit, url: str) -> None:
    first, second = ask(url, f"{STORY} Why?"), ask(url, f"{STORY} How?")
    reused = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < reused < first["prompt_tokens"]
    wait_for(visit, lambda: finished_requests(visit) == 2)
    row = visit.page.locator(".requests tr.phase-ended").first
    said = f"{reused} / {second['prompt_tokens']} + {second['completion_tokens']}"
    row.get_by_text(said).wait_for()
    depth_starts = visit.page.get_by_role("treeitem").evaluate_all(
        "nodes => nodes.map((node) => node.ariaLabel.split(';')[0])"
    )
    starts = [number_in(r"from ([\d,]+)", label) for label in depth_starts]
    assert max(starts.count(start) for start in starts) == 2  # two nodes begin where they part


def test_a_node_tells_its_text_by_keyboard(visit: Visit, url: str) -> None:
    ask(url, "Tell me about the seventeen badgers.")
    root = visit.page.locator("[role=treeitem][tabindex='0']")
    root.wait_for()
    root.focus()
    visit.page.keyboard.press("Enter")
    details = visit.page.get_by_role("complementary", name="Details")
    details.get_by_text("badgers").wait_for()
    assert "attention" in details.inner_text()
    visit.page.keyboard.press("ArrowRight")
    focused = visit.page.locator("[role=treeitem]:focus")
    assert focused.get_attribute("aria-selected") == "true"


def test_a_pause_holds_everything_still(visit: Visit, url: str) -> None:
    ask(url, "One.")
    wait_for(visit, lambda: finished_requests(visit) == 1)
    visit.page.get_by_role("button", name="Pause").click()
    ask(url, "Another one.")
    visit.page.wait_for_timeout(500)
    assert finished_requests(visit) == 1
    visit.page.get_by_role("button", name="Resume").click()
    wait_for(visit, lambda: finished_requests(visit) >= 2)


PLACES = """() => [...document.querySelectorAll(".card:not(.details), .numbers li")].map((card) => {
    const { top, height } = card.getBoundingClientRect();
    return [Math.round(top), Math.round(height)];
})"""


@pytest.mark.parametrize("width", [820, 1280])
def test_nothing_moves_while_requests_come_and_go(visit: Visit, url: str, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    ask(url, "One.")
    wait_for(visit, lambda: finished_requests(visit) == 1)
    visit.page.wait_for_timeout(500)  # numbers follow a moment later
    before = visit.page.evaluate(PLACES)
    for text in (STORY, f"{STORY} Why?"):
        ask(url, text)
    wait_for(visit, lambda: finished_requests(visit) == 3)
    visit.page.wait_for_timeout(500)
    assert visit.page.evaluate(PLACES) == before


def test_a_branch_of_a_chat_shows_what_it_reuses(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("link", name="Chat").click()
    page.locator("button[aria-label=Send]:enabled").wait_for()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Message", exact=True).fill(f"{STORY} Why?")
    page.keyboard.press("Enter")

    def reuse() -> tuple[int, int]:
        bar = page.locator(".message.assistant:not(.running) .reuse")
        bar.wait_for()
        return int(bar.get_attribute("data-cached")), int(bar.get_attribute("data-prompt"))

    cached, prompt = reuse()
    assert cached < prompt
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".which", has_text="2/2").wait_for()
    assert reuse() == (prompt, prompt)  # the same prompt: nothing of it is computed again
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill(f"{STORY} How?")
    page.keyboard.press("Enter")
    page.locator(".message.user .which", has_text="2/2").wait_for()
    cached, edited = reuse()
    assert prompt / 2 < cached < edited


def test_nothing_is_asked_of_the_engine_while_nobody_looks(browser: Browser, url: str) -> None:
    with visiting(browser, url) as visit:
        visit.page.get_by_label("API key").fill("sesame")
        visit.page.keyboard.press("Enter")
        visit.page.get_by_role("heading", name="stories-hybrid-20m").wait_for()
        assert not any("/events" in request for request in visit.requests)
        visit.page.get_by_role("link", name="Engine").click()
        visit.page.locator(".numbers .running b", has_text=" of 4").wait_for()
        assert any("/events" in request for request in visit.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_nobody_is_shut_out_of_the_engine(
    browser: Browser, url: str, scheme: Any, width: int
) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    with visiting(browser, url, "/#engine", **options) as visit:
        visit.page.get_by_label("API key").fill("sesame")
        visit.page.keyboard.press("Enter")
        ask(url, STORY)
        visit.page.get_by_role("treeitem").first.click()
        visit.page.get_by_role("complementary", name="Details").locator("h3").wait_for()
        assert visit.serious_findings() == []
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert visit.page.evaluate(overflow) == 0


def test_another_site_gets_neither_the_feed_nor_the_page(browser: Browser, url: str) -> None:
    tries = f"""(async () => {{
        const found = {{}};
        const attempt = async (name, work) => {{
            try {{ await work(); found[name] = "let in"; }} catch {{ found[name] = "refused"; }}
        }};
        const headers = {{ authorization: "Bearer sesame" }};
        await attempt("feed", () => fetch("{url}/events", {{ headers }}));
        await attempt("module", () => import("{url}/page/app.js"));
        const frame = document.createElement("iframe");
        frame.src = "{url}/";
        document.body.append(frame);
        await new Promise((resolve) => {{ frame.onload = resolve; }});
        try {{ found.frame = frame.contentDocument === null ? "refused" : "let in"; }}
        catch {{ found.frame = "refused"; }}
        return found;
    }})()"""
    context = browser.new_context()
    try:
        with another_site("<!doctype html><title>evil</title>") as site:
            page = context.new_page()
            statuses: dict[str, int] = {}
            page.on("response", lambda reply: statuses.update({reply.url: reply.status}))
            page.goto(site)
            assert set(page.evaluate(tries).values()) == {"refused"}
            assert statuses[f"{url}/"] == 403
    finally:
        context.close()
