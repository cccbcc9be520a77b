"""A real Chromium, for tests of the page. What a visit loads and complains about is kept.

Debian's Chromium through Playwright; both are optional, and tests say so where one is missing.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from processes import PATIENCE_SECONDS, is_installed

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
    pytest.mark.skipif(not is_installed("playwright"), reason="playwright is not installed"),
    pytest.mark.skipif(
        not is_installed("axe_playwright_python"), reason="axe-playwright-python is not installed"
    ),
]


@contextmanager
def open_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """One person at one page: nothing is shared with other visits, not even what is stored."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)  # of the console
    requests: list[str] = field(default_factory=list)

    @property
    def from_elsewhere(self) -> list[str]:
        return [url for url in self.requests if not url.startswith((f"{self.url}/", "blob:"))]

    def serious_findings(self) -> list[str]:
        """What axe finds to be in the way of people who cannot see or point well."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{finding['id']}: {node['html'][:200]} {node['any'] or node['all'] or node['none']}"
            for finding in found
            if finding["impact"] in ("serious", "critical")
            for node in finding["nodes"]
        ]


@contextmanager
def visiting(browser: Browser, url: str, path: str = "/", **options: Any) -> Iterator[Visit]:
    """The page, open. It must not have complained, nor asked anybody else, when it is left."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
    try:
        visit = Visit(context.new_page(), url)
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on("console", lambda message: _note(visit, message.type, message.text))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.goto(url + path)
        yield visit
        assert visit.complaints == []
        assert visit.from_elsewhere == []
    finally:
        context.close()


@contextmanager
def another_site(page: str, name: str = "localhost") -> Iterator[str]:
    """The address of a site that has this page: `localhost`, while servers are 127.0.0.1, or a name
    that a browser was given for the same address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://{name}:{site.server_port}/"
        finally:
            site.shutdown()
            thread.join()


def _note(visit: Visit, kind: str, text: str) -> None:
    # A refusal is told on the page; that the browser notes it as well is no fault of the page.
    if kind in ("error", "warning") and "the server responded with a status of" not in text:
        visit.complaints.append(text)
