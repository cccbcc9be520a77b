"""Pages of other sites, in a real browser: those of this machine may generate, and others nothing.

The server is `127.0.0.1`. A page of this machine is opened at `localhost`, one of another site at a
name that the browser resolves to this machine. Each tries what pages try, and writes what came of
each attempt into its body.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, another_site
from scripted_engine import ScriptedEngine, say, serving

from pippin.config import ServerConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here (test_access_control.py needs none)"
    ),
]

PAGE = """<!doctype html><script>
const url = %s, chat = {model: "stories", messages: [{role: "user", content: "Hi."}]};
const json = {"content-type": "application/json"}, text = {"content-type": "text/plain"};
const attempts = {
  read: () => fetch(url + "/v1/models"),
  status: () => fetch(url + "/status"),
  flush: () => fetch(url + "/flush_cache", {method: "POST"}),
  feed: () => fetch(url + "/events"),
  show: () => fetch(url + "/v1/responses/resp_1"),
  drop: () => fetch(url + "/v1/responses/resp_1", {method: "DELETE"}),
  pull: () => fetch(url + "/api/pull", {method: "POST", headers: json, body: '{"model": "a"}'}),
  flush_blind: () => fetch(url + "/flush_cache", {method: "POST", mode: "no-cors"}),
  generate: () => fetch(url + "/v1/chat/completions",
    {method: "POST", headers: json, body: JSON.stringify(chat)}),
  generate_blind: () => fetch(url + "/v1/chat/completions",
    {method: "POST", mode: "no-cors", headers: text, body: JSON.stringify(chat)}),
  beacon: async () => ({text: async () => String(navigator.sendBeacon(url + "/flush_cache"))}),
};
(async () => {
  const found = {};
  for (const [name, attempt] of Object.entries(attempts)) {
    try { found[name] = await (await attempt()).text(); } catch (error) { found[name] = "refused"; }
  }
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script><body></body>"""


HARMFUL = ("status", "flush", "feed", "show", "drop", "pull")
ELSEWHERE = "evil.example"


class CountingEngine(ScriptedEngine):
    num_flushes = 0

    async def flush_cache(self) -> dict[str, Any]:
        self.num_flushes += 1
        return {"freed_bytes": 0}


def attempt(
    engine: ScriptedEngine, profile: Path, config: ServerConfig | None = None, *, site: str
) -> Any:
    """What the page got out of each of its attempts."""
    with serving(engine, config) as url, another_site(PAGE % json.dumps(url), site) as page:
        shown = subprocess.run(
            [
                *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", f"--user-data-dir={profile}"),
                f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
                *("--virtual-time-budget=20000", "--dump-dom", page),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
    found = re.search(r'<pre id="found">(.*)</pre>', html.unescape(shown), re.DOTALL)
    assert found, shown
    return json.loads(found[1])


def test_a_page_of_another_site_can_do_nothing(tmp_path: Path) -> None:
    engine = CountingEngine(say("Hi."))
    found = attempt(engine, tmp_path, site=ELSEWHERE)
    for name in (*HARMFUL, "read", "generate"):
        assert found[name] == "refused"
    assert found["flush_blind"] == found["generate_blind"] == ""  # sent, and not shown to it
    assert (engine.num_flushes, engine.submits) == (0, [])


def test_a_page_of_this_machine_can_generate_and_do_no_harm(tmp_path: Path) -> None:
    engine = CountingEngine(say("Hi."))
    found = attempt(engine, tmp_path, site="localhost")
    assert json.loads(found["read"])["data"][0]["id"] == "stories"
    assert json.loads(found["generate"])["choices"][0]["message"]["content"] == "Hi."
    for name in HARMFUL:
        assert found[name] == "refused"
    assert found["flush_blind"] == found["generate_blind"] == ""
    assert (engine.num_flushes, len(engine.submits)) == (0, 1)


def test_a_page_of_a_site_that_was_let_in_can(tmp_path: Path) -> None:
    engine = CountingEngine(say("Hi."))
    found = attempt(engine, tmp_path, ServerConfig(cors_origin=("*",)), site=ELSEWHERE)
    assert json.loads(found["read"])["data"][0]["id"] == "stories"
    assert json.loads(found["generate"])["choices"][0]["message"]["content"] == "Hi."
    assert engine.num_flushes > 0
