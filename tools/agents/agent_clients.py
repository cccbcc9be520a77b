"""How each agent is pointed at a server and asked for one turn. Knows no server of its own.

Every one is asked as its manual says, or as `pippin launch` starts it, without a change of its
settings but for the address, the model and the permission to run a shell command.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pippin.cli.coding_agents import CODING_AGENTS, Target


@dataclass(frozen=True)
class Place:
    """Where an agent runs, and whom it asks."""

    home: Path
    url: str  # without /v1
    model: str
    context: int

    @property
    def target(self) -> Target:
        return Target(self.url, self.model, self.context)

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def write(self, name: str, text: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def environment(self) -> dict[str, str]:
        """A home of its own, and nothing of the user's but the PATH."""
        home = str(self.home)
        places = {f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CONFIG", "DATA")}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        return {**kept, **places, "HOME": home}


Start = Callable[[Place], dict[str, str]]  # writes settings; the environment that it needs
Ask = Callable[[Place, str, bool], list[str]]  # arguments for a text; True: not the first one


@dataclass(frozen=True)
class AgentClient:
    name: str
    command: str
    start: Start
    ask: Ask
    has_tools: bool = True
    one_process: tuple[str, ...] = ()  # arguments to read turns as lines of JSON; none: it cannot


def _launched(command: str, place: Place) -> list[str]:
    """The arguments that `pippin launch` starts an agent with."""
    return CODING_AGENTS[command].arguments(place.target)


def _launch(command: str) -> Start:
    """The variables that `pippin launch` starts an agent with."""
    return lambda place: CODING_AGENTS[command].environment(place.target)


def _ask_claude(_: Place, text: str, again: bool) -> list[str]:
    return ["-p", text, *(["--continue"] if again else []), "--allowedTools", "Bash"]


_CLAUDE_LINES = ("-p", "--verbose", "--input-format", "stream-json")
_CLAUDE_LINES += ("--output-format", "stream-json", "--allowedTools", "Bash")


def _ask_codex(place: Place, text: str, again: bool) -> list[str]:
    """Its own sandbox makes a network namespace, which not every place allows."""
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    resume = ["resume", "--last"] if again else []
    return [*_launched("codex", place), "exec", *resume, *options, text]


def _ask_qwen(place: Place, text: str, again: bool) -> list[str]:
    return [*_launched("qwen", place), "--yolo", *(["--continue"] if again else []), text]


def _ask_opencode(_: Place, text: str, again: bool) -> list[str]:
    return ["run", *(["--continue"] if again else []), text]


def _ask_aider(place: Place, text: str, again: bool) -> list[str]:
    restored = ["--restore-chat-history"] if again else []
    options = ["--yes-always", "--no-git", "--no-check-update", *restored]
    return [*_launched("aider", place), *options, "--message", text]


def _start_llm(place: Place) -> dict[str, str]:
    settings = [
        f"- model_id: {place.model}",
        f"  model_name: {place.model}",
        f"  api_base: {place.v1}",
        "  supports_tools: true\n",
    ]
    place.write("llm/extra-openai-models.yaml", "\n".join(settings))
    return {"LLM_USER_PATH": str(place.home / "llm")}


def _ask_llm(place: Place, text: str, again: bool) -> list[str]:
    return ["--continue", text] if again else ["-m", place.model, "-T", "llm_version", text]


def _start_continue(place: Place) -> dict[str, str]:
    settings = [
        "name: local\nversion: 1.0.0\nschema: v1\nmodels:",
        f"  - name: {place.model}\n    provider: openai\n    model: {place.model}",
        f"    apiBase: {place.v1}\n    apiKey: none\n    capabilities: [tool_use]\n",
    ]
    place.write("config.yaml", "\n".join(settings))
    return {}


def _ask_continue(place: Place, text: str, again: bool) -> list[str]:
    options = ["--config", str(place.home / "config.yaml"), "--allow", "Bash"]
    return ["-p", text, *options, *(["--resume"] if again else [])]


AGENTS = (
    AgentClient("Claude Code", "claude", _launch("claude"), _ask_claude, one_process=_CLAUDE_LINES),
    AgentClient("Codex", "codex", _launch("codex"), _ask_codex),
    AgentClient("Qwen Code", "qwen", _launch("qwen"), _ask_qwen),
    AgentClient("OpenCode", "opencode", _launch("opencode"), _ask_opencode),
    AgentClient("aider", "aider", _launch("aider"), _ask_aider, has_tools=False),
    AgentClient("llm", "llm", _start_llm, _ask_llm),
    AgentClient("Continue", "cn", _start_continue, _ask_continue),
)
