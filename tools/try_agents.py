"""Runs every coding agent that is on the PATH against a server for some turns, and prints a table.

    python tools/try_agents.py [--only claude --only codex] [--turns 2] [--serve=--no-overlap]

Installs nothing. Writes a model of random weights (`make_random_hybrid.py --shape agents`) and
serves it. Each agent is unmodified, has a temporary home and its default settings, is asked as its
manual says or as `pippin launch` starts it, and runs without a network but for loopback, where
`unshare -n` is permitted. In every other turn, from the first, the user asks for a shell command,
which changes a file of a git repository; the agent runs it and returns the result.

What makes random weights reply sensibly is a proxy before the server (`forcing.py`). Exits with 1
if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS), str(TOOLS / "bench")]

from forcing import DONE, MARK, RESULT, Exchange, forcing_proxy
from loopback import isolate
from servers import pippin_server

from pippin.cli.coding_agents import CODING_AGENTS, Target

TURN_SECONDS = 300


@dataclass(frozen=True)
class Place:
    """Where an agent runs, and which server it asks."""

    home: Path
    target: Target

    def write(self, name: str, text: str) -> None:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """A home of its own, and nothing of the user's but the PATH."""
        home = str(self.home)
        places = {f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CONFIG", "DATA")}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        return {**kept, **places, "HOME": home}


@dataclass(frozen=True)
class Agent:
    name: str
    command: str
    ask: Callable[[Place, str, bool], list[str]]  # arguments for a text; True: not the first one
    start: Callable[[Place], dict[str, str]] | None = None  # writes settings; default: `pippin launch`
    has_tools: bool = True

    def environment(self, place: Place) -> dict[str, str]:
        if self.start is not None:
            return self.start(place)
        return CODING_AGENTS[self.command].environment(place.target)


def launched(command: str, place: Place) -> list[str]:
    """The arguments that `pippin launch` starts an agent with."""
    return CODING_AGENTS[command].arguments(place.target)


def ask_codex(place: Place, text: str, again: bool) -> list[str]:
    """Its own sandbox makes a network namespace, which not every place allows."""
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    resume = ["resume", "--last"] if again else []
    return [*launched("codex", place), "exec", *resume, *options, text]


def ask_aider(place: Place, text: str, again: bool) -> list[str]:
    options = ["--yes-always", "--no-git", "--no-check-update", *["--restore-chat-history"] * again]
    return [*launched("aider", place), *options, "--message", text]


def start_llm(place: Place) -> dict[str, str]:
    model = place.target.model
    settings = f"- model_id: {model}\n  model_name: {model}\n"
    settings += f"  api_base: {place.target.url}/v1\n  supports_tools: true\n"
    place.write("llm/extra-openai-models.yaml", settings)
    return {"LLM_USER_PATH": str(place.home / "llm")}


def start_continue(place: Place) -> dict[str, str]:
    model = place.target.model
    settings = f"name: local\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: {model}\n    provider: openai\n"
    settings += f"    model: {model}\n    apiBase: {place.target.url}/v1\n    apiKey: none\n"
    place.write("config.yaml", settings + "    capabilities: [tool_use]\n")
    return {}


AGENTS = (
    Agent("Claude Code", "claude", lambda _, text, again: ["-p", text, *["--continue"] * again, "--allowedTools", "Bash"]),
    Agent("Codex", "codex", ask_codex),
    Agent("Qwen Code", "qwen", lambda place, text, again: [*launched("qwen", place), "--yolo", *["--continue"] * again, text]),
    Agent("OpenCode", "opencode", lambda _, text, again: ["run", *["--continue"] * again, text]),
    Agent("aider", "aider", ask_aider, has_tools=False),
    Agent(
        "llm",
        "llm",
        lambda place, text, again: ["--continue", text] if again else ["-m", place.target.model, "-T", "llm_version", text],
        start_llm,
    ),
    Agent(
        "Continue",
        "cn",
        lambda place, text, again: ["-p", text, "--config", str(place.home / "config.yaml"), "--allow", "Bash", *["--resume"] * again],
        start_continue,
    ),
)


def try_agent(agent: Agent, target: Target, exchanges: list[Exchange], turns: int) -> list[str]:
    """What was wrong with it."""
    faults = []
    with tempfile.TemporaryDirectory(prefix=f"try-{agent.command}-") as folder:
        place = Place(Path(folder), target)
        environment = place.environment() | agent.environment(place)
        work = place.home / "work"
        subprocess.run(["git", "init", "--quiet", str(work)], check=True)
        for turn in range(turns):
            text = f"Turn {turn + 1}: {'say that it is done' if turn % 2 else MARK}, please."
            command = [agent.command, *agent.ask(place, text, turn > 0)]
            if fault := ask(command, work, environment):
                faults.append(f"turn {turn + 1}: {fault}")
                break
    refused = [e for e in exchanges if e.status != 200]
    faults += [f"HTTP {e.status} from {e.path}: {e.first[:200].decode(errors='replace')}" for e in refused[:2]]
    if agent.has_tools and not any(has_result(e.sent) for e in exchanges) and not faults:
        faults.append("no result of the tool was sent back")
    return faults


def ask(command: list[str], work: Path, environment: dict[str, str]) -> str | None:
    """One turn; what was wrong with it."""
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TURN_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {TURN_SECONDS} seconds"
    except OSError as error:  # such as a program for another processor
        return f"cannot be run: {error}"
    if done.returncode != 0:
        return f"exit status {done.returncode}: {(done.stderr or done.stdout)[-300:].strip()}"
    return None if DONE in done.stdout else f"printed {done.stdout[-200:].strip()!r}"


def has_result(sent: dict[str, Any]) -> bool:
    text = json.dumps(sent.get("messages") or sent.get("input"))
    is_result = '"role": "tool"' in text or "tool_result" in text or "call_output" in text
    return is_result and (RESULT in text or "llm_version" in text)


def version(agent: Agent) -> str:
    done = subprocess.run([agent.command, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+[\w.]*", done.stdout)
    return found[0] if found else "?"


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", action="append", help="a command, such as claude; repeatable")
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--serve", action="append", default=[], help="an option for the server")
    given = options.parse_args()
    print(isolate(), flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="try-agents-") as folder:
        model = Path(folder) / "random-agents"
        make = [sys.executable, str(TOOLS / "make_random_hybrid.py"), str(model), "--shape", "agents"]
        subprocess.run(make, check=True)
        exchanges: list[Exchange] = []
        with pippin_server(str(model), ["--memory", "2GB", *given.serve]) as served, forcing_proxy(served.url, exchanges) as url:
            print(f"{'agent':12} {'version':10} {'requests':>8} result")
            for agent in AGENTS:
                if given.only and agent.command not in given.only:
                    continue
                if shutil.which(agent.command) is None:
                    print(f"{agent.name:12} absent")
                    continue
                exchanges.clear()
                faults = try_agent(agent, Target(url, served.model, 131_072), exchanges, given.turns)
                failed |= bool(faults)
                print(f"{agent.name:12} {version(agent):10} {len(exchanges):8} {'; '.join(faults) or 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
