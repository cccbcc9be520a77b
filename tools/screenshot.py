"""Takes the README's picture of the page: a real server under a real load, in a real Chromium.

    python tools/screenshot.py                              # docs/page.png: the engine at work
    python tools/screenshot.py --view chat --theme dark --out /tmp/chat.png

Needs the `dev` extra and a Chromium (`chromium` or `google-chrome` on the PATH).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
RULES = (
    "You tell short stories to children. They begin with once upon a time. Somebody small has a "
    "wish, somebody large is in the way, and in the end they are friends. Nobody is hurt. "
)
WHO = ("a fox", "a crow", "a lion and a mouse", "a river", "an old tree", "two frogs", "the moon")
THEN = ("And then?", "Why did they do that?", "Tell me more about their house.")


@contextlib.contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "pippin", "serve", "--port", "0", "--memory", "600MB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the server did not start: `pippin serve` says why"
            yield found[0]
        finally:
            process.terminate()


@contextlib.contextmanager
def load(url: str, num_clients: int) -> Iterator[None]:
    """Conversations that begin alike and go on for some turns."""
    over = threading.Event()

    def converse(number: int) -> None:
        draw = random.Random(number)
        while not over.is_set():
            about = f"Tell me a story about {draw.choice(WHO)}."
            system = RULES * draw.choice((1, 1, 3))
            messages = [{"role": "system", "content": system}, {"role": "user", "content": about}]
            for _ in range(draw.randint(1, 4)):
                if over.is_set():
                    return
                messages.append({"role": "assistant", "content": reply(url, messages, draw)})
                messages.append({"role": "user", "content": draw.choice(THEN)})

    threads = [threading.Thread(target=converse, args=(n,)) for n in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def reply(url: str, messages: list[dict[str, str]], draw: random.Random) -> str:
    body = {"model": "stories-hybrid-20m", "messages": messages, "max_tokens": draw.randint(30, 120)}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def engine_at_work(page: Page, seconds: float) -> None:
    page.locator(".node").first.wait_for(timeout=120_000)
    page.wait_for_timeout(1000 * seconds)
    widths = page.locator(".node.hot").evaluate_all("nodes => nodes.map((n) => n.offsetWidth)")
    longest = max(range(1, len(widths)), key=widths.__getitem__)  # the first is what all share
    page.locator(".node.hot").nth(longest).click()
    page.wait_for_timeout(1000)


def chat_with_a_branch(page: Page) -> None:
    for number, text in enumerate(("Tell me a story about a fox.", "And then?"), 1):
        page.locator("button[aria-label=Send]:enabled").wait_for(timeout=120_000)
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        page.locator(".reuse").nth(number - 1).wait_for(timeout=120_000)
    page.get_by_role("button", name="Regenerate").last.click()
    page.locator(".which", has_text="2/2").wait_for()
    page.locator(".reuse").nth(1).wait_for(timeout=120_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--view", choices=("engine", "chat"), default="engine")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1320)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=25.0, help="of load before the picture")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshot: no chromium or google-chrome on the PATH")
    clients = args.clients if args.view == "engine" else 0
    with server() as url, load(url, clients), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        size = {"width": args.width, "height": args.height}
        page = browser.new_page(viewport=size, color_scheme=args.theme)
        page.goto(f"{url}/#{args.view}")
        if args.view == "engine":
            engine_at_work(page, args.seconds)
        else:
            chat_with_a_branch(page)
        page.screenshot(path=args.out)
        browser.close()
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
