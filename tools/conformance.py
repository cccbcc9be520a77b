"""Runs npm's `llmprobe` against a server of this checkout, without a network but loopback.

npm install --prefix DIR llmprobe@0.6.12
python tools/conformance.py DIR [llmprobe's options] [-- options of `pippin serve`]

Prints each MUST that failed. `unshare` gives both processes a network of their own: the program is
other people's, and can upload its reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
PATIENCE_SECONDS = 120.0
STORIES = "needs a model that follows instructions: the demo model writes until max_tokens cuts it"
APART = "Anthropic counts cached tokens apart from input_tokens; here the whole prompt was cached"
KNOWN = {
    "chat-json-mode-parses": STORIES,
    "chat-structured-parses": STORIES,
    "responses-json-mode-parses": STORIES,
    "responses-structured-parses": STORIES,
    "responses-chain-remembers": STORIES,
    "messages-usage-input": APART,
    "messages-usage-cached-bound": APART,
}
INSIDE = "PIPPIN_CONFORMANCE_INSIDE"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    if INSIDE not in os.environ:
        again = [sys.executable, str(Path(__file__).resolve()), *arguments]
        os.execvpe("unshare", ["unshare", "-rn", *again], {**os.environ, INSIDE: "1"})
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    folder, *options = arguments[:split]
    program = Path(folder) / "node_modules" / "llmprobe" / "bin" / "dist" / "llmprobe.mjs"
    server = subprocess.Popen(
        [sys.executable, "-m", "pippin", "serve", "--port", "8000", *arguments[split + 1 :]],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(server)
        with tempfile.TemporaryDirectory() as home:
            report = Path(home) / "report.json"
            fixed = ["--no-bench", "--no-save", "--no-color", "--save", str(report)]
            subprocess.run(
                ["node", str(program), URL, *fixed, *options],
                env={**os.environ, "HOME": home},
                stdin=subprocess.DEVNULL,
                check=False,
            )
            return print_failed(json.loads(report.read_text()))
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/ready", timeout=1):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit("conformance: the server did not start")


def print_failed(report: dict[str, Any]) -> int:
    """The MUSTs that failed; how many of them are not known."""
    conformance = report["conformance"]
    unknown = 0
    for result in conformance["results"]:
        for failure in result["failures"]:
            if failure["severity"] == "MUST":
                why = KNOWN.get(failure["id"], "")
                unknown += not why
                print(f"{failure['id']}: {why or failure['message']}")
    print(f"{conformance['passed']} of {conformance['total']} MUSTs passed, {unknown} unknown")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
