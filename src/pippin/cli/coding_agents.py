"""How coding agents are pointed at a server: by variables and arguments. Writes no settings."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn

from cyclopts import Parameter

from pippin.cli.options import Url
from pippin.errors import LoadError
from pippin.terminal.server_client import api_key_of_environment, connect


@dataclass(frozen=True)
class Target:
    url: str  # without /v1
    model: str
    context: int  # of the model, in tokens; agents that do not know it assume a vendor's
    key: str | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def token(self) -> str:
        """Agents do not start without one."""
        return self.key or "none"

    @property
    def max_tokens(self) -> int:
        """Of one reply. Agents ask for 32,000, which with their prompts may not fit a context."""
        return min(32_000, self.context // 4)


@dataclass(frozen=True)
class CodingAgent:
    name: str
    command: str
    install: str
    environment: Callable[[Target], dict[str, str]]
    arguments: Callable[[Target], list[str]] = lambda target: []
    unset: tuple[str, ...] = ()  # variables of the user's that would win
    prompt_tokens: int = 0  # of its own instructions and tools, measured


def _claude(target: Target) -> dict[str, str]:
    sizes = ("OPUS", "SONNET", "HAIKU")
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in sizes))
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.token,
        **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), target.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
    }


def _codex(target: Target) -> dict[str, str]:
    return {} if target.key is None else {"PIPPIN_API_KEY": target.key}


def _codex_arguments(target: Target) -> list[str]:
    provider = {"name": "Pippin", "base_url": target.v1, "wire_api": "responses"}
    if target.key is not None:
        provider["env_key"] = "PIPPIN_API_KEY"
    settings: dict[str, str | int] = {"model": target.model, "model_provider": "pippin"}
    settings["model_context_window"] = target.context
    settings |= {f"model_providers.pippin.{name}": value for name, value in provider.items()}
    # A string of TOML is one of JSON.
    return [word for name, value in settings.items() for word in ("-c", f"{name}={_json(value)}")]


def _openai(target: Target) -> dict[str, str]:
    names = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
    return {**dict.fromkeys(names, target.v1), "OPENAI_API_KEY": target.token}


def _qwen(target: Target) -> dict[str, str]:
    most = str(target.max_tokens)
    return {**_openai(target), "OPENAI_MODEL": target.model, "QWEN_CODE_MAX_OUTPUT_TOKENS": most}


def _opencode(target: Target) -> dict[str, str]:
    limit = {"context": target.context, "output": target.max_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": target.v1, "apiKey": target.token},
        "models": {target.model: {"limit": limit}},
    }
    settings = {"provider": {"pippin": provider}, "model": f"pippin/{target.model}"}
    return {"OPENCODE_CONFIG_CONTENT": _json(settings)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


CODING_AGENTS = {
    agent.command: agent
    for agent in (
        CodingAgent(
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            _claude,
            unset=("ANTHROPIC_API_KEY",),
            prompt_tokens=32_800,
        ),
        CodingAgent(
            "Codex",
            "codex",
            "npm install -g @openai/codex",
            _codex,
            _codex_arguments,
            prompt_tokens=8_700,
        ),
        CodingAgent(
            "Qwen Code",
            "qwen",
            "npm install -g @qwen-code/qwen-code",
            _qwen,
            lambda target: ["--auth-type", "openai"],
            prompt_tokens=17_700,
        ),
        CodingAgent(
            "OpenCode", "opencode", "npm install -g opencode-ai", _opencode, prompt_tokens=7_400
        ),
        CodingAgent(
            "aider",
            "aider",
            "python -m pip install aider-install && aider-install",
            _openai,
            lambda target: ["--model", f"openai/{target.model}"],
        ),
    )
}


AgentName = Literal["claude", "codex", "qwen", "opencode", "aider"]


def launch(
    agent: AgentName,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    url: Url = None,
) -> NoReturn:
    """
    Parameters
    ----------
    agent
        Command of the agent.
    arguments
        Arguments of the agent, after `--`.
    """
    chosen = CODING_AGENTS[agent]
    program = shutil.which(chosen.command)
    if program is None:
        raise LoadError(
            f"{chosen.name} is not installed: there is no {chosen.command} on the PATH. Install it "
            f"with `{chosen.install}`"
        )
    with connect(url, api_key_of_environment()) as client:
        served = client.get("/v1/models")["data"][0]
        target = Target(client.url, served["id"], served["max_model_len"], client.api_key)
    if 2 * target.context < 3 * chosen.prompt_tokens:
        print(
            f"pippin: {target.model} has a context of {target.context:,} tokens, and the prompts "
            f"of {chosen.name} start with about {chosen.prompt_tokens:,}: serve a model with a "
            "longer one, and without a --max-len that cuts it",
            file=sys.stderr,
        )
    kept = {name: value for name, value in os.environ.items() if name not in chosen.unset}
    # This process is the agent from here on, in this terminal and with its exit status.
    words = [chosen.command, *chosen.arguments(target), *arguments]
    os.execve(program, words, kept | chosen.environment(target))
