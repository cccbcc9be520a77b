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
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS), str(TOOLS / "bench")]

from loopback import isolate
from servers import pippin_server

from pippin.config import ModelConfig

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


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    if not (network := isolate()).startswith("isolated"):
        sys.exit(f"conformance: {network}")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    folder, *options = arguments[:split]
    program = Path(folder) / "node_modules" / "llmprobe" / "bin" / "dist" / "llmprobe.mjs"
    with pippin_server(ModelConfig.model, arguments[split + 1 :]) as served, tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.json"
        fixed = ["--no-bench", "--no-save", "--no-color", "--save", str(report)]
        command = ["node", str(program), served.url, *fixed, *options]
        subprocess.run(command, env={**os.environ, "HOME": home}, stdin=subprocess.DEVNULL, check=False)
        return print_failed(json.loads(report.read_text()))


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
